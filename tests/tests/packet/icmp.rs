//! ICMP errors about translated packets.

use std::net::{IpAddr, SocketAddr};

use etherparse::{IpNumber, Ipv6RawExtHeader};
use lb_common::{
    Outcome::{self, *},
    conntrack::chunk,
};

use super::{
    packets::{Packet, Transport, V6Fragment, VLAN, fragments, payload_for_checksum},
    stage::{Family, each, each_ethernet},
    testbed::{Hook, SCTP, TCP, Testbed, UDP},
};

/// The last four bytes of the ICMP and the ICMPv6 header, for a next hop with an MTU of 1400.
const MTU_1400: [u8; 4] = [0, 0, 5, 0x78];

/// The type of an SCTP chunk with data (RFC 9260 §3.3.1).
const DATA: u8 = 0;

/// Name, type and code, the rest of the header.
type Kind = (&'static str, [u8; 2], [u8; 4]);

const KINDS_V4: [Kind; 6] = [
    ("fragmentation needed", [3, 4], MTU_1400),
    ("port unreachable", [3, 3], [0; 4]),
    ("host unreachable", [3, 1], [0; 4]),
    ("source quench", [4, 0], [0; 4]),
    ("time exceeded", [11, 0], [0; 4]),
    ("parameter problem", [12, 0], [20, 0, 0, 0]),
];

const KINDS_V6: [Kind; 5] = [
    ("packet too big", [2, 0], MTU_1400),
    ("port unreachable", [1, 4], [0; 4]),
    ("no route", [1, 0], [0; 4]),
    ("time exceeded", [3, 0], [0; 4]),
    ("parameter problem", [4, 1], [0, 0, 0, 6]),
];

fn kinds(family: Family) -> &'static [Kind] {
    match family {
        Family::V4 => &KINDS_V4,
        Family::V6 => &KINDS_V6,
    }
}

pub(super) fn port_unreachable(family: Family, from: IpAddr, to: IpAddr, quote: &[u8]) -> Packet {
    let (_, kind, rest) = kinds(family)[1];
    Packet::icmp(from, to, kind, rest, quote)
}

/// The packet that the errors quote.
fn packet(protocol: u8, from: SocketAddr, to: SocketAddr) -> Packet {
    match protocol {
        TCP => Packet::tcp(from, to, 1001, b"GET / HTTP/1.1\r\n\r\n").ack(5001),
        SCTP => Packet::sctp(from, to, 1001, DATA, b"a question"),
        _ => Packet::udp(from, to, b"a question"),
    }
}

/// Opens a flow through `vip` to `backend`.
fn open(bed: &mut Testbed, protocol: u8, family: Family) {
    bed.service(family.vip(), protocol, &[family.backend()]);
    let first = match protocol {
        SCTP => Packet::sctp(family.client(), family.vip(), 0, chunk::INIT, &[7; 16]),
        _ => packet(protocol, family.client(), family.vip()),
    };
    bed.send(Hook::Ingress, &first).passes(NewFlow, &first.clone().to(family.backend()));
}

/// The first `length` bytes of a packet as its sender sent it, and as it left the node. A truncated checksum stays
/// unchanged: no receiver can verify it.
pub(super) fn quote(sent: &Packet, seen: &Packet, length: usize) -> (Vec<u8>, Vec<u8>) {
    let network = if sent.is_v4() { 20 } else { 40 };
    let (mut original, mut translated) = (sent.network(), seen.network());
    original.truncate(length);
    translated.truncate(length);
    if length == network + 17 && matches!(sent.transport, Transport::Tcp(_)) {
        original[length - 1] = translated[length - 1];
    }
    if matches!(sent.transport, Transport::Sctp { .. }) {
        // The CRC covers the whole packet, which the programs do not see.
        let crc = network + 8..(network + 12).min(length);
        original[crc.clone()].copy_from_slice(&translated[crc]);
    }
    (original, translated)
}

/// Quotes of a packet with different lengths.
fn quotes(sent: &Packet, seen: &Packet) -> Vec<(String, Vec<u8>, Vec<u8>)> {
    let (network, whole) = (if sent.is_v4() { 20 } else { 40 }, sent.network().len());
    let lengths = [8, 16, 17, 18, 19].map(|transport| network + transport);
    let lengths = lengths.into_iter().filter(|length| *length < whole).chain([whole]);
    let cut = |length| {
        let (original, translated) = quote(sent, seen, length);
        (format!("{} bytes of transport", length - network), original, translated)
    };
    lengths.map(cut).collect()
}

/// A router beyond the node, or the backend, reports an error about a translated packet to the client. The quote must
/// be the packet that the client has sent, and the error must come from the VIP.
#[test]
fn error_to_the_client_quotes_its_packet_and_comes_from_the_vip() {
    for protocol in [TCP, UDP, SCTP] {
        each(&format!("ICMP to the client, protocol {protocol}"), |bed, family| {
            let (client, vip, backend) = (family.client(), family.vip(), family.backend());
            open(bed, protocol, family);
            let sent = packet(protocol, client, vip);
            for (quote, original, translated) in quotes(&sent, &sent.clone().to(backend)) {
                for (kind, code, rest) in kinds(family) {
                    for source in [family.router(), backend.ip()] {
                        bed.label(&format!("{kind} from {source}, {quote}"));
                        let error = Packet::icmp(source, client.ip(), *code, *rest, &translated);
                        let expected = Packet::icmp(vip.ip(), client.ip(), *code, *rest, &original);
                        bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
                        bed.send(Hook::Ingress, &error).passes_untouched(OtherHook);
                    }
                }
            }
        });
    }
}

