//! Routed flows: what XDP sends on, what it leaves to tc, and that both do the same.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{
    Address,
    Outcome::*,
    Service, Settings, backend_flags,
    conntrack::{Flow, Tuple, flow_flags},
    service_flags,
};
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    bench::{Bench, Hook, SCTP, TCP, UDP},
    clock,
    packets::{Packet, QINQ, VLAN, fragments},
    stage::{Family, each},
    tunnel,
    wire::{
        Mode, NARROW_MTU, OTHER, Run, TC_ACT_REDIRECT, WIRE, XDP_PASS, XDP_REDIRECT, XDP_TX, each_on_wires,
        routed,
    },
};

const FIRST_PORT: u16 = 10_000;
const PORTS: u16 = 20_000;

/// A service whose clients are masqueraded, with these backends.
fn service(bench: &mut Bench, vip: SocketAddr, protocol: u8, backends: &[SocketAddr]) {
    let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
    bench.service_with(vip, protocol, backends, record);
    let settings = Settings {
        source_v4: Address::from(Family::V4.node()),
        source_v6: Address::from(Family::V6.node()),
        first_port: FIRST_PORT,
        ports: PORTS,
        ..Settings::zeroed()
    };
    bench.settings(&settings);
}

/// What the packet becomes by its flow.
fn translated(bench: &Bench, packet: &Packet) -> Packet {
    let to = bench.flows()[&packet.tuple()].to;
    let end = |ip: Address, port| SocketAddr::new(IpAddr::from(ip), port);
    packet.clone().from(end(to.source, to.source_port)).to(end(to.destination, to.destination_port))
}

/// The first packet of a flow; what leaves. `run` is what was done with it.
#[track_caller]
fn begins(bench: &Bench, family: Family, packet: &Packet, run: Run) -> Packet {
    let expected = translated(bench, packet);
    let from = expected.tuple();
    assert_eq!(IpAddr::from(from.source), family.node());
    assert!((FIRST_PORT..FIRST_PORT + PORTS).contains(&from.source_port), "{from:?}");
    run.leaves(XDP_TX, NewRoutedFlow, &routed(&expected));
    expected
}

#[test]
fn a_tcp_connection_goes_out_again_in_both_directions() {
    each_on_wires("routed TCP", |bench, family| {
        for mode in Mode::BOTH {
            bench.forget_flows();
            let (client, vip, backend) = (family.client(), family.vip(), family.backend());
            service(bench, vip, TCP, &[backend]);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            let run = bench.arrive(mode, &syn);
            let sent = begins(bench, family, &syn, run);
            bench.assert_flows(1);
            for flow in bench.flows().values() {
                assert_ne!(flow.flags & flow_flags::ROUTED, 0);
            }
            bench.arrive(mode, &syn).leaves(XDP_TX, Routed, &routed(&sent));
            let node = SocketAddr::new(sent.tuple().source.into(), sent.tuple().source_port);
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
                bench.arrive(mode, &packet).leaves(XDP_TX, Routed, &routed(&expected));
            }
            // The client uses its port again.
            let run = bench.arrive(mode, &syn);
            begins(bench, family, &syn, run);
            bench.assert_flows(1);
        }
    });
}

#[test]
fn udp_flows_with_and_without_checksums() {
    each_on_wires("routed UDP", |bench, family| {
        for mode in Mode::BOTH {
            bench.forget_flows();
            service(bench, family.vip(), UDP, &[family.backend()]);
            for (payload, checksum) in [(&b"odd"[..], true), (b"even", true), (b"", true), (b"none", false)] {
                if !checksum && family == Family::V6 {
                    continue;
                }
                let mut packet = Packet::udp(family.client(), family.vip(), payload);
                if !checksum {
                    packet.transport = super::packets::Transport::Udp { ports: (40_000, 80), checksum };
                }
                let run = bench.arrive(mode, &packet);
                let sent = translated(bench, &packet);
                let outcome = if run.moved == [(NewRoutedFlow, 1)] { NewRoutedFlow } else { Routed };
                run.leaves(XDP_TX, outcome, &routed(&sent));
            }
            bench.assert_flows(1);
        }
    });
}

