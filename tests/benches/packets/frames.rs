//! The packets that programs get in the benchmark.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, bail, ensure};
use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpHeader, TransportSlice};
use lb_ebpf_bench::{RESTORED_V4, RESTORED_V6, Template};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp(Flags),
    Udp,
}

/// Combinations of TCP flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flags {
    Syn,
    SynAck,
    Ack,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    Client,
    /// The Service's address, or the backend.
    Server,
}

/// A packet, and how many flows send packets like it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    bytes: Vec<u8>,
    sender: Sender,
    flows: u32,
    first: u32,
    device: u32,
    is_mixed: bool,
}

/// Interface index of the loopback device, which stands for any device that is no wire.
const LOOPBACK: u32 = 1;

/// Address of the first flow's client, in each family. [`lb_ebpf_bench::Variation`] computes the other clients'
/// addresses.
const CLIENT_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 255));
const CLIENT_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0x0a00, 0x00ff));
const CLIENT_PORT: u16 = 0x8000;
/// Two bytes of the first flow's packet: the upper half of TCP's acknowledgement number, or the first two bytes of a
/// datagram's payload. In packets of other flows, `restore` decreases this value by as much as it increases the
/// client's port, so that the checksum stays correct.
const BALANCE: u16 = 0x7fff;

const PEER: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 1];
/// MAC address of the node.
pub(crate) const NODE: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 2];
/// Number of bytes after the transport header: enough for the bytes that `restore` writes into a datagram.
const PAYLOAD: usize = 18;
const TTL: u8 = 61;
const SEQUENCE: u32 = 1000;
const WINDOW: u16 = 0xfff0;

impl Frame {
    /// A packet from the first flow's client to `server`, or in the opposite direction.
    pub(crate) fn new(transport: Transport, sender: Sender, server: SocketAddr) -> anyhow::Result<Self> {
        let client = Self::client(server);
        let (from, to) = match sender {
            Sender::Client => (client, server),
            Sender::Server => (server, client),
        };
        Ok(Self {
            bytes: build(transport, from, to)?,
            sender,
            flows: 1,
            first: 0,
            device: LOOPBACK,
            is_mixed: true,
        })
    }

    /// Address and port of the first flow's client, in the family of `server`.
    pub(crate) fn client(server: SocketAddr) -> SocketAddr {
        (if server.is_ipv4() { CLIENT_V4 } else { CLIENT_V6 }, CLIENT_PORT).into()
    }

    /// A packet of a single flow between these addresses.
    pub(crate) fn between(transport: Transport, from: SocketAddr, to: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self::of_bytes(build(transport, from, to)?))
    }

    /// A packet with these bytes, of a single flow.
    pub(crate) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self { bytes, sender: Sender::Client, flows: 1, first: 0, device: LOOPBACK, is_mixed: true }
    }

    /// The same packet, sent by this number of flows.
    pub(crate) fn flows(self, flows: u32) -> Self {
        Self { flows, ..self }
    }

    /// The same packet for half of its flows: for the first half if `half` is 0, for the second half if `half` is 1.
    pub(crate) fn half(self, half: u32) -> Self {
        let flows = (self.flows / 2).max(1);
        // If there is only one flow, both halves are that flow.
        let first = if self.flows > 1 { half * flows } else { 0 };
        self.flows(flows).starting_at(first)
    }

    /// The same packet, for flows from number `first` on.
    pub(crate) fn starting_at(self, first: u32) -> Self {
        Self { first, ..self }
    }

    /// The packet `other`, for the same flows and device as this one.
    pub(crate) fn clone_extent(&self, other: Self) -> Self {
        Self { flows: self.flows, first: self.first, device: self.device, ..other }
    }

    /// The same packet, arriving on the device with this interface index.
    pub(crate) fn through(self, device: u32) -> Self {
        Self { device, ..self }
    }

    /// The same packets in the order of their flows; by default the order is hard to predict.
    pub(crate) fn in_order(self) -> Self {
        Self { is_mixed: false, ..self }
    }

    /// Interface index of the device that the packets arrive on.
    pub(crate) const fn device(&self) -> u32 {
        self.device
    }

    /// Number of flows that send the packet.
    pub(crate) const fn count(&self) -> u32 {
        self.flows
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn is_udp(&self) -> bool {
        let protocol = if self.is_v6() { 20 } else { 23 };
        self.bytes.get(protocol) == Some(&17)
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.bytes.get(12..14) == Some(&[0x86, 0xdd])
    }

    /// The template from which `restore` writes each flow's packet.
    pub(crate) fn template(&self) -> anyhow::Result<Template> {
        let is_v6 = self.is_v6();
        let length = if is_v6 { RESTORED_V6 } else { RESTORED_V4 };
        ensure!(self.flows.is_power_of_two(), "the number of flows, {}, is not a power of two", self.flows);
        let mut bytes = [0; 80];
        let headers = self.bytes.get(..length).context("the packet is shorter than its headers")?;
        bytes[..length].copy_from_slice(headers);
        let is_reply = self.sender == Sender::Server;
        let [is_v6, is_reply, is_mixed] = [is_v6, is_reply, self.is_mixed].map(u32::from);
        Ok(Template { bytes, is_v6, is_reply, mask: self.flows - 1, first: self.first, is_mixed, zero: 0 })
    }
}