/// The client, or a router before it, reports an error about a reply. The quote must be the reply that the backend has
/// sent.
#[test]
fn error_to_the_backend_quotes_its_reply() {
    for protocol in [TCP, UDP, SCTP] {
        each(&format!("ICMP to the backend, protocol {protocol}"), |bed, family| {
            let (client, vip, backend) = (family.client(), family.vip(), family.backend());
            open(bed, protocol, family);
            let reply = packet(protocol, backend, client);
            for (quote, original, translated) in quotes(&reply, &reply.clone().from(vip)) {
                for (kind, code, rest) in kinds(family) {
                    for source in [family.router(), client.ip()] {
                        bed.label(&format!("{kind} from {source}, {quote}"));
                        let error = Packet::icmp(source, vip.ip(), *code, *rest, &translated);
                        let expected = Packet::icmp(source, backend.ip(), *code, *rest, &original);
                        bed.send(Hook::Ingress, &error).passes(IcmpError, &expected);
                        bed.send(Hook::Egress, &error).passes_untouched(OtherHook);
                    }
                }
            }
        });
    }
}

/// If the flow replaces the client's source port, errors to the client quote its original port, and errors to the
/// backend quote the replacement.
#[test]
fn error_quotes_the_original_source_port() {
    for protocol in [TCP, UDP] {
        each(&format!("ICMP, replaced port, protocol {protocol}"), |bed, family| {
            let (client, vip, backend) = (family.client(), family.other_vip(), family.backend());
            open(bed, protocol, family);
            bed.service(vip, protocol, &[backend]);
            let sent = packet(protocol, client, vip);
            let first = bed.send(Hook::Ingress, &sent);
            let replaced = SocketAddr::new(client.ip(), bed.flows()[&sent.tuple()].to.source_port);
            assert_ne!(replaced, client);
            let seen = sent.clone().from(replaced).to(backend);
            first.passes(NewFlow, &seen);
            for (quote, original, translated) in quotes(&sent, &seen) {
                bed.label(&quote);
                let error = port_unreachable(family, family.router(), client.ip(), &translated);
                let expected = port_unreachable(family, vip.ip(), client.ip(), &original);
                bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
            }
            let reply = packet(protocol, backend, replaced);
            for (quote, original, translated) in quotes(&reply, &reply.clone().from(vip).to(client)) {
                bed.label(&quote);
                let error = port_unreachable(family, client.ip(), vip.ip(), &translated);
                let expected = port_unreachable(family, client.ip(), backend.ip(), &original);
                bed.send(Hook::Ingress, &error).passes(IcmpError, &expected);
            }
        });
    }
}

/// A pod reaches itself through its VIP on a port where it does not listen: the error is a hairpin as well.
#[test]
fn error_about_a_hairpin_packet_returns_to_the_pod() {
    each("ICMP, hairpin", |bed, family| {
        let (vip, pod) = (family.vip(), family.backend());
        let client = SocketAddr::new(pod.ip(), 40_000);
        let masqueraded = SocketAddr::new(vip.ip(), client.port());
        bed.service(vip, UDP, &[pod]);
        let sent = packet(UDP, client, vip);
        let seen = sent.clone().from(masqueraded).to(pod);
        bed.send(Hook::Ingress, &sent).redirects(Hairpin, &seen.clone().swapped_macs());
        for (quote, original, translated) in quotes(&sent, &seen) {
            bed.label(&quote);
            let error = port_unreachable(family, pod.ip(), vip.ip(), &translated);
            let expected = port_unreachable(family, vip.ip(), pod.ip(), &original);
            bed.send(Hook::Ingress, &error).redirects(Hairpin, &expected.swapped_macs());
        }
        let reply = packet(UDP, pod, masqueraded);
        for (quote, original, translated) in quotes(&reply, &reply.clone().from(vip).to(client)) {
            bed.label(&format!("about the reply, {quote}"));
            let error = port_unreachable(family, pod.ip(), vip.ip(), &translated);
            let expected = port_unreachable(family, vip.ip(), pod.ip(), &original);
            bed.send(Hook::Ingress, &error).redirects(Hairpin, &expected.swapped_macs());
        }
    });
}

