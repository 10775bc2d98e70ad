//! Socket features that the standard library lacks: connects that count SYNs, path MTU, the error queue.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    time::Duration,
};

use nix::{
    cmsg_space,
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, SockaddrStorage, connect, recvmsg,
        setsockopt, socket,
        sockopt::{Ipv4RecvErr, Ipv4Ttl, Ipv6RecvErr, Ipv6Ttl},
    },
};

use crate::netns::Netns;

/// Starts to connect to `to` without waiting. Returns only errors of the system call itself, such as a missing route.
pub fn begin_connect(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(fd.into()),
        Err(error) => Err(error.into()),
    }
}

/// Connects to `to`; fails if the connection is refused, if no answer arrives within `limit`, or if the kernel has
/// retransmitted the SYN. (The duration does not show a retransmission: the kernel retransmits after a second, but on a
/// slow machine, a connect without a retransmission may also take that long.)
pub fn connect_by_first_syn(to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = begin_connect(to)?;
    let limit = PollTimeout::try_from(limit).map_err(io::Error::other)?;
    let answered = poll(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLOUT)], limit)? > 0;
    let error = stream.take_error()?;
    let lost = retransmissions(&stream)?;
    if answered && lost > 0 {
        return Err(io::Error::other(format!("{lost} SYNs to {to} were retransmitted, then: {error:?}")));
    }
    if !answered {
        return Err(io::ErrorKind::TimedOut.into());
    }
    stream.set_nonblocking(false)?;
    error.map_or(Ok(stream), Err)
}

/// Number of segments that the kernel has retransmitted on this socket, including SYNs (`TCP_INFO`).
fn retransmissions(stream: &TcpStream) -> io::Result<u32> {
    // SAFETY: `tcp_info` is integers only; zero is valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).map_err(io::Error::other)?;
    let fd = stream.as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to `info`, which has that size, and the length to `len`.
    let result = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    nix::Error::result(result)?;
    Ok(info.tcpi_total_retrans)
}

/// Number of TCP sockets in a namespace whose close is not complete. It counts sockets that this end closed before the
/// other end did, until they are in TIME-WAIT. It also counts sockets whose inode is among `closed`: a child that
/// another thread has forked still holds a duplicate of such a socket's descriptor until the child executes its
/// program.
pub fn closing_connections(netns: &Netns, closed: &[u64]) -> io::Result<usize> {
    /// States `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2` and `TCP_CLOSING` (include/net/tcp_states.h), as `/proc/net/tcp` shows
    /// them.
    const CLOSING: [&str; 3] = ["04", "05", "0B"];
    let tables = netns.run(|| {
        ["tcp", "tcp6"]
            .into_iter()
            .map(|name| fs::read_to_string(format!("/proc/thread-self/net/{name}")))
            .collect()
    });
    let tables: Vec<String> = tables?;
    let is_closing = |line: &&str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_held =
            fields.get(9).and_then(|inode| inode.parse().ok()).is_some_and(|it| closed.contains(&it));
        is_held || fields.get(3).is_some_and(|state| CLOSING.contains(state))
    };
    Ok(tables.iter().flat_map(|table| table.lines()).filter(is_closing).count())
}

/// Inode number of a socket, as `/proc/net/tcp` shows it while a process has the socket open.
pub fn inode(stream: &TcpStream) -> io::Result<u64> {
    Ok(nix::sys::stat::fstat(stream)?.st_ino)
}

/// Disconnects a connected UDP socket (connect(2) with `AF_UNSPEC`).
pub fn disconnect(socket: &UdpSocket) -> io::Result<()> {
    const LENGTH: libc::socklen_t = 16;
    const { assert!(size_of::<libc::sockaddr>() == LENGTH as usize) };
    // SAFETY: all bytes of the structure may be 0; its family is then `AF_UNSPEC`.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads `LENGTH` bytes of the address, which has that size.
    let result = unsafe { libc::connect(socket.as_raw_fd(), &raw const nowhere, LENGTH) };
    nix::Error::result(result)?;
    Ok(())
}

/// Level and name of a socket option, for IPv4 and for IPv6.
struct FamilyOption {
    v4: (libc::c_int, libc::c_int),
    v6: (libc::c_int, libc::c_int),
}

const MTU: FamilyOption =
    FamilyOption { v4: (libc::IPPROTO_IP, libc::IP_MTU), v6: (libc::IPPROTO_IPV6, libc::IPV6_MTU) };
