//! Sends ICMP echo requests, without the `ping` command.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    time::Instant,
};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recvmsg, sendto,
        setsockopt, socket, sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};

use crate::{client::limit, netns::Netns};

/// Types of echo requests and replies in ICMP and ICMPv6 (RFC 792 and RFC 4443).
const ECHO_REQUEST: [u8; 2] = [8, 128];
const ECHO_REPLY: [u8; 2] = [0, 129];

/// Sends an echo request with `payload` bytes from `netns` and returns the source of the reply.
pub fn ping(netns: &Netns, to: IpAddr, payload: usize) -> io::Result<IpAddr> {
    let v6 = usize::from(to.is_ipv6());
    let identifier = std::process::id().to_be_bytes();
    let mut request = vec![ECHO_REQUEST[v6], 0, 0, 0, identifier[2], identifier[3], 0, 1];
    request.extend_from_slice(crate::pattern::at(0, payload));
    if to.is_ipv4() {
        let checksum = internet_checksum(&request).to_be_bytes();
        request[2..4].copy_from_slice(&checksum);
    }
    let fd = netns.run(|| {
        let (family, protocol) = match to {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        Ok(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?)
    })?;
    let limit = limit();
    let seconds = limit.as_secs().try_into().map_err(io::Error::other)?;
    setsockopt(&fd, ReceiveTimeout, &TimeVal::new(seconds, 0))?;
    sendto(fd.as_raw_fd(), &request, &SockaddrStorage::from(SocketAddr::new(to, 0)), MsgFlags::empty())?;
    let start = Instant::now();
    while start.elapsed() < limit {
        let (message, from) = receive(fd.as_raw_fd())?;
        // A raw IPv4 socket also receives the IP header.
        let body = if to.is_ipv4() { &message[20..] } else { &message[..] };
        if body.first() == Some(&ECHO_REPLY[v6]) && body.get(4..) == request.get(4..) {
            return Ok(from);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn receive(fd: std::os::fd::RawFd) -> io::Result<(Vec<u8>, IpAddr)> {
    let mut buffer = vec![0; 65_536];
    let mut iov = [IoSliceMut::new(&mut buffer)];
    let message = recvmsg::<SockaddrStorage>(fd, &mut iov, None, MsgFlags::empty())?;
    let len = message.bytes;
    let v4 = message.address.as_ref().and_then(|a| a.as_sockaddr_in()).map(|a| IpAddr::from(a.ip()));
    let v6 = message.address.as_ref().and_then(|a| a.as_sockaddr_in6()).map(|a| IpAddr::from(a.ip()));
    let from = v4.or(v6).ok_or_else(|| io::Error::other("a datagram without a source"))?;
    buffer.truncate(len);
    Ok((buffer, from))
}

/// The Internet checksum of RFC 1071, with which ICMP messages are protected.
pub(crate) fn internet_checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).unwrap_or_default()
}
