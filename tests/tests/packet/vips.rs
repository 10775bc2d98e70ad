//! Packets to virtual addresses that are for none of their ports.

use std::net::IpAddr;

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Settings, settings_flags, vip_flags,
};

use super::{
    bench::{Bench, Device, Hook, TCP},
    packets::{Packet, fragments},
    reject::our_own,
    stage::{Family, each, each_on},
};

/// The VIPs of the stage are cluster IPs, the other one of this node; nothing else in their range is given out.
fn with_range(bench: &mut Bench, family: Family) {
    with_flags(bench, family, settings_flags::DROP_UNKNOWN_VIPS);
}

/// The same, with these `settings_flags`.
fn with_flags(bench: &mut Bench, family: Family, flags: u32) {
    let prefix = if family == Family::V4 { 24 } else { 64 };
    let service_ranges = Networks::new([Network::new(Address::from(family.vip().ip()), prefix)]);
    bench.settings(&Settings { service_ranges, flags, ports: 1, ..Settings::zeroed() });
    bench.vip(family.vip().ip(), vip_flags::CLUSTER_IP | vip_flags::ECHO);
    bench.vip(family.other_vip().ip(), 0);
    bench.service(family.vip(), TCP, &[family.backend()]);
}

fn unlisted(family: Family) -> std::net::SocketAddr {
    (family.vip().ip(), 81).into()
}

#[test]
fn a_port_that_no_service_has_is_rejected() {
    each_on(&[Device::Ethernet, Device::Bare], "unlisted port", |bench, family| {
        with_range(bench, family);
        let (client, vip) = (family.client(), unlisted(family));
        let mut reset = Packet::tcp(vip, client, 0, b"").rst().ack(1001);
        reset.tcp_header().window_size = 0;
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).bounces(RejectTcp, &our_own(reset));
        let datagram = Packet::udp(client, vip, b"x");
        let (kind, quote) = if family == Family::V4 { ([3, 3], 28) } else { ([1, 4], 48) };
        let answer = Packet::icmp(vip.ip(), client.ip(), kind, [0; 4], &datagram.network()[..quote]);
        bench.send(Hook::Ingress, &datagram).bounces(RejectUdp, &our_own(answer));
        let stray = Packet::tcp(client, vip, 1000, b"").rst();
        bench.send(Hook::Ingress, &stray).drops(StrayReset);
        bench.send(Hook::Egress, &syn).passes_untouched(NoService);
        bench.assert_flows(0);
    });
}

#[test]
fn an_address_that_no_service_has_is_dropped() {
    each("unknown VIP", |bench, family| {
        with_range(bench, family);
        for packet in [
            Packet::tcp(family.client(), family.empty_vip(), 1000, b"").syn(),
            Packet::udp(family.client(), family.empty_vip(), b"x"),
            echo_request(family, family.empty_vip().ip()),
        ] {
            bench.send(Hook::Ingress, &packet).drops(UnknownVip);
        }
        let elsewhere = Packet::udp(family.client(), family.stranger(), b"x");
        bench.send(Hook::Ingress, &elsewhere).passes_untouched(NoService);
    });
}

#[test]
fn an_address_of_the_node_is_left_to_its_stack() {
    each("VIP of the node", |bench, family| {
        with_range(bench, family);
        let own = family.other_vip();
        let syn = Packet::tcp(family.client(), own, 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).passes_untouched(NoService);
        bench.send(Hook::Ingress, &echo_request(family, own.ip())).passes_untouched(NotTransport);
    });
}

/// Nobody has said that there is nothing but cluster IPs in the range.
#[test]
fn an_address_that_no_service_has_may_be_that_of_another_machine() {
    each("unknown address", |bench, family| {
        with_flags(bench, family, 0);
        let to = family.empty_vip();
        let syn = Packet::tcp(family.client(), to, 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).passes_untouched(NoService);
        bench.send(Hook::Ingress, &echo_request(family, to.ip())).passes_untouched(NotTransport);
        // What is known to be a cluster IP is one all the same.
        let stray = Packet::tcp(family.client(), unlisted(family), 1000, b"").rst();
        bench.send(Hook::Ingress, &stray).drops(StrayReset);
    });
}

#[test]
fn without_settings_nothing_is_dropped() {
    each("no settings", |bench, family| {
        let packet = Packet::udp(family.client(), family.empty_vip(), b"x");
        bench.send(Hook::Ingress, &packet).passes_untouched(NoService);
        let ping = echo_request(family, family.empty_vip().ip());
        bench.send(Hook::Ingress, &ping).passes_untouched(NotTransport);
    });
}

fn echo_request(family: Family, to: IpAddr) -> Packet {
    let kind = if family == Family::V4 { [8, 0] } else { [128, 0] };
    Packet::icmp(family.client().ip(), to, kind, [0x12, 0x34, 0, 7], b"abcdefghijklmnopqrstuvwabcdefghi")
}

#[test]
fn a_ping_is_answered() {
    each("ping", |bench, family| {
        with_range(bench, family);
        let vip = family.vip().ip();
        let request = echo_request(family, vip);
        let kind = if family == Family::V4 { [0, 0] } else { [129, 0] };
        let reply = Packet::icmp(vip, family.client().ip(), kind, [0x12, 0x34, 0, 7], &request.payload);
        let reply = renewed(reply).bounced();
        bench.send(Hook::Ingress, &request).bounces(Echo, &reply);
        // Nobody but clients asks.
        bench.send(Hook::Egress, &request).passes_untouched(NotTransport);
        // An odd number of octets.
        let odd = request.clone().with(|packet| packet.payload.push(b'!'));
        let answered = reply.clone().with(|packet| packet.payload.push(b'!'));
        bench.send(Hook::Ingress, &odd).bounces(Echo, &answered);
    });
}

/// The TTL of an answer.
fn renewed(mut packet: Packet) -> Packet {
    match &mut packet.ip {
        etherparse::IpHeaders::Ipv4(header, _) => header.time_to_live = 64,
        etherparse::IpHeaders::Ipv6(header, _) => header.hop_limit = 64,
    }
    packet
}

/// Only what is whole: who sees the first fragment only cannot answer.
#[test]
fn fragments_of_a_ping_are_not_answered() {
    each("ping in fragments", |bench, family| {
        with_range(bench, family);
        let vip = family.vip().ip();
        let parts = fragments(&echo_request(family, vip), 77, 24);
        let outcomes: [Outcome; 2] = [NotTransport, UnknownFragment];
        for (part, outcome) in parts.iter().zip(outcomes) {
            bench.send(Hook::Ingress, part).passes_untouched(outcome);
        }
    });
}

/// What is neither TCP, UDP nor a ping is none of our business, wherever it goes.
#[test]
fn other_protocols_pass() {
    each("ESP", |bench, family| {
        with_range(bench, family);
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(50), &[7; 32]);
        bench.send(Hook::Ingress, &packet).passes_untouched(NotTransport);
    });
}
