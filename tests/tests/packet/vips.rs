//! Packets to virtual addresses that no Service port serves: unlisted ports, unallocated addresses, pings, other
//! protocols.

use std::net::IpAddr;

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Settings, settings_flags, vip_flags,
};

use super::{
    packets::{Packet, fragments},
    reject::our_own,
    stage::{Family, each, each_ethernet, each_on},
    testbed::{Device, Hook, TCP, Testbed},
};

/// Declares a range of cluster IPs whose unallocated addresses are dropped. In this range `vip()` is the cluster IP of
/// a Service and `other_vip()` an address of this node; no other address is allocated.
fn with_range(bed: &mut Testbed, family: Family) {
    with_flags(bed, family, settings_flags::DROP_UNKNOWN_VIPS);
}

/// Like [`with_range`], with these `settings_flags`.
fn with_flags(bed: &mut Testbed, family: Family, flags: u32) {
    let prefix = if family == Family::V4 { 24 } else { 64 };
    let service_ranges = Networks::new([Network::new(Address::from(family.vip().ip()), prefix)]);
    bed.settings(&Settings { service_ranges, flags, ports: 1, ..Settings::zeroed() });
    bed.add_vip(family.vip().ip(), vip_flags::CLUSTER_IP | vip_flags::ECHO);
    bed.add_vip(family.other_vip().ip(), 0);
    bed.service(family.vip(), TCP, &[family.backend()]);
}

fn unlisted(family: Family) -> std::net::SocketAddr {
    (family.vip().ip(), 81).into()
}

/// Before `lb-agent cleanup` detaches the programs, it makes the filter pass all packets, so that all hooks stop
/// translating at once.
#[test]
fn nothing_is_translated_or_rejected_once_the_filter_passes_all_packets() {
    each_ethernet("all packets pass", |bed, family| {
        with_range(bed, family);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(backend));
        bed.filter().pass_all();
        bed.send(Hook::Ingress, &syn).passes_untouched(NoService);
        let answer = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
        bed.send(Hook::Egress, &answer).passes_untouched(NoService);
        let unlisted = Packet::tcp(client, unlisted(family), 1000, b"").syn();
        bed.send(Hook::Ingress, &unlisted).passes_untouched(NoService);
    });
}

#[test]
fn unlisted_port_is_rejected() {
    each_on(&[Device::Ethernet, Device::Bare], "unlisted port", |bed, family| {
        with_range(bed, family);
        let (client, vip) = (family.client(), unlisted(family));
        let mut reset = Packet::tcp(vip, client, 0, b"").rst().ack(1001);
        reset.tcp_header().window_size = 0;
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).redirects(RejectTcp, &our_own(reset));
        let datagram = Packet::udp(client, vip, b"x");
        let (kind, quote) = if family == Family::V4 { ([3, 3], 28) } else { ([1, 4], 48) };
        let answer = Packet::icmp(vip.ip(), client.ip(), kind, [0; 4], &datagram.network()[..quote]);
        bed.send(Hook::Ingress, &datagram).redirects(RejectUdp, &our_own(answer));
        let stray = Packet::tcp(client, vip, 1000, b"").rst();
        bed.send(Hook::Ingress, &stray).drops(StrayReset);
        bed.send(Hook::Egress, &syn).passes_untouched(NoService);
        bed.assert_flows(0);
    });
}

#[test]
fn unallocated_cluster_ip_is_dropped() {
    each("unknown VIP", |bed, family| {
        with_range(bed, family);
        for packet in [
            Packet::tcp(family.client(), family.empty_vip(), 1000, b"").syn(),
            Packet::udp(family.client(), family.empty_vip(), b"x"),
            echo_request(family, family.empty_vip().ip()),
        ] {
            bed.send(Hook::Ingress, &packet).drops(UnknownVip);
        }
        let elsewhere = Packet::udp(family.client(), family.stranger(), b"x");
        bed.send(Hook::Ingress, &elsewhere).passes_untouched(NoService);
    });
}

