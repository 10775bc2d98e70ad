//! Packets built with etherparse. Lengths and checksums are computed from scratch whenever a packet becomes bytes.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    EtherType, IpFragOffset, IpHeaders, IpNumber, Ipv4Header, Ipv6Extensions, Ipv6Header, TcpHeader,
    UdpHeader,
};
use lb_common::{Address, checksum::Sum, conntrack::Tuple};

/// The MAC address of the node's neighbour (RFC 7042 §2.1.2).
pub(crate) const PEER: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 1];
/// The MAC address of the node.
pub(crate) const NODE: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 2];

/// The EtherType of 802.1Q.
pub(crate) const VLAN: u16 = 0x8100;
/// The EtherType of 802.1ad.
pub(crate) const QINQ: u16 = 0x88a8;

#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// The Ethernet header; `None` on a device without link-layer header.
    pub(crate) ethernet: Option<Ethernet>,
    pub(crate) ip: IpHeaders,
    pub(crate) v6_fragment: Option<V6Fragment>,
    pub(crate) transport: Transport,
    pub(crate) payload: Vec<u8>,
    /// Number of zero bytes after the packet, such as those with which Ethernet pads frames to 60 bytes.
    pub(crate) padding: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Ethernet {
    pub(crate) destination: [u8; 6],
    pub(crate) source: [u8; 6],
    /// Tags from the outside in: EtherType and tag control information.
    pub(crate) tags: Vec<(u16, u16)>,
}

/// An IPv6 fragment header (RFC 8200 §4.5) after all other extension headers. The type in etherparse 0.19 has the bits
/// of offset and flag at the wrong positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct V6Fragment {
    /// The offset in units of 8 bytes.
    pub(crate) offset: u16,
    pub(crate) more: bool,
    pub(crate) identification: u32,
}

impl V6Fragment {
    fn bytes(self, next_header: IpNumber) -> Vec<u8> {
        let offset_and_flag = self.offset << 3 | u16::from(self.more);
        [&[next_header.0, 0][..], &offset_and_flag.to_be_bytes(), &self.identification.to_be_bytes()].concat()
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Transport {
    Tcp(TcpHeader),
    Udp {
        ports: (u16, u16),
        /// Whether the datagram has a checksum.
        checksum: bool,
    },
    /// An ICMP message of the packet's IP version.
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
    },
    /// SCTP with ports and verification tag; the chunks are the payload.
    Sctp {
        ports: (u16, u16),
        tag: u32,
    },
    /// Any protocol: everything after the IP header is payload.
    Raw(IpNumber),
}

/// Constructors.
impl Packet {
    fn new(source: IpAddr, destination: IpAddr, transport: Transport, payload: &[u8]) -> Self {
        let ip = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => IpHeaders::Ipv4(
                Ipv4Header {
                    identification: 0x1234,
                    dont_fragment: true,
                    time_to_live: 61,
                    source: source.octets(),
                    destination: destination.octets(),
                    ..Ipv4Header::default()
                },
                etherparse::Ipv4Extensions::default(),
            ),
            (IpAddr::V6(source), IpAddr::V6(destination)) => IpHeaders::Ipv6(
                Ipv6Header {
                    hop_limit: 61,
                    source: source.octets(),
                    destination: destination.octets(),
                    ..Ipv6Header::default()
                },
                Ipv6Extensions::default(),
            ),
            _ => panic!("{source} and {destination} are of different families"),
        };
        let ethernet = Some(Ethernet { destination: NODE, source: PEER, tags: Vec::new() });
        Self { ethernet, ip, v6_fragment: None, transport, payload: payload.to_vec(), padding: 0 }
    }

    /// A TCP segment without flags.
    pub(crate) fn tcp(from: SocketAddr, to: SocketAddr, seq: u32, payload: &[u8]) -> Self {
        let header = TcpHeader::new(from.port(), to.port(), seq, 0xfff0);
        Self::new(from.ip(), to.ip(), Transport::Tcp(header), payload)
    }

    pub(crate) fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Self {
        let transport = Transport::Udp { ports: (from.port(), to.port()), checksum: true };
        Self::new(from.ip(), to.ip(), transport, payload)
    }