const MTU_DISCOVER: FamilyOption = FamilyOption {
    v4: (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    v6: (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
};

impl FamilyOption {
    fn of(&self, socket: &UdpSocket) -> io::Result<(libc::c_int, libc::c_int)> {
        Ok(if socket.local_addr()?.is_ipv4() { self.v4 } else { self.v6 })
    }
}

/// Path MTU in bytes that the kernel has cached for the destination of a connected socket (`IP_MTU`, `IPV6_MTU`).
pub fn path_mtu(socket: &UdpSocket) -> io::Result<u32> {
    let (level, name) = MTU.of(socket)?;
    let mut mtu: libc::c_int = 0;
    let mut len: libc::socklen_t = 4;
    // SAFETY: the kernel writes at most `len` bytes to `mtu`, which has that size, and the length to `len`.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut mtu).cast(), &raw mut len) };
    nix::Error::result(result)?;
    u32::try_from(mtu).map_err(io::Error::other)
}

/// Makes the kernel never fragment packets from this socket (`IP_PMTUDISC_DO`); IPv4 packets get the flag "don't
/// fragment".
pub fn never_fragment(socket: &UdpSocket) -> io::Result<()> {
    let (level, name) = MTU_DISCOVER.of(socket)?;
    // `IPV6_PMTUDISC_DO` has the same value.
    let value: libc::c_int = libc::IP_PMTUDISC_DO;
    // SAFETY: the kernel reads four bytes of `value`.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), 4) };
    nix::Error::result(result)?;
    Ok(())
}

/// Sets the hop limit (TTL) of packets from this socket (`IP_TTL`, `IPV6_UNICAST_HOPS`).
pub fn set_hops(socket: &UdpSocket, hops: u32) -> io::Result<()> {
    let hops = libc::c_int::try_from(hops).map_err(io::Error::other)?;
    if socket.local_addr()?.is_ipv4() {
        setsockopt(socket, Ipv4Ttl, &hops)?;
    } else {
        setsockopt(socket, Ipv6Ttl, &hops)?;
    }
    Ok(())
}

/// Adds options without effect to the headers of all packets from this socket: IPv4 options, or an IPv6 extension
/// header with destination options.
pub fn lengthen_headers(socket: &UdpSocket) -> io::Result<()> {
    // IPv4: four times "no operation" (RFC 791 §3.1). IPv6: 8 bytes with 4 bytes of padding (RFC 8200 §4.2, §4.6).
    let (level, name, value): (_, _, &[u8]) = if socket.local_addr()?.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_OPTIONS, &[1, 1, 1, 1])
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS, &[0, 0, 1, 4, 0, 0, 0, 0])
    };
    let len = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads `len` bytes of `value`, which has that length.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), len) };
    nix::Error::result(result)?;
    Ok(())
}

/// Makes the kernel queue ICMP errors for this socket, for [`next_error`].
pub fn queue_errors(socket: &UdpSocket) -> io::Result<()> {
    if socket.local_addr()?.is_ipv4() {
        setsockopt(socket, Ipv4RecvErr, &true)?;
    } else {
        setsockopt(socket, Ipv6RecvErr, &true)?;
    }
    Ok(())
}

/// An entry of a socket's error queue (`MSG_ERRQUEUE`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedError {
    /// The error number, such as `EMSGSIZE`.
    pub errno: nix::Error,
    /// Whether the error came in an ICMP or ICMPv6 message, not from this host itself.
    pub from_icmp: bool,
    /// With `EMSGSIZE`: the path MTU in bytes.
    pub info: u32,
    /// Source address of the ICMP message.
    pub offender: Option<IpAddr>,
    /// Destination of the datagram that the ICMP message quotes.
    pub destination: SocketAddr,
}

/// Removes and returns the next entry of the error queue; `None` if the queue is empty.
pub fn next_error(socket: &UdpSocket) -> io::Result<Option<QueuedError>> {
    let mut payload = [0; 2048];
    let mut iov = [io::IoSliceMut::new(&mut payload)];
    let mut space = cmsg_space!([u8; 64]);
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let message = match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut iov, Some(&mut space), flags) {
        Ok(message) => message,
        Err(nix::Error::EAGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let destination =
        message.address.as_ref().and_then(socket_address).ok_or_else(|| missing("destination"))?;
    for control in message.cmsgs()? {
        let (error, offender) = if let ControlMessageOwned::Ipv4RecvErr(error, offender) = control {
            (error, offender.map(|o| IpAddr::from(o.sin_addr.s_addr.to_ne_bytes())))
        } else if let ControlMessageOwned::Ipv6RecvErr(error, offender) = control {
            (error, offender.map(|o| IpAddr::from(o.sin6_addr.s6_addr)))
        } else {
            continue;
        };
        return Ok(Some(QueuedError {
            errno: nix::Error::from_raw(i32::try_from(error.ee_errno).map_err(io::Error::other)?),
            from_icmp: matches!(error.ee_origin, libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6),
            info: error.ee_info,
            offender,
            destination,
        }));
    }
    Err(missing("extended error"))
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("an entry of the error queue has no {what}"))
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|a| SocketAddr::from((a.ip(), a.port())));
    v4.or_else(|| address.as_sockaddr_in6().map(|a| SocketAddr::from((a.ip(), a.port()))))
}