#[test]
fn options_and_extension_headers_stay() {
    each_on_wires("routed, with options", |bench, family| {
        service(bench, family.vip(), TCP, &[family.backend()]);
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
        let run = bench.arrive(Mode::Native, &with_options);
        begins(bench, family, &with_options, run);
    });
}

#[test]
fn frames_leave_through_another_wire_that_takes_them() {
    each_on_wires("routed, another wire", |bench, family| {
        if family == Family::V6 {
            return;
        }
        let backend = "203.0.113.194:8080".parse().unwrap();
        service(bench, family.vip(), TCP, &[backend]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        let run = bench.arrive(Mode::Native, &syn);
        let expected = translated(bench, &syn);
        assert_eq!(IpAddr::from(expected.tuple().source), "203.0.113.253".parse::<IpAddr>().unwrap());
        run.leaves(XDP_REDIRECT, NewRoutedFlow, &routed(&expected));
        // One that does not: neither new flows nor those that there are.
        bench.no_wire(OTHER);
        bench.forget_hops();
        bench.arrive(Mode::Native, &syn).stays_for_tc();
        let other = Packet::tcp(family.stranger(), family.vip(), 1000, b"").syn();
        bench.arrive(Mode::Native, &other).stays_for_tc();
        bench.assert_flows(1);
        // Nor frames that come in through what is none.
        bench.no_wire(WIRE);
        bench.arrive(Mode::Native, &other).stays_for_tc();
    });
}

#[test]
fn what_is_not_plain_is_left_to_tc() {
    each_on_wires("left to tc", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for protocol in [TCP, UDP, SCTP] {
            service(bench, vip, protocol, &[backend]);
        }
        let local = family.other_vip();
        let here = Service { id: 2, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        let (backends_base, backends_count) = bench.slice(&[backend], backend_flags::HOST);
        let key = lb_common::ServiceKey::new(local.ip().into(), local.port(), TCP);
        bench.record(&key, &Service { backends_base, backends_count, ..here }.sealed(&key));
        bench.service(family.empty_vip(), TCP, &[]);
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
            ("a stranger", Packet::tcp(client, family.stranger(), 1000, b"").syn()),
            ("a backend on this node", Packet::tcp(client, local, 1000, b"").syn()),
            ("no backend", Packet::tcp(client, family.empty_vip(), 1000, b"").syn()),
            ("the last hop", syn.clone().hops(1)),
        ];
        for mode in Mode::BOTH {
            for (what, packet) in &unlike {
                bench.label(what);
                bench.arrive(mode, packet).stays_for_tc();
                bench.forget_flows();
            }
            for fragment in fragments(&large, 7, 400) {
                bench.label("fragment");
                bench.arrive(mode, &fragment).stays_for_tc();
            }
            bench.label("ARP");
            bench.arrive_octets(mode, &[&[0xff; 12][..], &[8, 6], &[0; 46]].concat()).stays_for_tc();
            bench.assert_flows(0);
        }
    });
}

#[test]
fn without_a_neighbour_or_a_route_tc_finds_the_way() {
    each_on_wires("left to tc: the way", |bench, family| {
        let unknown = match family {
            Family::V4 => "198.51.100.77:8080",
            Family::V6 => "[2001:db8:b::77]:8080",
        };
        service(bench, family.vip(), TCP, &[unknown.parse().unwrap()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bench.arrive(Mode::Native, &syn).stays_for_tc();
        // The flow is routed, and tc knows how to ask for the neighbour.
        bench.assert_flows(1);
        bench.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(Routed, 1)]);
    });
}