    /// An SCTP packet with one chunk of this type.
    pub(crate) fn sctp(from: SocketAddr, to: SocketAddr, tag: u32, kind: u8, data: &[u8]) -> Self {
        let transport = Transport::Sctp { ports: (from.port(), to.port()), tag };
        let length = u16::try_from(4 + data.len()).unwrap().to_be_bytes();
        Self::new(from.ip(), to.ip(), transport, &[&[kind, 0], &length, data].concat())
    }

    pub(crate) fn icmp(from: IpAddr, to: IpAddr, [kind, code]: [u8; 2], rest: [u8; 4], data: &[u8]) -> Self {
        Self::new(from, to, Transport::Icmp { kind, code, rest }, data)
    }

    pub(crate) fn raw(from: IpAddr, to: IpAddr, protocol: IpNumber, payload: &[u8]) -> Self {
        Self::new(from, to, Transport::Raw(protocol), payload)
    }
}

/// Methods that read and change fields.
impl Packet {
    pub(crate) fn v4(&mut self) -> &mut Ipv4Header {
        match &mut self.ip {
            IpHeaders::Ipv4(header, _) => header,
            IpHeaders::Ipv6(..) => panic!("an IPv6 packet"),
        }
    }

    pub(crate) fn extensions(&mut self) -> &mut Ipv6Extensions {
        match &mut self.ip {
            IpHeaders::Ipv6(_, extensions) => extensions,
            IpHeaders::Ipv4(..) => panic!("an IPv4 packet"),
        }
    }

    pub(crate) fn tcp_header(&mut self) -> &mut TcpHeader {
        match &mut self.transport {
            Transport::Tcp(header) => header,
            other @ (Transport::Udp { .. }
            | Transport::Sctp { .. }
            | Transport::Icmp { .. }
            | Transport::Raw(_)) => {
                panic!("not TCP but {other:?}")
            }
        }
    }

    pub(crate) fn tags(&mut self) -> &mut Vec<(u16, u16)> {
        &mut self.ethernet.as_mut().unwrap().tags
    }

    /// The packet after `change`.
    #[must_use]
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    #[must_use]
    pub(crate) fn syn(self) -> Self {
        self.with(|packet| packet.tcp_header().syn = true)
    }

    #[must_use]
    pub(crate) fn fin(self) -> Self {
        self.with(|packet| packet.tcp_header().fin = true)
    }

    #[must_use]
    pub(crate) fn rst(self) -> Self {
        self.with(|packet| packet.tcp_header().rst = true)
    }

    #[must_use]
    pub(crate) fn ack(self, number: u32) -> Self {
        self.with(|packet| {
            packet.tcp_header().ack = true;
            packet.tcp_header().acknowledgment_number = number;
        })
    }

    /// The packet without its link-layer header.
    #[must_use]
    pub(crate) fn bare(self) -> Self {
        self.with(|packet| packet.ethernet = None)
    }

    /// The packet with this source address and port.
    #[must_use]
    pub(crate) fn from(mut self, source: SocketAddr) -> Self {
        self.set_source_ip(source.ip());
        match &mut self.transport {
            Transport::Tcp(header) => header.source_port = source.port(),
            Transport::Udp { ports, .. } => ports.0 = source.port(),
            Transport::Sctp { ports, .. } => ports.0 = source.port(),
            Transport::Icmp { .. } | Transport::Raw(_) => {}
        }
        self
    }

    /// The packet with this destination address and port.
    #[must_use]
    pub(crate) fn to(mut self, destination: SocketAddr) -> Self {
        match (&mut self.ip, destination.ip()) {
            (IpHeaders::Ipv4(header, _), IpAddr::V4(ip)) => header.destination = ip.octets(),
            (IpHeaders::Ipv6(header, _), IpAddr::V6(ip)) => header.destination = ip.octets(),
            _ => panic!("{destination} is of another family"),
        }
        match &mut self.transport {
            Transport::Tcp(header) => header.destination_port = destination.port(),
            Transport::Udp { ports, .. } => ports.1 = destination.port(),
            Transport::Sctp { ports, .. } => ports.1 = destination.port(),
            Transport::Icmp { .. } | Transport::Raw(_) => {}
        }
        self
    }

