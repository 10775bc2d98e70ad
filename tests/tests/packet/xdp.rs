//! Routed flows: the packets that XDP forwards, those that it leaves to tc, and the agreement of both hooks.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    thread::sleep,
    time::Duration,
};

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{
    Address,
    Outcome::*,
    Service, backend_flags,
    conntrack::{Flow, Tuple, flow_flags},
    service_flags,
};
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    clock,
    packets::{Packet, QINQ, VLAN, fragments},
    stage::{FIRST_PORT, Family, PORTS, each, masquerade_settings},
    test_run::stay_on_one_cpu,
    testbed::{Hook, SCTP, TCP, Testbed, UDP},
    tunnel,
    wire::{
        Mode, NARROW_MTU, OTHER, Run, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, WIRE, XDP_PASS,
        XDP_REDIRECT, XDP_TX, each_on_wires, routed,
    },
};

/// Writes a Service that masquerades its clients, with these backends, and the settings for masquerading.
pub(super) fn service(bed: &mut Testbed, vip: SocketAddr, protocol: u8, backends: &[SocketAddr]) {
    let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
    bed.service_with(vip, protocol, backends, record);
    bed.settings(&masquerade_settings(PORTS));
}

/// The packet as its flow translates it.
pub(super) fn translated(bed: &Testbed, packet: &Packet) -> Packet {
    let to = bed.flows()[&packet.tuple()].to;
    let end = |ip: Address, port| SocketAddr::new(IpAddr::from(ip), port);
    packet.clone().from(end(to.source, to.source_port)).to(end(to.destination, to.destination_port))
}

/// Asserts that the program opened a flow for `packet` in this run, and sent the packet out translated; returns the
/// translated packet.
#[track_caller]
fn begins(bed: &Testbed, family: Family, packet: &Packet, run: Run) -> Packet {
    let expected = translated(bed, packet);
    let from = expected.tuple();
    assert_eq!(IpAddr::from(from.source), family.node());
    assert!((FIRST_PORT..FIRST_PORT + PORTS).contains(&from.source_port), "{from:?}");
    run.leaves(XDP_TX, NewRoutedFlow, &routed(&expected));
    expected
}

#[test]
fn routed_tcp_connection_leaves_in_both_directions() {
    each_on_wires("routed TCP", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            let (client, vip, backend) = (family.client(), family.vip(), family.backend());
            service(bed, vip, TCP, &[backend]);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            let run = bed.arrive(mode, &syn);
            let sent = begins(bed, family, &syn, run);
            bed.assert_flows(1);
            for flow in bed.flows().values() {
                assert_ne!(flow.flags & flow_flags::ROUTED, 0);
            }
            bed.arrive(mode, &syn).leaves(XDP_TX, Routed, &routed(&sent));
            let node = sent.tuple().source_socket();
            let steps = [
                (false, Packet::tcp(backend, node, 5000, b"").syn().ack(1001)),
                (true, Packet::tcp(client, vip, 1001, b"GET / HTTP/1.1").ack(5001)),
                (false, Packet::tcp(backend, node, 5001, b"odd").ack(1015)),
                (true, Packet::tcp(client, vip, 1015, b"").fin().ack(5004)),
                (false, Packet::tcp(backend, node, 5004, b"").fin().ack(1016)),
            ];
            for (there, packet) in steps {
                let expected = if there {
                    packet.clone().from(node).to(backend)
                } else {
                    packet.clone().from(vip).to(client)
                };
                bed.arrive(mode, &packet).leaves(XDP_TX, Routed, &routed(&expected));
            }
            // A segment with invalid flags does not end the flow, though it looks like an answer to another connection.
            let invalid = Packet::tcp(backend, node, 9000, b"").syn().fin().ack(7);
            bed.arrive(mode, &invalid).drops(InvalidFlags);
            bed.assert_flows(1);
            // The client reuses its port.
            let run = bed.arrive(mode, &syn);
            begins(bed, family, &syn, run);
            bed.assert_flows(1);
        }
    });
}

