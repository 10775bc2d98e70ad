//! Translation whatever stands before, between and behind the headers: what is not an address, a port or a checksum of
//! them stays as it is, octet by octet.

use std::net::SocketAddr;

use etherparse::{IpAuthHeader, IpNumber, Ipv6RawExtHeader, Ipv6RoutingExtensions};
use lb_common::{Address, Outcome::*, checksum::Sum};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::{Packet, QINQ, Transport, V6Fragment, VLAN},
    stage::{Family, each, each_ethernet, each_on},
};

type Mutation = fn(&mut Packet);

/// A segment and a datagram with this mutation are translated on their way to the backend, and so are the answers.
#[track_caller]
fn translated(bench: &mut Bench, family: Family, name: &str, mutation: Mutation) {
    let (client, vip, backend) = (family.client(), family.vip(), family.backend());
    for protocol in [TCP, UDP] {
        bench.label(&format!("{name}, protocol {protocol}"));
        bench.service(vip, protocol, &[backend]);
        let packet = |from, to| match protocol {
            TCP => Packet::tcp(from, to, 1000, b"payload").ack(5001).with(mutation),
            _ => Packet::udp(from, to, b"payload").with(mutation),
        };
        let sent = packet(client, vip);
        bench.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        bench.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
        let answer = packet(backend, client);
        bench.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bench.forget_flows();
    }
}

#[test]
fn vlan_tags() {
    const TAGS: [(&str, Mutation); 4] = [
        ("VLAN", |packet| *packet.tags() = vec![(VLAN, 5)]),
        ("VLAN with priority", |packet| *packet.tags() = vec![(VLAN, 0xe005)]),
        ("QinQ", |packet| *packet.tags() = vec![(QINQ, 6), (VLAN, 5)]),
        ("two VLAN tags", |packet| *packet.tags() = vec![(VLAN, 6), (VLAN, 5)]),
    ];
    each_ethernet("tagged", |bench, family| {
        for (name, mutation) in TAGS {
            translated(bench, family, name, mutation);
        }
    });
}

#[test]
fn payload_and_padding() {
    const CASES: [(&str, Mutation); 7] = [
        ("no payload", |packet| packet.payload.clear()),
        ("no payload, padded", |packet| {
            packet.payload.clear();
            packet.padding = 20;
        }),
        ("one octet", |packet| packet.payload.truncate(1)),
        ("an odd number of octets", |packet| packet.payload = vec![0xff; 333]),
        ("zeros", |packet| packet.payload = vec![0; 64]),
        ("1400 octets", |packet| packet.payload = vec![0x5a; 1400]),
        ("three octets of padding", |packet| packet.padding = 3),
    ];
    each("payload", |bench, family| {
        for (name, mutation) in CASES {
            translated(bench, family, name, mutation);
        }
    });
}

#[test]
fn ipv4_headers() {
    const CASES: [(&str, Mutation); 5] = [
        ("4 octets of options", |packet| packet.v4().options = [1; 4].into()),
        ("40 octets of options", |packet| packet.v4().options = [1; 40].into()),
        ("DSCP and ECN", |packet| {
            packet.v4().dscp = 46.try_into().unwrap();
            packet.v4().ecn = etherparse::IpEcn::try_new(3).unwrap();
        }),
        ("may be fragmented", |packet| packet.v4().dont_fragment = false),
        ("TTL 1", |packet| packet.v4().time_to_live = 1),
    ];
    each("IPv4", |bench, family| {
        for (name, mutation) in CASES.into_iter().filter(|_| family == Family::V4) {
            translated(bench, family, name, mutation);
        }
    });
}

#[test]
fn ipv6_extension_headers() {
    const CASES: [(&str, Mutation); 9] = [
        ("hop-by-hop options", |packet| packet.extensions().hop_by_hop_options = Some(raw(6))),
        ("longer hop-by-hop options", |packet| packet.extensions().hop_by_hop_options = Some(raw(86))),
        ("destination options", |packet| packet.extensions().destination_options = Some(raw(14))),
        ("routing header", |packet| packet.extensions().routing = routing(None)),
        ("options for the final destination", |packet| packet.extensions().routing = routing(Some(raw(6)))),
        ("authentication header", |packet| packet.extensions().auth = authentication(12)),
        ("longer authentication header", |packet| packet.extensions().auth = authentication(16)),
        ("atomic fragment", |packet| packet.v6_fragment = atomic()),
        ("all of them", |packet| {
            let extensions = packet.extensions();
            extensions.hop_by_hop_options = Some(raw(6));
            extensions.destination_options = Some(raw(6));
            extensions.routing = routing(Some(raw(6)));
            extensions.auth = authentication(12);
            packet.v6_fragment = atomic();
        }),
    ];
    each("IPv6", |bench, family| {
        for (name, mutation) in CASES.into_iter().filter(|_| family == Family::V6) {
            translated(bench, family, name, mutation);
        }
    });
}