/// The quoted packet may have options, extension headers, or no checksum.
#[test]
fn quotes_with_options_and_fragments_are_translated() {
    type Mutation = fn(&mut Packet);
    const V4: [(&str, Mutation); 2] = [
        ("IPv4 options", |packet| packet.v4().options = [1; 12].into()),
        ("no UDP checksum", |packet| {
            if let Transport::Udp { checksum, .. } = &mut packet.transport {
                *checksum = false;
            }
        }),
    ];
    const V6: [(&str, Mutation); 2] = [
        ("destination options", |packet| {
            let options = Ipv6RawExtHeader::new_raw(IpNumber::UDP, &[0; 14]).unwrap();
            packet.extensions().destination_options = Some(options);
        }),
        ("atomic fragment", |packet| {
            packet.v6_fragment = Some(V6Fragment { offset: 0, more: false, identification: 9 });
        }),
    ];
    each("ICMP, unusual quote", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        open(bed, UDP, family);
        for (name, mutation) in if family == Family::V4 { V4 } else { V6 } {
            bed.label(name);
            let sent = packet(UDP, client, vip).with(mutation);
            let seen = sent.clone().to(backend).network();
            let error = port_unreachable(family, backend.ip(), client.ip(), &seen);
            let expected = port_unreachable(family, vip.ip(), client.ip(), &sent.network());
            bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
        }
        bed.label("first fragment");
        let sent = packet(UDP, client, vip);
        let seen = fragments(&sent.clone().to(backend), 77, 16).swap_remove(0);
        let original = fragments(&sent, 77, 16).swap_remove(0);
        let error = port_unreachable(family, backend.ip(), client.ip(), &seen.network());
        let expected = port_unreachable(family, vip.ip(), client.ip(), &original.network());
        bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
    });
}

#[test]
fn tagged_errors_are_translated() {
    each_ethernet("ICMP, tagged", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        open(bed, UDP, family);
        let tag = |packet: &mut Packet| *packet.tags() = vec![(VLAN, 3)];
        let sent = packet(UDP, client, vip);
        let quote = sent.clone().to(backend).network();
        let error = port_unreachable(family, family.router(), client.ip(), &quote).with(tag);
        let expected = port_unreachable(family, vip.ip(), client.ip(), &sent.network()).with(tag);
        bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
    });
}

/// A quoted UDP checksum that would become 0 is written as 0xffff, and the ICMP checksum covers that.
#[test]
fn quoted_udp_checksum_never_becomes_zero() {
    each("ICMP, quoted checksum 0xffff", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        open(bed, UDP, family);
        let payload = payload_for_checksum(|payload| Packet::udp(client, vip, payload), 0xffff);
        let sent = Packet::udp(client, vip, &payload);
        let seen = sent.clone().to(backend).network();
        let error = port_unreachable(family, backend.ip(), client.ip(), &seen);
        let expected = port_unreachable(family, vip.ip(), client.ip(), &sent.network());
        bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
    });
}

#[test]
fn errors_about_untracked_flows_pass_untouched() {
    each("ICMP, unknown", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        open(bed, UDP, family);
        let flows = bed.flows();
        let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
        let seen = packet(UDP, client, backend);
        let echo = if family == Family::V4 { [8, 0] } else { [128, 0] };
        let network = if family == Family::V4 { 20 } else { 40 };
        let mut no_ip = seen.network();
        no_ip[0] = 0x55;
        let cases: [(&str, Vec<u8>, Outcome); 9] = [
            ("another port", packet(UDP, client, vip).from(family.stranger()).network(), UnknownIcmpError),
            ("the other protocol", packet(TCP, client, backend).network(), UnknownIcmpError),
            ("a later fragment", fragments(&seen, 77, 8)[1].network(), UnknownIcmpError),
            ("an echo", Packet::icmp(client.ip(), vip.ip(), echo, [0; 4], &[]).network(), UnknownIcmpError),
            ("the other family", packet(UDP, other.client(), other.backend()).network(), UnknownIcmpError),
            ("no IP", no_ip, NotIp),
            ("nothing", Vec::new(), Malformed),
            ("half a network header", seen.network()[..network / 2].into(), Malformed),
            ("half the ports", seen.network()[..network + 3].into(), Malformed),
        ];
        for (name, quote, outcome) in cases {
            bed.label(name);
            let error = port_unreachable(family, family.router(), client.ip(), &quote);
            for hook in Hook::BOTH {
                bed.send(hook, &error).passes_untouched(outcome);
            }
        }
        assert_eq!(bed.flows(), flows, "an error changes no flow");
    });
}

/// A translated redirect would make its receiver send packets for the VIP to another router, so that they bypass this
/// node. (The programs do not parse the IPv6 redirect.)
#[test]
fn redirect_about_a_translated_packet_is_dropped() {
    each("ICMP redirect", |bed, family| {
        if family == Family::V6 {
            return;
        }
        open(bed, UDP, family);
        let redirect = |from: IpAddr, to: IpAddr, about: &Packet| {
            Packet::icmp(from, to, [5, 1], [198, 51, 100, 9], &about.network()[..28])
        };
        let seen = packet(UDP, family.client(), family.backend());
        let to_client = redirect(family.router(), family.client().ip(), &seen);
        bed.send(Hook::Egress, &to_client).drops(IcmpRedirect);
        let about_others = packet(UDP, family.client(), family.stranger());
        let unrelated = redirect(family.router(), family.client().ip(), &about_others);
        bed.send(Hook::Egress, &unrelated).passes_untouched(UnknownIcmpError);
    });
}