#[test]
fn unlisted_port_of_a_node_address_is_left_to_the_stack() {
    each("VIP of the node", |bed, family| {
        with_range(bed, family);
        let own = family.other_vip();
        let syn = Packet::tcp(family.client(), own, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes_untouched(NoService);
        bed.send(Hook::Ingress, &echo_request(family, own.ip())).passes_untouched(NotTransport);
    });
}

/// Without `DROP_UNKNOWN_VIPS` the range may contain addresses other than cluster IPs.
#[test]
fn unknown_address_passes_if_the_range_is_shared() {
    each("unknown address", |bed, family| {
        with_flags(bed, family, 0);
        let to = family.empty_vip();
        let syn = Packet::tcp(family.client(), to, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes_untouched(NoService);
        bed.send(Hook::Ingress, &echo_request(family, to.ip())).passes_untouched(NotTransport);
        // Packets to an unlisted port of a known cluster IP do not pass. This one is dropped, as a stray RST.
        let stray = Packet::tcp(family.client(), unlisted(family), 1000, b"").rst();
        bed.send(Hook::Ingress, &stray).drops(StrayReset);
    });
}

#[test]
fn nothing_is_dropped_without_settings() {
    each("no settings", |bed, family| {
        let packet = Packet::udp(family.client(), family.empty_vip(), b"x");
        bed.send(Hook::Ingress, &packet).passes_untouched(NoService);
        let ping = echo_request(family, family.empty_vip().ip());
        bed.send(Hook::Ingress, &ping).passes_untouched(NotTransport);
    });
}

fn echo_request(family: Family, to: IpAddr) -> Packet {
    let kind = if family == Family::V4 { [8, 0] } else { [128, 0] };
    Packet::icmp(family.client().ip(), to, kind, [0x12, 0x34, 0, 7], b"abcdefghijklmnopqrstuvwabcdefghi")
}

#[test]
fn ping_of_a_vip_is_answered() {
    each("ping", |bed, family| {
        with_range(bed, family);
        let vip = family.vip().ip();
        let request = echo_request(family, vip);
        let kind = if family == Family::V4 { [0, 0] } else { [129, 0] };
        let reply = Packet::icmp(vip, family.client().ip(), kind, [0x12, 0x34, 0, 7], &request.payload);
        let reply = renewed(reply).swapped_macs();
        bed.send(Hook::Ingress, &request).redirects(Echo, &reply);
        // The programs answer pings only at ingress.
        bed.send(Hook::Egress, &request).passes_untouched(NotTransport);
        // The payload has an odd number of bytes.
        let odd = request.clone().with(|packet| packet.payload.push(b'!'));
        let answered = reply.clone().with(|packet| packet.payload.push(b'!'));
        bed.send(Hook::Ingress, &odd).redirects(Echo, &answered);
    });
}

/// The packet with TTL or hop limit 64, as Linux sends it.
fn renewed(mut packet: Packet) -> Packet {
    match &mut packet.ip {
        etherparse::IpHeaders::Ipv4(header, _) => header.time_to_live = 64,
        etherparse::IpHeaders::Ipv6(header, _) => header.hop_limit = 64,
    }
    packet
}

/// A fragmented ping is not answered: the reply would need the whole datagram.
#[test]
fn fragmented_ping_is_not_answered() {
    each("ping in fragments", |bed, family| {
        with_range(bed, family);
        let vip = family.vip().ip();
        let parts = fragments(&echo_request(family, vip), 77, 24);
        let outcomes: [Outcome; 2] = [NotTransport, UnknownFragment];
        for (part, outcome) in parts.iter().zip(outcomes) {
            bed.send(Hook::Ingress, part).passes_untouched(outcome);
        }
    });
}

/// ESP stands for all protocols other than TCP, UDP, SCTP and ICMP: the programs leave their packets to the stack, even
/// if a Service has the destination address.
#[test]
fn other_protocols_pass_untouched() {
    each("ESP", |bed, family| {
        with_range(bed, family);
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(50), &[7; 32]);
        bed.send(Hook::Ingress, &packet).passes_untouched(NotTransport);
    });
}
