//! Sends floods of packets from forged addresses.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::Range,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use etherparse::PacketBuilder;
use lb_tests::netns::Netns;
use nix::libc;

/// Networks of the forged addresses: those reserved for benchmarks (RFC 2544 §C.2.2, RFC 5180 §8). Nodes route them
/// to the client.
pub(crate) const FORGED: [&str; 2] = ["198.18.0.0/15", "2001:2::/48"];

/// A kind of forged packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forged {
    Syn,
    /// A FIN without ACK, with the sequence number after the SYN's.
    BareFin,
    /// A FIN with a guessed acknowledgement number, and the sequence number after the SYN's.
    Fin,
    /// An ACK with a guessed acknowledgement number, and the sequence number after the SYN's.
    Ack,
    Datagram,
}

/// The guessed acknowledgement number. Backends choose random sequence numbers, so the guess is almost never right.
const GUESS: u32 = 0x4000_0000;

/// Sends `count` SYNs from `netns` to an address, each from a different forged source. The numbers of the sources begin
/// with `first`.
pub(crate) fn syns(netns: &Netns, to: SocketAddr, first: u32, count: u32) -> io::Result<()> {
    forge(netns, to, first..first + count, Forged::Syn)
}

/// Sends one packet from `netns` to `to` for each of the numbers, each from the forged source with that number.
pub(crate) fn forge(netns: &Netns, to: SocketAddr, numbers: Range<u32>, kind: Forged) -> io::Result<()> {
    let socket = netns.run(|| open(to.is_ipv6()))?;
    for number in numbers {
        send(&socket, to, &packet(number, to, kind))?;
    }
    Ok(())
}

/// Bytes of a forged packet, including its IP header, from the source with this number.
pub(crate) fn packet(number: u32, to: SocketAddr, kind: Forged) -> Vec<u8> {
    let [_, a, b, c] = number.to_be_bytes();
    let builder = match to.ip() {
        IpAddr::V4(vip) => PacketBuilder::ipv4([198, 18 | (a & 1), b, c], vip.octets(), 64),
        IpAddr::V6(vip) => {
            let source = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, u16::from(a), u16::from_be_bytes([b, c]));
            PacketBuilder::ipv6(source.octets(), vip.octets(), 64)
        }
    };
    let port = 1024 + (number % 60_000) as u16;
    let mut packet = Vec::new();
    if kind == Forged::Datagram {
        builder.udp(port, to.port()).write(&mut packet, b"?").unwrap();
        return packet;
    }
    let segment = |seq| builder.tcp(port, to.port(), seq, 1024);
    match kind {
        Forged::Syn | Forged::Datagram => segment(number).syn(),
        Forged::BareFin => segment(number + 1).fin(),
        Forged::Fin => segment(number + 1).fin().ack(GUESS),
        Forged::Ack => segment(number + 1).ack(GUESS),
    }
    .write(&mut packet, &[])
    .unwrap();
    packet
}

/// Opens a raw socket for packets that include their IP header (`IPPROTO_RAW`, raw(7)).
pub(crate) fn open(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: the call takes numbers and returns a new descriptor, or -1.
    let fd = unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
    let fd = nix::Error::result(fd)?;
    // SAFETY: the descriptor is open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn send(socket: &OwnedFd, to: SocketAddr, packet: &[u8]) -> io::Result<()> {
    // The port must be 0 in IPv6, and is ignored in IPv4.
    let to = SocketAddr::new(to.ip(), 0);
    let result = nix::sys::socket::sendto(
        socket.as_raw_fd(),
        packet,
        &nix::sys::socket::SockaddrStorage::from(to),
        nix::sys::socket::MsgFlags::empty(),
    );
    match result {
        // A full queue drops packets, as a wire does, so that is no error.
        Ok(_) | Err(nix::Error::ENOBUFS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Adds routes on a node so that replies to forged addresses go to the client, which drops them.
pub(crate) fn route_back(node: &Netns, gateways: (Ipv4Addr, Ipv6Addr)) {
    let routes = FORGED.iter().zip([gateways.0.to_string(), gateways.1.to_string()]);
    let commands: String = routes.map(|(network, via)| format!("route add {network} via {via}\n")).collect();
    node.ip(&commands).unwrap();
}
