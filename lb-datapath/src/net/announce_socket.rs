//! Sends announcements, and joins the multicast groups that receive neighbour solicitations for announced addresses.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use crate::error::DatapathError;

/// Maximum number of groups that one socket joins, because the kernel charges each group to the socket's option memory
/// (`net.core.optmem_max`).
const GROUPS_OF_SOCKET: usize = 100;

/// A packet socket that sends frames, and UDP sockets that join multicast groups, in the network namespace of the
/// thread that created them.
#[derive(Debug)]
pub struct AnnounceSocket {
    socket: OwnedFd,
    /// For each interface index and group: the index in `members` of the socket that has joined the group.
    groups: BTreeMap<(u32, Ipv6Addr), usize>,
    members: Vec<UdpSocket>,
}

impl AnnounceSocket {
    /// Opens the socket.
    ///
    /// # Errors
    ///
    /// No packet socket can be opened, for example because the process lacks CAP_NET_RAW.
    pub fn open() -> Result<Self, DatapathError> {
        // SAFETY: the call takes numbers and returns a new descriptor, or -1. Protocol 0: the socket receives nothing.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            let error = io::Error::last_os_error();
            return Err(DatapathError::netlink("open a packet socket for announcements", error));
        }
        // SAFETY: the descriptor is open and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        Ok(Self { socket, groups: BTreeMap::new(), members: Vec::new() })
    }

    /// Sends a frame, which begins with its Ethernet header, through the device with this index.
    pub fn send(&self, device: u32, frame: &[u8]) -> io::Result<()> {
        // SAFETY: a sockaddr_ll is plain old data; all zeros are valid.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
        to.sll_ifindex = i32::try_from(device).map_err(io::Error::other)?;
        to.sll_halen = 6;
        let mac = frame.get(..6).ok_or(io::ErrorKind::InvalidInput)?;
        to.sll_addr[..6].copy_from_slice(mac);
        let protocol = frame.get(12..14).ok_or(io::ErrorKind::InvalidInput)?;
        to.sll_protocol = u16::from_ne_bytes([protocol[0], protocol[1]]);
        let length = libc::socklen_t::try_from(size_of_val(&to)).map_err(io::Error::other)?;
        // SAFETY: the frame and the address are valid for their lengths during the call.
        let sent = unsafe {
            let to = (&raw const to).cast();
            libc::sendto(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, to, length)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Joins a multicast group on a device, unless it was joined before. The device then receives frames to the group,
    /// and switches with multicast snooping forward them.
    pub fn join(&mut self, device: u32, group: Ipv6Addr) -> io::Result<()> {
        if self.groups.contains_key(&(device, group)) {
            return Ok(());
        }
        let used = |socket: usize| self.groups.values().filter(|member| **member == socket).count();
        let free = (0..self.members.len()).find(|socket| used(*socket) < GROUPS_OF_SOCKET);
        let socket = match free {
            Some(socket) => socket,
            None => {
                self.members.push(UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?);
                self.members.len() - 1
            }
        };
        self.members[socket].join_multicast_v6(&group, device)?;
        self.groups.insert((device, group), socket);
        Ok(())
    }

    /// Leaves all groups for which `wanted` is false.
    pub fn leave_others(&mut self, wanted: impl Fn(u32, Ipv6Addr) -> bool) {
        let Self { groups, members, .. } = self;
        groups.retain(|(device, group), socket| {
            let keep = wanted(*device, *group);
            if !keep {
                // Fails harmlessly if the device, and with it the membership, is gone.
                drop(members[*socket].leave_multicast_v6(group, *device));
            }
            keep
        });
    }
}
