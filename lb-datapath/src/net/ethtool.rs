//! Reads features of a device that the kernel reports only through ethtool requests.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// The request `ETHTOOL_GFLAGS`, and its flag `ETH_FLAG_RXVLAN`, from include/uapi/linux/ethtool.h.
const GET_FLAGS: u32 = 0x25;
const RECEIVE_VLAN: u32 = 1 << 8;

/// Request and answer, `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Whether the device strips VLAN tags from the frames that it receives (`ethtool -k`: rx-vlan-offload), so that XDP
/// programs see frames of every VLAN without a tag.
pub(crate) fn strips_vlan_tags(device: &str) -> io::Result<bool> {
    // SAFETY: the call takes numbers and returns a new descriptor, or -1.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let mut value = Value { command: GET_FLAGS, data: 0 };
    // SAFETY: an ifreq is plain old data; all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        // `c_char` is signed on x86 and unsigned on arm64.
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the name ends with a zero (checked above), and the data is the structure that the command fills in; both
    // outlive the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value.data & RECEIVE_VLAN != 0)
}