/// Only tc sends packets through the kernel's neighbour table, which makes the kernel check that the neighbour is still
/// reachable.
#[test]
fn xdp_leaves_the_first_packet_of_a_later_tick_to_tc() {
    // Each CPU has its own next hops.
    stay_on_one_cpu();
    each_on_wires("check of the neighbour", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            service(bed, family.vip(), UDP, &[family.backend()]);
            let packet = Packet::udp(family.client(), family.vip(), b"x");
            let run = bed.arrive(mode, &packet);
            let sent = begins(bed, family, &packet, run);
            // A tick lasts 1.07 s.
            sleep(Duration::from_millis(1_100));
            bed.arrive_once(mode, &packet.bytes()).stays_for_tc();
            bed.arrive(mode, &packet).leaves(XDP_TX, Routed, &routed(&sent));
        }
    });
}

#[test]
fn routed_udp_flows_leave_with_and_without_checksum() {
    each_on_wires("routed UDP", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            service(bed, family.vip(), UDP, &[family.backend()]);
            for (payload, checksum) in [(&b"odd"[..], true), (b"even", true), (b"", true), (b"none", false)] {
                if !checksum && family == Family::V6 {
                    continue;
                }
                let mut packet = Packet::udp(family.client(), family.vip(), payload);
                if !checksum {
                    packet.transport = super::packets::Transport::Udp { ports: (40_000, 80), checksum };
                }
                let run = bed.arrive(mode, &packet);
                let sent = translated(bed, &packet);
                let outcome = if run.moved == [(NewRoutedFlow, 1)] { NewRoutedFlow } else { Routed };
                run.leaves(XDP_TX, outcome, &routed(&sent));
            }
            bed.assert_flows(1);
        }
    });
}