#[test]
fn a_checksum_that_is_still_to_be_computed_is_left_to_tc() {
    each_on_wires("left to tc: partial checksum", |bench, family| {
        for (protocol, packet) in [
            (TCP, Packet::tcp(family.client(), family.vip(), 1000, b"hello").syn()),
            (UDP, Packet::udp(family.client(), family.vip(), b"hello")),
        ] {
            service(bench, family.vip(), protocol, &[family.backend()]);
            let mut octets = packet.bytes();
            let l4 = 14 + if packet.is_v4() { 20 } else { 40 };
            let at = l4 + if protocol == TCP { 16 } else { 6 };
            let length = u32::try_from(octets.len() - l4).unwrap();
            let addresses = &octets[l4 - if packet.is_v4() { 8 } else { 32 }..l4];
            let words = addresses.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
            let mut sum: u32 = words.sum::<u32>() + u32::from(protocol) + length;
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            octets[at..at + 2].copy_from_slice(&u16::try_from(sum).unwrap().to_be_bytes());
            for mode in Mode::BOTH {
                bench.arrive_octets(mode, &octets).stays_for_tc();
            }
        }
    });
}

#[test]
fn drops_are_counted_here() {
    each_on_wires("dropped at XDP", |bench, family| {
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
            bench.service_with(family.vip(), TCP, backends, record);
            for mode in Mode::BOTH {
                bench.arrive(mode, &syn).drops(outcome);
            }
        }
        // No settings, hence no source ports.
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bench.service_with(family.vip(), TCP, &[family.backend()], record);
        bench.arrive(Mode::Native, &syn).drops(NoSourcePort);
    });
}