fn raw(length: usize) -> Ipv6RawExtHeader {
    Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length]).unwrap()
}

/// No segments are left.
fn routing(final_destination_options: Option<Ipv6RawExtHeader>) -> Option<Ipv6RoutingExtensions> {
    Some(Ipv6RoutingExtensions { routing: raw(22), final_destination_options })
}

/// The length of this header counts in units of 4 octets, other than those of all others.
fn authentication(octets: usize) -> Option<IpAuthHeader> {
    Some(IpAuthHeader::new(IpNumber::TCP, 7, 8, &vec![0x5a; octets]).unwrap())
}

fn atomic() -> Option<V6Fragment> {
    Some(V6Fragment { offset: 0, more: false, identification: 0xdead_beef })
}

#[test]
fn tcp_options_and_flags() {
    each("TCP header", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, TCP, &[backend]);
        let options = Packet::tcp(client, vip, 1000, b"").syn().with(|packet| {
            let options = [2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];
            packet.tcp_header().set_options_raw(&options).unwrap();
        });
        bench.send(Hook::Ingress, &options).passes(NewFlow, &options.clone().to(backend));
        assert_eq!(bench.flows()[&options.tuple()].next_seq, 1001, "options are no payload");
        let flags = Packet::tcp(client, vip, 1001, b"!").ack(5001).with(|packet| {
            let header = packet.tcp_header();
            (header.urg, header.urgent_pointer, header.psh) = (true, 1, true);
            (header.ece, header.cwr, header.ns) = (true, true, true);
            header.window_size = 1;
        });
        bench.send(Hook::Ingress, &flags).passes(Forward, &flags.clone().to(backend));
    });
}

/// RFC 768: 0 says that there is no checksum. It may not become one.
#[test]
fn no_udp_checksum_stays_none() {
    // Without a checksum there is nothing to make up for new ports in a sum over the frame, nor does anyone look at it.
    each_on(&[Device::Ethernet, Device::Bare], "UDP, no checksum", |bench, family| {
        let without: Mutation = |packet| {
            if let Transport::Udp { checksum, .. } = &mut packet.transport {
                *checksum = false;
            }
        };
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, b"unchecked").with(without);
        let answer = Packet::udp(backend, client, b"unchecked").with(without);
        bench.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        bench.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bench.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// RFC 768: a checksum that comes out as 0 is sent as 0xffff.
#[test]
fn a_udp_checksum_never_becomes_none() {
    each("UDP, checksum 0xffff", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let find = |packet: &dyn Fn(&[u8]) -> Packet| {
            let checksum = |payload: &[u8; 2]| {
                let octets = packet(payload).network();
                octets[octets.len() - 4..octets.len() - 2] == [0xff; 2]
            };
            (0..=u16::MAX).map(u16::to_be_bytes).find(checksum).expect("one of all payloads")
        };
        let payload = find(&|payload| Packet::udp(client, backend, payload));
        let sent = Packet::udp(client, vip, &payload);
        bench.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let payload = find(&|payload| Packet::udp(vip, client, payload));
        let answer = Packet::udp(backend, client, &payload);
        bench.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        // And back from 0xffff.
        let payload = find(&|payload| Packet::udp(client, vip, payload));
        let sent = Packet::udp(client, vip, &payload);
        bench.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// A complete checksum may be what one looks like that is left to the device to compute.
#[test]
fn a_checksum_that_looks_unfinished() {
    each("UDP, checksum like the sum over the pseudo header", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, b"??");
        bench.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let looks_unfinished = |payload: &[u8; 2]| {
            let octets = Packet::udp(client, vip, payload).network();
            let checksum = [octets[octets.len() - 4], octets[octets.len() - 3]];
            u16::from_ne_bytes(checksum) == pseudo_header(client, vip)
        };
        let payload =
            (0..=u16::MAX).map(u16::to_be_bytes).find(looks_unfinished).expect("one of all payloads");
        let sent = Packet::udp(client, vip, &payload);
        bench.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// The sum over the pseudo header of a datagram with two octets of payload.
fn pseudo_header(from: SocketAddr, to: SocketAddr) -> u16 {
    let sum = Sum::ZERO.add_word(10_u16.to_be()).add_word(u16::from(UDP).to_be());
    // The octets that make IPv4 addresses look like IPv6 add up to nothing: 0xffff, twice.
    let (from, to) = (Address::from(from.ip()), Address::from(to.ip()));
    sum.add_16(from.bytes()).add_16(to.bytes()).fold()
}