    fn set_source_ip(&mut self, source: IpAddr) {
        match (&mut self.ip, source) {
            (IpHeaders::Ipv4(header, _), IpAddr::V4(ip)) => header.source = ip.octets(),
            (IpHeaders::Ipv6(header, _), IpAddr::V6(ip)) => header.source = ip.octets(),
            _ => panic!("{source} is of another family"),
        }
    }

    /// The packet with its MAC addresses swapped.
    #[must_use]
    pub(crate) fn swapped_macs(self) -> Self {
        self.with(|packet| {
            if let Some(Ethernet { destination, source, .. }) = &mut packet.ethernet {
                std::mem::swap(destination, source);
            }
        })
    }

    /// Decrements TTL or hop limit, as a router does.
    pub(crate) fn decrement_hops(&mut self) {
        match &mut self.ip {
            IpHeaders::Ipv4(header, _) => header.time_to_live -= 1,
            IpHeaders::Ipv6(header, _) => header.hop_limit -= 1,
        }
    }

    /// The packet with this TTL or hop limit.
    #[must_use]
    pub(crate) fn hops(mut self, hops: u8) -> Self {
        match &mut self.ip {
            IpHeaders::Ipv4(header, _) => header.time_to_live = hops,
            IpHeaders::Ipv6(header, _) => header.hop_limit = hops,
        }
        self
    }

    /// The packet padded to 60 bytes, the minimum of Ethernet.
    #[must_use]
    pub(crate) fn padded(self) -> Self {
        let missing = 60usize.saturating_sub(self.bytes().len());
        self.with(|packet| packet.padding = missing)
    }
}

/// Methods that compute properties and bytes of the packet.
impl Packet {
    pub(crate) fn is_v4(&self) -> bool {
        matches!(self.ip, IpHeaders::Ipv4(..))
    }

    fn protocol(&self) -> IpNumber {
        match &self.transport {
            Transport::Tcp(_) => IpNumber::TCP,
            Transport::Udp { .. } => IpNumber::UDP,
            Transport::Sctp { .. } => IpNumber::SCTP,
            Transport::Icmp { .. } if self.is_v4() => IpNumber::ICMP,
            Transport::Icmp { .. } => IpNumber::IPV6_ICMP,
            Transport::Raw(protocol) => *protocol,
        }
    }

    /// The key of the packet's flow.
    pub(crate) fn tuple(&self) -> Tuple {
        let (source, destination) = match &self.ip {
            IpHeaders::Ipv4(header, _) => {
                (Address::from_v4(header.source), Address::from_v4(header.destination))
            }
            IpHeaders::Ipv6(header, _) => {
                (Address::from_v6(header.source), Address::from_v6(header.destination))
            }
        };
        let (source_port, destination_port) = match &self.transport {
            Transport::Tcp(header) => (header.source_port, header.destination_port),
            Transport::Udp { ports, .. } | Transport::Sctp { ports, .. } => *ports,
            Transport::Icmp { .. } | Transport::Raw(_) => (0, 0),
        };
        Tuple::new(source, destination, source_port, destination_port, self.protocol().0)
    }

