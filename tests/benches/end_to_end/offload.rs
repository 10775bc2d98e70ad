//! What a device does for the stack: by the requests that `ethtool -K` makes.

use std::io;

use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

nix::ioctl_readwrite_bad!(
    /// Asks a device's driver.
    ask_driver,
    libc::SIOCETHTOOL,
    libc::ifreq
);

/// Something that a device can do.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Offload {
    /// Complete checksums of what the stack sends (`ETHTOOL_STXCSUM`).
    TransmitChecksum = 0x17,
    /// Cut what TCP sends into segments (`ETHTOOL_STSO`).
    TcpSegmentation = 0x1f,
    /// Take what the stack has not cut yet (`ETHTOOL_SGSO`).
    Segmentation = 0x24,
    /// Put together what arrives (`ETHTOOL_SGRO`). A veth that does so has a NAPI context, as network cards have.
    Reception = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Switches it on or off, for a device of the network namespace of this thread.
pub(crate) fn set(device: &str, offload: Offload, on: bool) -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut value = Value { command: offload as u32, data: u32::from(on) };
    // SAFETY: an ifreq is plain old data, for which all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{device} is no name of a device")));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the name ends with a zero (checked above), and the data is the structure that these commands take.
    unsafe { ask_driver(std::os::fd::AsRawFd::as_raw_fd(&socket), &raw mut request) }
        .map_err(|error| io::Error::other(format!("{offload:?} of {device}: {error}")))?;
    Ok(())
}