#[test]
fn routed_packets_keep_options_and_extension_headers() {
    each_on_wires("routed, with options", |bed, family| {
        service(bed, family.vip(), TCP, &[family.backend()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        let with_options = syn.with(|packet| {
            if packet.is_v4() {
                packet.v4().options = [1, 1, 1, 0, 1, 1, 1, 0][..].try_into().unwrap();
            } else {
                let header =
                    etherparse::Ipv6RawExtHeader::new_raw(IpNumber::TCP, &[1, 4, 0, 0, 0, 0]).unwrap();
                packet.extensions().hop_by_hop_options = Some(header);
            }
        });
        let run = bed.arrive(Mode::Native, &with_options);
        begins(bed, family, &with_options, run);
    });
}

#[test]
fn frames_leave_through_another_wire_that_takes_them() {
    each_on_wires("routed, another wire", |bed, family| {
        if family == Family::V6 {
            return;
        }
        let backend = "203.0.113.194:8080".parse().unwrap();
        service(bed, family.vip(), TCP, &[backend]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        let run = bed.arrive(Mode::Native, &syn);
        let expected = translated(bed, &syn);
        assert_eq!(IpAddr::from(expected.tuple().source), "203.0.113.253".parse::<IpAddr>().unwrap());
        run.leaves(XDP_REDIRECT, NewRoutedFlow, &routed(&expected));
        // XDP redirects frames only to wire devices, both frames of existing flows and frames that begin a flow.
        bed.remove_wire(OTHER);
        bed.expire_next_hops();
        bed.arrive(Mode::Native, &syn).stays_for_tc();
        let other = Packet::tcp(family.stranger(), family.vip(), 1000, b"").syn();
        bed.arrive(Mode::Native, &other).stays_for_tc();
        bed.assert_flows(1);
        // XDP redirects only frames that arrive on a wire device.
        bed.add_wire(OTHER, 1500);
        bed.remove_wire(WIRE);
        bed.expire_next_hops();
        bed.arrive(Mode::Native, &other).stays_for_tc();
        bed.add_wire(WIRE, 1500);
        let run = bed.arrive(Mode::Native, &other);
        run.leaves(XDP_REDIRECT, NewRoutedFlow, &routed(&translated(bed, &other)));
    });
}

#[test]
fn uncommon_packets_are_left_to_tc() {
    each_on_wires("left to tc", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for protocol in [TCP, UDP, SCTP] {
            service(bed, vip, protocol, &[backend]);
        }
        let local = family.other_vip();
        let here = Service { id: 2, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        let (backends_base, backends_count) = bed.slice(&[backend], backend_flags::HOST);
        let key = lb_common::ServiceKey::new(local.ip().into(), local.port(), TCP);
        bed.record(&key, &Service { backends_base, backends_count, ..here }.sealed(&key));
        bed.service(family.empty_vip(), TCP, &[]);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let large = Packet::udp(client, vip, &[7; 600]);
        let unlike = [
            ("VLAN", syn.clone().with(|packet| packet.tags().push((VLAN, 100)))),
            ("QinQ", syn.clone().with(|packet| packet.tags().extend([(QINQ, 1), (VLAN, 2)]))),
            ("SCTP", Packet::sctp(client, vip, 0, 1, &[0; 16])),
            (
                "ESP",
                Packet::raw(client.ip(), vip.ip(), IpNumber::ENCAPSULATING_SECURITY_PAYLOAD, b"12345678"),
            ),
            ("echo", Packet::icmp(client.ip(), vip.ip(), [8, 0], [0, 1, 0, 1], b"ping")),
            ("no Service", Packet::tcp(client, family.stranger(), 1000, b"").syn()),
            ("a backend on this node", Packet::tcp(client, local, 1000, b"").syn()),
            ("no backend", Packet::tcp(client, family.empty_vip(), 1000, b"").syn()),
            ("the last hop", syn.clone().hops(1)),
        ];
        for mode in Mode::BOTH {
            for (what, packet) in &unlike {
                bed.label(what);
                bed.arrive(mode, packet).stays_for_tc();
                bed.clear_flows();
            }
            for fragment in fragments(&large, 7, 400) {
                bed.label("fragment");
                bed.arrive(mode, &fragment).stays_for_tc();
            }
            bed.label("ARP");
            bed.arrive_bytes(mode, &[&[0xff; 12][..], &[8, 6], &[0; 46]].concat()).stays_for_tc();
            bed.assert_flows(0);
        }
    });
}

#[test]
fn packets_without_route_or_neighbour_are_left_to_tc() {
    each_on_wires("left to tc: the way", |bed, family| {
        let unknown = match family {
            Family::V4 => "198.51.100.77:8080",
            Family::V6 => "[2001:db8:b::77]:8080",
        };
        service(bed, family.vip(), TCP, &[unknown.parse().unwrap()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bed.arrive(Mode::Native, &syn).stays_for_tc();
        // XDP has created the routed flow, and tc can resolve the neighbour.
        bed.assert_flows(1);
        bed.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(Routed, 1)]);
    });
}

#[test]
fn partial_checksum_is_left_to_tc() {
    each_on_wires("left to tc: partial checksum", |bed, family| {
        for (protocol, packet) in [
            (TCP, Packet::tcp(family.client(), family.vip(), 1000, b"hello").syn()),
            (UDP, Packet::udp(family.client(), family.vip(), b"hello")),
        ] {
            service(bed, family.vip(), protocol, &[family.backend()]);
            let mut bytes = packet.bytes();
            let l4 = 14 + if packet.is_v4() { 20 } else { 40 };
            let at = l4 + if protocol == TCP { 16 } else { 6 };
            let length = u32::try_from(bytes.len() - l4).unwrap();
            let addresses = &bytes[l4 - if packet.is_v4() { 8 } else { 32 }..l4];
            let words = addresses.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
            let mut sum: u32 = words.sum::<u32>() + u32::from(protocol) + length;
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            bytes[at..at + 2].copy_from_slice(&u16::try_from(sum).unwrap().to_be_bytes());
            for mode in Mode::BOTH {
                bed.arrive_bytes(mode, &bytes).stays_for_tc();
            }
        }
    });
}

#[test]
fn xdp_counts_its_drops() {
    each_on_wires("dropped at XDP", |bed, family| {
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        for (flags, backends, outcome) in [
            (service_flags::DROP_WITHOUT_BACKENDS, &[][..], NoLocalBackend),
            (
                service_flags::SOURCE_RANGES | service_flags::MASQUERADE,
                &[family.backend()][..],
                SourceNotAllowed,
            ),
        ] {
            let record = Service { id: 1, flags, ..Service::zeroed() };
            bed.service_with(family.vip(), TCP, backends, record);
            for mode in Mode::BOTH {
                bed.arrive(mode, &syn).drops(outcome);
            }
        }
        // Without settings there are no source ports.
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[family.backend()], record);
        bed.arrive(Mode::Native, &syn).drops(NoSourcePort);
    });
}

#[test]
fn flows_begun_at_tc_are_left_to_tc() {
    each_on_wires("flows of tc", |bed, family| {
        bed.service(family.vip(), TCP, &[family.backend()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bed.arrive(Mode::Native, &syn).stays_for_tc();
        bed.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(family.backend()));
        bed.arrive(Mode::Native, &syn).stays_for_tc();
    });
}

#[test]
fn clients_are_masqueraded_in_two_steps_without_wires() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("no wires", |bed, family| {
        service(bed, family.vip(), TCP, &[family.backend()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes_any(NewFlow);
        bed.assert_flows(2);
    });
}

#[test]
fn flows_over_a_route_with_a_smaller_mtu_are_left_to_tc() {
    each_on_wires("narrow", |bed, family| {
        if family == Family::V6 {
            return;
        }
        service(bed, family.vip(), TCP, &["203.0.113.130:8080".parse().unwrap()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bed.arrive(Mode::Native, &syn).stays_for_tc();
        bed.arrive_at_tc(&syn).check(TC_ACT_UNSPEC, &[(NewFlow, 1)]);
        bed.assert_flows(2);
    });
}

#[test]
fn packet_that_became_too_large_is_answered_at_tc() {
    each_on_wires("too large", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        service(bed, vip, TCP, &[family.backend()]);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let run = bed.arrive(Mode::Native, &syn);
        begins(bed, family, &syn, run);
        // Gives the route to the backend a smaller MTU.
        let to = family.backend().ip();
        let family_flag = if family == Family::V4 { "-4" } else { "-6" };
        let arguments = format!("{family_flag} route add {to} dev wire mtu lock {NARROW_MTU}");
        assert!(std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
        bed.expire_next_hops();
        let large = Packet::tcp(client, vip, 1001, &[1; 1400]).ack(1);
        bed.arrive(Mode::Native, &large).stays_for_tc();
        let run = bed.arrive_at_tc(&large);
        run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
        let (kind, mtu) =
            if family == Family::V4 { ([3, 4], [0, 0, 0x05, 0x14]) } else { ([2, 0], [0, 0, 0x05, 0x14]) };
        let at = if family == Family::V4 { 34 } else { 54 };
        assert_eq!(run.output[at..at + 2], kind);
        assert_eq!(run.output[at + 4..at + 8], mtu, "1300 bytes");
        let small = Packet::tcp(client, vip, 1001, &[1; 1200]).ack(1);
        let expected = routed(&translated(bed, &small));
        bed.arrive(Mode::Native, &small).leaves(XDP_TX, Routed, &expected);
        let arguments = format!("{family_flag} route del {to} dev wire mtu lock {NARROW_MTU}");
        assert!(std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
    });
}

#[test]
fn last_hop_is_answered_at_tc() {
    each_on_wires("time exceeded", |bed, family| {
        service(bed, family.vip(), UDP, &[family.backend()]);
        let packet = Packet::udp(family.client(), family.vip(), b"traceroute").hops(1);
        bed.arrive(Mode::Native, &packet).stays_for_tc();
        let run = bed.arrive_at_tc(&packet);
        run.check(TC_ACT_REDIRECT, &[(TimeExceeded, 1)]);
        let (at, kind) = if family == Family::V4 { (34, [11, 0]) } else { (54, [3, 0]) };
        assert_eq!(run.output[at..at + 2], kind);
    });
}

#[test]
fn icmp_errors_reach_both_ends_of_a_routed_flow() {
    each_on_wires("ICMP errors", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        service(bed, vip, UDP, &[family.backend()]);
        let packet = Packet::udp(client, vip, b"too large for the link");
        let run = bed.arrive(Mode::Native, &packet);
        let seen = begins(bed, family, &packet, run);
        let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
        let length = if family == Family::V4 { 28 } else { 48 };
        let (original, quoted) = super::icmp::quote(&packet, &seen, length);
        let node = IpAddr::from(seen.tuple().source);
        let error = Packet::icmp(family.router(), node, kind, [0, 0, 5, 0x78], &quoted);
        bed.arrive(Mode::Native, &error).stays_for_tc();
        let run = bed.arrive_at_tc(&error);
        run.check(TC_ACT_REDIRECT, &[(RoutedIcmpError, 1)]);
        let expected = Packet::icmp(vip.ip(), client.ip(), kind, [0, 0, 5, 0x78], &original);
        assert_eq!(run.output[14..], routed(&expected).bytes()[14..]);
        bed.arrive_at_tc(&error.hops(1)).check(TC_ACT_SHOT, &[(NoRoute, 1)]);
    });
}

/// A random packet of a flow.
#[derive(Clone, Debug)]
struct Case {
    v4: bool,
    protocol: u8,
    client: u16,
    flags: u8,
    payload: Vec<u8>,
    hops: u8,
    /// Whether XDP runs before tc if the packet has a flow. If the packet has no flow, XDP always runs first.
    xdp_first: bool,
    reply: bool,
    fragment: bool,
    /// Whether the packet is for the DSR Service, whose backend is on another node.
    dsr: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let payload = proptest::collection::vec(any::<u8>(), 0..600);
    let protocol = prop_oneof![Just(TCP), Just(UDP)];
    let rarely = || prop::bool::weighted(0.1);
    let hops = prop_oneof![9 => 2..=255u8, 1 => 0..=1u8];
    let choices = (any::<bool>(), any::<bool>(), any::<bool>(), rarely(), any::<bool>());
    (protocol, 1..8u16, any::<u8>(), payload, hops, choices).prop_map(
        |(protocol, client, flags, payload, hops, (v4, xdp_first, reply, fragment, dsr))| Case {
            v4,
            protocol,
            client,
            flags,
            payload,
            hops,
            xdp_first,
            reply,
            fragment,
            dsr,
        },
    )
}

impl Case {
    fn packet(&self, family: Family, bed: &Testbed) -> Packet {
        let client = SocketAddr::new(family.client().ip(), self.client);
        let vip = if self.dsr { family.other_vip() } else { family.vip() };
        let build = |from, to| match self.protocol {
            TCP => {
                let Self { flags, payload, .. } = self;
                Packet::tcp(from, to, u32::from(*flags) * 1000, payload).with(|packet| {
                    let header = packet.tcp_header();
                    (header.fin, header.syn) = (flags & 1 != 0, flags & 2 != 0);
                    (header.rst, header.ack) = (flags & 0x1c == 4, flags & 16 != 0);
                })
            }
            _ => Packet::udp(from, to, &self.payload),
        };
        let there = build(client, vip);
        let packet = match bed.flows().get(&there.tuple()) {
            Some(flow) if self.reply => {
                let back = flow.to.reversed();
                let end = |ip: Address, port| SocketAddr::new(IpAddr::from(ip), port);
                build(end(back.source, back.source_port), end(back.destination, back.destination_port))
            }
            _ => there,
        };
        packet.hops(self.hops)
    }
}

/// All flows as text, for comparison.
fn state(bed: &Testbed) -> Vec<String> {
    bed.flows().iter().map(|(key, flow)| format!("{key:?} {flow:?}")).collect()
}

/// Whether the packet was forwarded in an existing flow.
fn is_forwarded(run: &Run) -> bool {
    run.moved == [(Routed, 1)] || run.moved == [(Tunnelled, 1)]
}

/// Runs the packet at XDP and at tc, both with the flows of `before`; returns the results and the flows afterwards.
fn both(
    bed: &mut Testbed,
    packet: &Packet,
    before: &BTreeMap<Tuple, Flow>,
    xdp_first: bool,
) -> [(Run, Vec<String>); 2] {
    let order = if xdp_first { [true, false] } else { [false, true] };
    let mut runs = order.map(|by_xdp| {
        bed.restore_flows(before);
        let run = if by_xdp { bed.arrive(Mode::Generic, packet) } else { bed.arrive_at_tc(packet) };
        (run, state(bed))
    });
    if !xdp_first {
        runs.reverse();
    }
    runs
}

/// Asserts that XDP and tc agree on a packet. If the packet has a flow, both run with the same flows and within one
/// tick. If XDP forwards the packet in an existing flow, tc forwards the same bytes, and both leave the same flows. If
/// XDP leaves the packet to tc, XDP has not changed it.
fn agree(bed: &mut Testbed, case: &Case) {
    let family = if case.v4 { Family::V4 } else { Family::V6 };
    let whole = case.packet(family, bed);
    let packet = if case.fragment && !case.payload.is_empty() {
        fragments(&whole, 9, 32).swap_remove(0)
    } else {
        whole
    };
    bed.label(&format!("{case:?}"));
    let before = bed.flows();
    let (xdp, at_tc);
    if before.contains_key(&packet.tuple()) {
        let [(by_xdp, after_xdp), (by_tc, after_tc)] =
            clock::within_a_tick(|| both(bed, &packet, &before, case.xdp_first));
        if is_forwarded(&by_xdp) {
            let differ = after_xdp.iter().zip(&after_tc).find(|(one, other)| one != other);
            assert_eq!(differ, None, "{case:?}");
        }
        (xdp, at_tc) = (by_xdp, by_tc);
    } else {
        // The first packet of a flow gets a random port. tc runs with the flow that XDP has begun, if any, and so uses
        // the same port.
        xdp = bed.arrive(Mode::Generic, &packet);
        at_tc = bed.arrive_at_tc(&packet);
    }
    match xdp.action {
        XDP_PASS => assert_eq!((xdp.output.as_slice(), &*xdp.moved), (&*packet.bytes(), &[][..])),
        XDP_TX => {
            assert_eq!(at_tc.action, TC_ACT_REDIRECT, "{case:?}: {xdp:?} {at_tc:?}");
            if is_forwarded(&at_tc) || at_tc.moved == [(NewTunnelledFlow, 1)] {
                assert_eq!(xdp.output[14..], at_tc.output[14..], "{case:?}");
            } else {
                // A SYN of an ended flow begins a new one with a random port, so the bytes differ.
                assert_eq!(
                    (&*xdp.moved, &*at_tc.moved),
                    (&[(NewRoutedFlow, 1)][..], &[(NewRoutedFlow, 1)][..])
                );
            }
        }
        _ => assert_eq!(at_tc.moved, xdp.moved, "{case:?}"),
    }
}

#[test]
fn xdp_and_tc_agree() {
    each_on_wires("agreement", |bed, family| {
        if family == Family::V6 {
            return;
        }
        let counted = std::cell::RefCell::new((0u32, 0u32, 0usize));
        let bed = std::cell::RefCell::new(bed);
        let sequences = proptest::collection::vec(cases(), 1..40);
        let mut runner = TestRunner::new(ProptestConfig { cases: 60, ..ProptestConfig::default() });
        runner
            .run(&sequences, |sequence| {
                let mut bed = bed.borrow_mut();
                bed.clear_flows();
                let kind = tunnel::Kind::BOTH[sequence.len() % 2];
                for family in Family::BOTH {
                    for protocol in [TCP, UDP] {
                        let backends = [family.backend(), family.other_backend()];
                        service(&mut bed, family.vip(), protocol, &backends);
                        tunnel::service(
                            &mut bed,
                            family.other_vip(),
                            protocol,
                            &backends,
                            backend_flags::PEER,
                        );
                    }
                }
                bed.settings(&tunnel::settings(kind));
                for case in &sequence {
                    agree(&mut bed, case);
                    counted.borrow_mut().0 += 1;
                }
                counted.borrow_mut().1 += u32::from(!bed.flows().is_empty());
                counted.borrow_mut().2 += bed.flows().values().filter(|flow| flow.is_tunnelled()).count();
                bed.reuse_slots();
                Ok(())
            })
            .unwrap();
        let (packets, with_flows, tunnelled) = *counted.borrow();
        assert!(
            packets > 500 && with_flows > 40 && tunnelled > 100,
            "{packets} packets, {with_flows} runs with flows, {tunnelled} of them in tunnels show little"
        );
    });
}