    /// The whole frame.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(Ethernet { destination, source, tags }) = &self.ethernet {
            bytes.extend(destination);
            bytes.extend(source);
            for (ether_type, vlan) in tags {
                bytes.extend(ether_type.to_be_bytes());
                bytes.extend(vlan.to_be_bytes());
            }
            let inner = if self.is_v4() { EtherType::IPV4 } else { EtherType::IPV6 };
            bytes.extend(inner.0.to_be_bytes());
        }
        bytes.extend(self.network());
        bytes.resize(bytes.len() + self.padding, 0);
        bytes
    }

    /// The bytes from the network header on.
    pub(crate) fn network(&self) -> Vec<u8> {
        let mut segment = self.segment();
        let mut next_header = self.protocol();
        if let Some(fragment) = self.v6_fragment {
            segment = [fragment.bytes(next_header), segment].concat();
            next_header = IpNumber::IPV6_FRAGMENTATION_HEADER;
        }
        let mut ip = self.ip.clone();
        ip.set_next_headers(next_header);
        ip.set_payload_len(segment.len()).unwrap();
        let mut bytes = Vec::new();
        ip.write(&mut bytes).unwrap();
        bytes.extend(segment);
        bytes
    }

    /// The transport header, with its checksum, and the payload.
    fn segment(&self) -> Vec<u8> {
        let header = match &self.transport {
            Transport::Tcp(header) => {
                let mut header = header.clone();
                header.checksum = match &self.ip {
                    IpHeaders::Ipv4(ip, _) => header.calc_checksum_ipv4(ip, &self.payload).unwrap(),
                    IpHeaders::Ipv6(ip, _) => header.calc_checksum_ipv6(ip, &self.payload).unwrap(),
                };
                header.to_bytes().to_vec()
            }
            Transport::Udp { ports: (source, destination), checksum } => {
                let payload = &self.payload;
                match &self.ip {
                    _ if !checksum => UdpHeader::without_ipv4_checksum(*source, *destination, payload.len()),
                    IpHeaders::Ipv4(ip, _) => {
                        UdpHeader::with_ipv4_checksum(*source, *destination, ip, payload)
                    }
                    IpHeaders::Ipv6(ip, _) => {
                        UdpHeader::with_ipv6_checksum(*source, *destination, ip, payload)
                    }
                }
                .unwrap()
                .to_bytes()
                .to_vec()
            }
            Transport::Icmp { kind, code, rest } => {
                let checksum = self.icmp_checksum(*kind, *code, *rest);
                [&[*kind, *code][..], &checksum.to_be_bytes(), rest].concat()
            }
            Transport::Sctp { ports: (source, destination), tag } => {
                let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
                let before = [&ports[..], &tag.to_be_bytes(), &[0; 4]].concat();
                let checksum = crc32c::crc32c(&[before, self.payload.clone()].concat());
                [&ports[..], &tag.to_be_bytes(), &checksum.to_le_bytes()].concat()
            }
            Transport::Raw(_) => Vec::new(),
        };
        [header, self.payload.clone()].concat()
    }

    fn icmp_checksum(&self, type_u8: u8, code_u8: u8, bytes5to8: [u8; 4]) -> u16 {
        match &self.ip {
            IpHeaders::Ipv4(..) => {
                etherparse::Icmpv4Type::Unknown { type_u8, code_u8, bytes5to8 }.calc_checksum(&self.payload)
            }
            IpHeaders::Ipv6(ip, _) => etherparse::Icmpv6Type::Unknown { type_u8, code_u8, bytes5to8 }
                .calc_checksum(ip.source, ip.destination, &self.payload)
                .unwrap(),
        }
    }
}

/// The two bytes of payload with which a UDP datagram that `packet` builds has this checksum (in network byte order).
pub(crate) fn payload_for_checksum(packet: impl Fn(&[u8]) -> Packet, checksum: u16) -> [u8; 2] {
    let checksum_with = |payload: [u8; 2]| {
        let bytes = packet(&payload).network();
        u16::from_ne_bytes([bytes[bytes.len() - 4], bytes[bytes.len() - 3]])
    };
    let payload = Sum::ZERO.add_word(!checksum).sub_word(!checksum_with([0; 2])).fold().to_ne_bytes();
    assert_eq!(checksum_with(payload), checksum);
    payload
}

/// The fragments of a packet. Each one but the last has `size` bytes (a multiple of 8) of transport header and payload.
pub(crate) fn fragments(packet: &Packet, identification: u32, size: usize) -> Vec<Packet> {
    let segment = packet.segment();
    let last = (segment.len() - 1) / size;
    let fragment = |(index, chunk): (usize, &[u8])| {
        let more = index < last;
        let offset = u16::try_from(index * size / 8).unwrap();
        let mut fragment = packet.clone();
        fragment.payload = chunk.to_vec();
        fragment.transport = Transport::Raw(packet.protocol());
        if let IpHeaders::Ipv4(header, _) = &mut fragment.ip {
            header.dont_fragment = false;
            header.more_fragments = more;
            header.fragment_offset = IpFragOffset::try_new(offset).unwrap();
            header.identification = u16::try_from(identification).unwrap();
        } else {
            fragment.v6_fragment = Some(V6Fragment { offset, more, identification });
        }
        fragment
    };
    segment.chunks(size).enumerate().map(fragment).collect()
}
