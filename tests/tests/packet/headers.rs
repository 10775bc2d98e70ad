//! Translation with options, extension headers, tags and padding: no bytes change except addresses, ports and
//! checksums.

use std::net::SocketAddr;

use etherparse::{IpAuthHeader, IpNumber, Ipv6RawExtHeader, Ipv6RoutingExtensions};
use lb_common::{Address, Outcome::*, checksum::Sum};

use super::{
    packets::{Packet, QINQ, Transport, V6Fragment, VLAN, payload_for_checksum},
    stage::{Family, each, each_ethernet, each_kernel},
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

type Mutation = fn(&mut Packet);

/// Asserts that a segment and a datagram with this mutation are translated, and so are their replies.
#[track_caller]
fn translated(bed: &mut Testbed, family: Family, name: &str, mutation: Mutation) {
    let (client, vip, backend) = (family.client(), family.vip(), family.backend());
    for protocol in [TCP, UDP] {
        bed.label(&format!("{name}, protocol {protocol}"));
        bed.service(vip, protocol, &[backend]);
        let packet = |from, to| match protocol {
            TCP => Packet::tcp(from, to, 1000, b"payload").ack(5001).with(mutation),
            _ => Packet::udp(from, to, b"payload").with(mutation),
        };
        let sent = packet(client, vip);
        bed.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        bed.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
        let answer = packet(backend, client);
        bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bed.clear_flows();
    }
}

/// Requests reach the programs of the VLAN device without a tag (`tagged_frames_pass_untouched`); the device below it
/// sends replies with a tag.
#[test]
fn tagged_replies_are_translated() {
    const TAGS: [&[(u16, u16)]; 4] =
        [&[(VLAN, 5)], &[(VLAN, 0xe005)], &[(QINQ, 6), (VLAN, 5)], &[(VLAN, 6), (VLAN, 5)]];
    each_ethernet("tagged replies", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let question = Packet::udp(client, vip, b"?");
        bed.send(Hook::Ingress, &question).passes(NewFlow, &question.clone().to(backend));
        for tags in TAGS {
            let answer = Packet::udp(backend, client, b"!").with(|packet| *packet.tags() = tags.to_vec());
            bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        }
    });
}

#[test]
fn payload_and_padding_stay_unchanged() {
    const CASES: [(&str, Mutation); 7] = [
        ("no payload", |packet| packet.payload.clear()),
        ("no payload, padded", |packet| {
            packet.payload.clear();
            packet.padding = 20;
        }),
        ("one byte", |packet| packet.payload.truncate(1)),
        ("an odd number of bytes", |packet| packet.payload = vec![0xff; 333]),
        ("zeros", |packet| packet.payload = vec![0; 64]),
        ("1400 bytes", |packet| packet.payload = vec![0x5a; 1400]),
        ("three bytes of padding", |packet| packet.padding = 3),
    ];
    each("payload", |bed, family| {
        for (name, mutation) in CASES {
            translated(bed, family, name, mutation);
        }
    });
}

#[test]
fn ipv4_options_and_fields_stay_unchanged() {
    const CASES: [(&str, Mutation); 5] = [
        ("4 bytes of options", |packet| packet.v4().options = [1; 4].into()),
        ("40 bytes of options", |packet| packet.v4().options = [1; 40].into()),
        ("DSCP and ECN", |packet| {
            packet.v4().dscp = 46.try_into().unwrap();
            packet.v4().ecn = etherparse::IpEcn::try_new(3).unwrap();
        }),
        ("may be fragmented", |packet| packet.v4().dont_fragment = false),
        ("TTL 1", |packet| packet.v4().time_to_live = 1),
    ];
    each("IPv4", |bed, family| {
        for (name, mutation) in CASES.into_iter().filter(|_| family == Family::V4) {
            translated(bed, family, name, mutation);
        }
    });
}

#[test]
fn ipv6_extension_headers_stay_unchanged() {
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
    each("IPv6", |bed, family| {
        for (name, mutation) in CASES.into_iter().filter(|_| family == Family::V6) {
            translated(bed, family, name, mutation);
        }
    });
}

