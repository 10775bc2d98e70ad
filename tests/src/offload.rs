//! Switches offloads of a device on and off, by the requests of `ethtool -K`.

use std::io;

use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

nix::ioctl_readwrite_bad!(
    /// The ioctl that sends an ethtool request to a device's driver.
    ask_driver,
    libc::SIOCETHTOOL,
    libc::ifreq
);

/// An offload of a network device, with the number of the request that sets it.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Offload {
    /// The device computes checksums of sent packets (`ETHTOOL_STXCSUM`).
    TransmitChecksum = 0x17,
    /// The device splits large TCP packets into segments when it sends them (TSO, `ETHTOOL_STSO`).
    TcpSegmentation = 0x1f,
    /// Generic segmentation offload of sent packets (GSO, `ETHTOOL_SGSO`).
    Segmentation = 0x24,
    /// VLAN tags of sent and received packets are in the packets' metadata, not in the frames (`ETHTOOL_SFLAGS`).
    /// [`set`] can only switch this off: the request takes a bit mask of flags, and [`set`] passes 0 or 1.
    VlanTags = 0x26,
    /// Generic receive offload (GRO, `ETHTOOL_SGRO`). It gives a veth a NAPI context, as network cards have.
    Reception = 0x2c,
}

/// Argument of the requests, `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Switches an offload of a device in this thread's network namespace on or off.
pub fn set(device: &str, offload: Offload, on: bool) -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut value = Value { command: offload as u32, data: u32::from(on) };
    // SAFETY: an ifreq is plain old data; all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{device} is not a valid device name"),
        ));
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