fn build(transport: Transport, from: SocketAddr, to: SocketAddr) -> anyhow::Result<Vec<u8>> {
    let ethernet = PacketBuilder::ethernet2(PEER, NODE);
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ethernet.ipv4(source.octets(), destination.octets(), TTL)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            ethernet.ipv6(source.octets(), destination.octets(), TTL)
        }
        _ => bail!("{from} and {to} are of different families"),
    };
    let mut bytes = Vec::new();
    let mut payload = [0; PAYLOAD];
    match transport {
        Transport::Tcp(flags) => {
            let mut header = TcpHeader::new(from.port(), to.port(), SEQUENCE, WINDOW);
            header.acknowledgment_number = u32::from(BALANCE) << 16;
            header.syn = flags != Flags::Ack;
            header.ack = flags != Flags::Syn;
            ip.tcp_header(header).write(&mut bytes, &payload)?;
        }
        Transport::Udp => {
            payload[..2].copy_from_slice(&BALANCE.to_be_bytes());
            ip.udp(from.port(), to.port()).write(&mut bytes, &payload)?;
        }
    }
    Ok(bytes)
}

/// Addresses and kind of a packet, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Source address and port of the packet.
    pub(crate) from: SocketAddr,
    /// Destination address and port of the packet.
    pub(crate) to: SocketAddr,
    /// Whether the packet is a TCP RST.
    pub(crate) is_reset: bool,
}

/// Reads a packet.
///
/// # Errors
///
/// The packet is not TCP or UDP over IP, or a checksum is wrong.
pub(crate) fn read(bytes: &[u8]) -> anyhow::Result<Seen> {
    let packet = SlicedPacket::from_ethernet(bytes)?;
    let net = packet.net.context("not IP")?;
    let transport = packet.transport.context("no transport header")?;
    let (source, destination): (IpAddr, IpAddr) = match &net {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            ensure!(header.calc_header_checksum() == header.header_checksum, "the IPv4 checksum is wrong");
            (header.source.into(), header.destination.into())
        }
        NetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Arp(_) => bail!("ARP"),
    };
    let (ports, is_reset, found, right) = match &transport {
        TransportSlice::Tcp(tcp) => {
            let header = tcp.to_header();
            let right = match (source, destination) {
                (IpAddr::V4(from), IpAddr::V4(to)) => {
                    header.calc_checksum_ipv4_raw(from.octets(), to.octets(), tcp.payload())?
                }
                (IpAddr::V6(from), IpAddr::V6(to)) => {
                    header.calc_checksum_ipv6_raw(from.octets(), to.octets(), tcp.payload())?
                }
                _ => bail!("two families"),
            };
            ((header.source_port, header.destination_port), header.rst, header.checksum, right)
        }
        TransportSlice::Udp(udp) => {
            let header = udp.to_header();
            let right = match (source, destination) {
                (IpAddr::V4(from), IpAddr::V4(to)) => {
                    header.calc_checksum_ipv4_raw(from.octets(), to.octets(), udp.payload())?
                }
                (IpAddr::V6(from), IpAddr::V6(to)) => {
                    header.calc_checksum_ipv6_raw(from.octets(), to.octets(), udp.payload())?
                }
                _ => bail!("two families"),
            };
            ((header.source_port, header.destination_port), false, header.checksum, right)
        }
        TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_) => bail!("neither TCP nor UDP"),
    };
    ensure!(found == right, "the checksum of the transport header is {found:04x}, not {right:04x}");
    Ok(Seen { from: (source, ports.0).into(), to: (destination, ports.1).into(), is_reset })
}