fn raw(length: usize) -> Ipv6RawExtHeader {
    Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length]).unwrap()
}

/// A routing header with 0 segments left.
fn routing(final_destination_options: Option<Ipv6RawExtHeader>) -> Option<Ipv6RoutingExtensions> {
    Some(Ipv6RoutingExtensions { routing: raw(22), final_destination_options })
}

/// The length field of this header is in units of 4 bytes; that of the other extension headers is in units of 8.
fn authentication(bytes: usize) -> Option<IpAuthHeader> {
    Some(IpAuthHeader::new(IpNumber::TCP, 7, 8, &vec![0x5a; bytes]).unwrap())
}

fn atomic() -> Option<V6Fragment> {
    Some(V6Fragment { offset: 0, more: false, identification: 0xdead_beef })
}

#[test]
fn tcp_options_and_flags_stay_unchanged() {
    each("TCP header", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, TCP, &[backend]);
        let options = Packet::tcp(client, vip, 1000, b"").syn().with(|packet| {
            let options = [2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];
            packet.tcp_header().set_options_raw(&options).unwrap();
        });
        bed.send(Hook::Ingress, &options).passes(NewFlow, &options.clone().to(backend));
        assert_eq!(bed.flows()[&options.tuple()].next_seq, 1001, "options do not count as payload");
        let flags = Packet::tcp(client, vip, 1001, b"!").ack(5001).with(|packet| {
            let header = packet.tcp_header();
            (header.urg, header.urgent_pointer, header.psh) = (true, 1, true);
            (header.ece, header.cwr, header.ns) = (true, true, true);
            header.window_size = 1;
        });
        bed.send(Hook::Ingress, &flags).passes(Forward, &flags.clone().to(backend));
    });
}

/// RFC 768: 0 means no checksum, and it stays 0.
#[test]
fn missing_udp_checksum_stays_missing() {
    each_kernel("UDP, no checksum", &Device::ALL, |bed, family| {
        let without: Mutation = |packet| {
            if let Transport::Udp { checksum, .. } = &mut packet.transport {
                *checksum = false;
            }
        };
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, b"unchecked").with(without);
        let answer = Packet::udp(backend, client, b"unchecked").with(without);
        bed.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bed.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// RFC 768: a computed checksum of 0 is sent as 0xffff.
#[test]
fn udp_checksum_never_becomes_zero() {
    each_kernel("UDP, checksum 0xffff", &Device::ALL, |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let payload = payload_for_checksum(|payload| Packet::udp(client, backend, payload), 0xffff);
        let sent = Packet::udp(client, vip, &payload);
        bed.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let payload = payload_for_checksum(|payload| Packet::udp(vip, client, payload), 0xffff);
        let answer = Packet::udp(backend, client, &payload);
        bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        // The opposite case: the checksum changes from 0xffff to another one.
        let payload = payload_for_checksum(|payload| Packet::udp(client, vip, payload), 0xffff);
        let sent = Packet::udp(client, vip, &payload);
        bed.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// A complete checksum may equal the sum over the pseudo header, like a checksum that is offloaded to the device.
#[test]
fn checksum_that_looks_partial_is_updated_as_complete() {
    each_kernel("UDP, checksum like the sum over the pseudo header", &Device::ALL, |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, b"??");
        bed.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let like_unfinished = pseudo_header(client, vip);
        let payload = payload_for_checksum(|payload| Packet::udp(client, vip, payload), like_unfinished);
        let sent = Packet::udp(client, vip, &payload);
        bed.send(Hook::Ingress, &sent).passes(Forward, &sent.clone().to(backend));
    });
}

/// The sum over the pseudo header of a datagram with two bytes of payload.
fn pseudo_header(from: SocketAddr, to: SocketAddr) -> u16 {
    let sum = Sum::ZERO.add_word(10_u16.to_be()).add_word(u16::from(UDP).to_be());
    // The prefixes of the two v4-mapped addresses, 0xffff each, add up to zero.
    let (from, to) = (Address::from(from.ip()), Address::from(to.ip()));
    sum.add_16(from.bytes()).add_16(to.bytes()).fold()
}