#[test]
fn flows_of_tc_stay_with_tc() {
    each_on_wires("flows of tc", |bench, family| {
        bench.service(family.vip(), TCP, &[family.backend()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bench.arrive(Mode::Native, &syn).stays_for_tc();
        bench.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(family.backend()));
        bench.arrive(Mode::Native, &syn).stays_for_tc();
    });
}

#[test]
fn without_wires_clients_are_masqueraded_in_two_steps() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("no wires", |bench, family| {
        service(bench, family.vip(), TCP, &[family.backend()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).goes_on(NewFlow);
        bench.assert_flows(2);
    });
}

#[test]
fn a_way_that_takes_less_than_the_wire_is_none_for_routed_flows() {
    each_on_wires("narrow", |bench, family| {
        if family == Family::V6 {
            return;
        }
        service(bench, family.vip(), TCP, &["203.0.113.130:8080".parse().unwrap()]);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bench.arrive(Mode::Native, &syn).stays_for_tc();
        bench.arrive_at_tc(&syn).check(u32::MAX, &[(NewFlow, 1)]);
        bench.assert_flows(2);
    });
}

#[test]
fn a_packet_that_has_become_too_large_is_answered_at_tc() {
    each_on_wires("too large", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        service(bench, vip, TCP, &[family.backend()]);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let run = bench.arrive(Mode::Native, &syn);
        begins(bench, family, &syn, run);
        // The backend moves behind a narrow link.
        let to = family.backend().ip();
        let family_flag = if family == Family::V4 { "-4" } else { "-6" };
        let arguments = format!("{family_flag} route add {to} dev wire mtu lock {NARROW_MTU}");
        assert!(std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
        bench.forget_hops();
        let large = Packet::tcp(client, vip, 1001, &[1; 1400]).ack(1);
        bench.arrive(Mode::Native, &large).stays_for_tc();
        let run = bench.arrive_at_tc(&large);
        run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
        let (kind, mtu) =
            if family == Family::V4 { ([3, 4], [0, 0, 0x05, 0x14]) } else { ([2, 0], [0, 0, 0x05, 0x14]) };
        let at = if family == Family::V4 { 34 } else { 54 };
        assert_eq!(run.output[at..at + 2], kind);
        assert_eq!(run.output[at + 4..at + 8], mtu, "1300 octets");
        let small = Packet::tcp(client, vip, 1001, &[1; 1200]).ack(1);
        let expected = routed(&translated(bench, &small));
        bench.arrive(Mode::Native, &small).leaves(XDP_TX, Routed, &expected);
        let arguments = format!("{family_flag} route del {to} dev wire mtu lock {NARROW_MTU}");
        assert!(std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
    });
}

#[test]
fn the_last_hop_is_answered_at_tc() {
    each_on_wires("time exceeded", |bench, family| {
        service(bench, family.vip(), UDP, &[family.backend()]);
        let packet = Packet::udp(family.client(), family.vip(), b"traceroute").hops(1);
        bench.arrive(Mode::Native, &packet).stays_for_tc();
        let run = bench.arrive_at_tc(&packet);
        run.check(TC_ACT_REDIRECT, &[(TimeExceeded, 1)]);
        let (at, kind) = if family == Family::V4 { (34, [11, 0]) } else { (54, [3, 0]) };
        assert_eq!(run.output[at..at + 2], kind);
    });
}

#[test]
fn icmp_errors_find_their_way_to_both_ends() {
    each_on_wires("ICMP errors", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        service(bench, vip, UDP, &[family.backend()]);
        let packet = Packet::udp(client, vip, b"too large for somebody");
        let run = bench.arrive(Mode::Native, &packet);
        let seen = begins(bench, family, &packet, run);
        let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
        let length = if family == Family::V4 { 28 } else { 48 };
        let (original, quoted) = super::icmp::quote(&packet, &seen, length);
        let node = IpAddr::from(seen.tuple().source);
        let error = Packet::icmp(family.router(), node, kind, [0, 0, 5, 0x78], &quoted);
        bench.arrive(Mode::Native, &error).stays_for_tc();
        let run = bench.arrive_at_tc(&error);
        run.check(TC_ACT_REDIRECT, &[(RoutedIcmpError, 1)]);
        let expected = Packet::icmp(vip.ip(), client.ip(), kind, [0, 0, 5, 0x78], &original);
        assert_eq!(run.output[14..], expected.bytes()[14..]);
    });
}

/// A packet of some flow, in some state.
#[derive(Clone, Debug)]
struct Case {
    v4: bool,
    protocol: u8,
    client: u16,
    flags: u8,
    payload: Vec<u8>,
    hops: u8,
    /// What comes first: XDP or tc.
    xdp_first: bool,
    reply: bool,
    fragment: bool,
    /// Whether it is for the service whose backends, on another node, answer directly.
    direct: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let payload = proptest::collection::vec(any::<u8>(), 0..600);
    let protocol = prop_oneof![Just(TCP), Just(UDP)];
    let rarely = || prop::bool::weighted(0.1);
    let hops = prop_oneof![9 => 2..=255u8, 1 => 0..=1u8];
    let choices = (any::<bool>(), any::<bool>(), any::<bool>(), rarely(), any::<bool>());
    (protocol, 1..8u16, any::<u8>(), payload, hops, choices).prop_map(
        |(protocol, client, flags, payload, hops, (v4, xdp_first, reply, fragment, direct))| Case {
            v4,
            protocol,
            client,
            flags,
            payload,
            hops,
            xdp_first,
            reply,
            fragment,
            direct,
        },
    )
}

impl Case {
    fn packet(&self, family: Family, bench: &Bench) -> Packet {
        let client = SocketAddr::new(family.client().ip(), self.client);
        let vip = if self.direct { family.other_vip() } else { family.vip() };
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
        let packet = match bench.flows().get(&there.tuple()) {
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

/// The state without next hops, which only XDP keeps.
fn state(bench: &Bench) -> Vec<String> {
    let mut flows = bench.flows();
    for flow in flows.values_mut() {
        flow.next_hop = bytemuck::Zeroable::zeroed();
    }
    flows.iter().map(|(key, flow)| format!("{key:?} {flow:?}")).collect()
}

/// Whether the packet was sent on in its flow.
fn goes_on(run: &Run) -> bool {
    run.moved == [(Routed, 1)] || run.moved == [(Tunnelled, 1)]
}

/// What XDP does with the packet and what tc does, where both find the flows of `before`, and the state that each leaves.
fn both(
    bench: &mut Bench,
    packet: &Packet,
    before: &BTreeMap<Tuple, Flow>,
    xdp_first: bool,
) -> [(Run, Vec<String>); 2] {
    let order = if xdp_first { [true, false] } else { [false, true] };
    let mut runs = order.map(|by_xdp| {
        bench.restore(before);
        let run = if by_xdp { bench.arrive(Mode::Generic, packet) } else { bench.arrive_at_tc(packet) };
        (run, state(bench))
    });
    if !xdp_first {
        runs.reverse();
    }
    runs
}

/// XDP and tc see the same packet in the same state at the same time. What XDP sends on, tc would send on with the same octets,
/// and both leave the same state; what XDP leaves to tc, it has not touched.
fn agree(bench: &mut Bench, case: &Case) {
    let family = if case.v4 { Family::V4 } else { Family::V6 };
    let whole = case.packet(family, bench);
    let packet = if case.fragment && !case.payload.is_empty() {
        fragments(&whole, 9, 32).swap_remove(0)
    } else {
        whole
    };
    bench.label(&format!("{case:?}"));
    let before = bench.flows();
    let (xdp, at_tc);
    if before.contains_key(&packet.tuple()) {
        let [(by_xdp, after_xdp), (by_tc, after_tc)] =
            clock::within_a_tick(|| both(bench, &packet, &before, case.xdp_first));
        if goes_on(&by_xdp) {
            let differ = after_xdp.iter().zip(&after_tc).find(|(one, other)| one != other);
            assert_eq!(differ, None, "{case:?}");
        }
        (xdp, at_tc) = (by_xdp, by_tc);
    } else {
        // The first packet of a flow gets a port at random: who comes second follows the first.
        xdp = bench.arrive(Mode::Generic, &packet);
        at_tc = bench.arrive_at_tc(&packet);
    }
    match xdp.action {
        XDP_PASS => assert_eq!((xdp.output.as_slice(), &*xdp.moved), (&*packet.bytes(), &[][..])),
        XDP_TX => {
            assert_eq!(at_tc.action, TC_ACT_REDIRECT, "{case:?}: {xdp:?} {at_tc:?}");
            if goes_on(&at_tc) || at_tc.moved == [(NewTunnelledFlow, 1)] {
                assert_eq!(xdp.output[14..], at_tc.output[14..], "{case:?}");
            } else {
                // A SYN on a flow that is over begins it anew, with a port at random.
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
    each_on_wires("agreement", |bench, family| {
        if family == Family::V6 {
            return;
        }
        let counted = std::cell::RefCell::new((0u32, 0u32, 0usize));
        let bench = std::cell::RefCell::new(bench);
        let sequences = proptest::collection::vec(cases(), 1..40);
        let mut runner = TestRunner::new(ProptestConfig { cases: 60, ..ProptestConfig::default() });
        runner
            .run(&sequences, |sequence| {
                let mut bench = bench.borrow_mut();
                bench.forget_flows();
                let kind = tunnel::Kind::BOTH[sequence.len() % 2];
                for family in Family::BOTH {
                    for protocol in [TCP, UDP] {
                        let backends = [family.backend(), family.other_backend()];
                        service(&mut bench, family.vip(), protocol, &backends);
                        tunnel::service(
                            &mut bench,
                            family.other_vip(),
                            protocol,
                            &backends,
                            backend_flags::PEER,
                        );
                    }
                }
                bench.settings(&tunnel::settings(kind));
                for case in &sequence {
                    agree(&mut bench, case);
                    counted.borrow_mut().0 += 1;
                }
                counted.borrow_mut().1 += u32::from(!bench.flows().is_empty());
                counted.borrow_mut().2 += bench.flows().values().filter(|flow| flow.is_tunnelled()).count();
                bench.reuse_slots();
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
