//! Flows to backends on other nodes that answer directly: packets go there in a tunnel, at XDP and at tc.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Scheduler, Service, ServiceKey, Settings, backend_flags,
    conntrack::{Phase, flow_flags},
    service_flags, settings_flags,
};

use super::{
    bench::{Bench, Device, Hook, SCTP, TCP, UDP},
    packets::{Ethernet, NODE, PEER, Packet, Transport, fragments},
    report::assert_same_packet,
    stage::{Family, each},
    wire::{Mode, NARROW, Run, TC_ACT_REDIRECT, XDP_REDIRECT, XDP_TX, each_on_wires, routed},
};

/// What the packets are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ipip,
    Gue,
}

impl Kind {
    pub(crate) const BOTH: [Self; 2] = [Self::Ipip, Self::Gue];

    /// Octets that the tunnel adds.
    const fn overhead(self, family: Family) -> usize {
        let network = if matches!(family, Family::V4) { 20 } else { 40 };
        network + if matches!(self, Self::Gue) { 8 } else { 0 }
    }
}

/// Settings of a node whose tunnels are of this kind, and whose peers are in the network of backends.
pub(crate) fn settings(kind: Kind) -> Settings {
    let peers = [("198.51.100.0", 24), ("2001:db8:b::", 64)];
    let network = |(address, prefix): (&str, u8)| {
        Network::new(Address::from(address.parse::<IpAddr>().unwrap()), prefix)
    };
    Settings {
        peers: Networks::new(peers.map(network)),
        source_v4: Address::from(Family::V4.node()),
        source_v6: Address::from(Family::V6.node()),
        first_port: 10_000,
        ports: 20_000,
        flags: if kind == Kind::Gue { settings_flags::GUE } else { 0 },
        ..Settings::zeroed()
    }
}

/// A service whose backends, with these flags, answer clients from outside directly.
pub(crate) fn service(bench: &mut Bench, vip: SocketAddr, protocol: u8, backends: &[SocketAddr], flags: u16) {
    service_of(bench, vip, protocol, backends, flags, Service { id: 1, ..Service::zeroed() });
}

pub(crate) fn service_of(
    bench: &mut Bench,
    vip: SocketAddr,
    protocol: u8,
    backends: &[SocketAddr],
    flags: u16,
    record: Service,
) {
    let (backends_base, backends_count) = bench.slice(backends, flags);
    let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
    let flags = service_flags::MASQUERADE | service_flags::DSR;
    bench.record(&key, &Service { backends_base, backends_count, flags, ..record }.sealed(&key));
}

/// The packet in a tunnel between these, as it leaves the first one.
pub(crate) fn in_tunnel(kind: Kind, port: u16, from: IpAddr, to: IpAddr, packet: &Packet) -> Packet {
    let inner = packet.network();
    let outer = match kind {
        Kind::Ipip => {
            let protocol = if packet.is_v4() { IpNumber::IPV4 } else { IpNumber::IPV6 };
            Packet::raw(from, to, protocol, &inner)
        }
        Kind::Gue => {
            let transport = Transport::Udp { ports: (port, 6080), checksum: false };
            Packet {
                transport,
                ..Packet::udp(SocketAddr::new(from, port), SocketAddr::new(to, 6080), &inner)
            }
        }
    };
    outer.hops(64).with(|outer| {
        if outer.is_v4() {
            outer.v4().identification = 0;
        }
        outer.ethernet = Some(Ethernet { destination: PEER, source: NODE, tags: Vec::new() });
    })
}

/// What leaves in place of the packet, whose flow is there.
fn sent(bench: &Bench, kind: Kind, family: Family, packet: &Packet) -> Packet {
    let to = bench.flows()[&packet.tuple()].to;
    assert_eq!(IpAddr::from(to.source), family.node());
    assert!(to.source_port >= 0xc000);
    in_tunnel(kind, to.source_port, family.node(), to.destination.into(), &routed(packet))
}

impl Run {
    /// At tc: the same, but that the kernel is still to write the MAC addresses.
    #[track_caller]
    fn goes_out(self, outcome: Outcome, expected: &Packet) {
        self.check(TC_ACT_REDIRECT, &[(outcome, 1)]);
        assert_same_packet("at tc", false, &[], &self.output[14..], &expected.bytes()[14..]);
    }
}

#[track_caller]
fn assert_one_entry(bench: &Bench, packet: &Packet, phase: Phase) {
    let flows = bench.flows();
    assert_eq!(flows.len(), 1, "{flows:#?}");
    let flow = flows[&packet.tuple()];
    assert!(flow.is_tunnelled() && flow.flags & flow_flags::ROUTED != 0);
    assert_eq!(Phase::of(&flow, &flow), phase);
}

#[test]
fn a_connection_goes_to_its_backend_in_a_tunnel_by_xdp_and_by_tc() {
    each_on_wires("tunnelled TCP", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let steps = [
            (syn.clone(), Phase::Opening),
            (Packet::tcp(client, vip, 1001, b"").ack(5001), Phase::Established),
            (Packet::tcp(client, vip, 1001, b"GET / HTTP/1.1").ack(5001), Phase::Established),
            (Packet::tcp(client, vip, 1015, b"").fin().ack(5004), Phase::TimeWait),
        ];
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            service(bench, vip, TCP, &[backend], backend_flags::PEER);
            for mode in Mode::BOTH {
                bench.forget_flows();
                let run = bench.arrive(mode, &syn);
                run.leaves(XDP_TX, NewTunnelledFlow, &sent(bench, kind, family, &syn));
                for (packet, phase) in &steps {
                    let expected = sent(bench, kind, family, packet);
                    bench.arrive(mode, packet).leaves(XDP_TX, Tunnelled, &expected);
                    bench.arrive_at_tc(packet).goes_out(Tunnelled, &expected);
                    assert_one_entry(bench, packet, *phase);
                }
                // The client uses its port again.
                let again = Packet::tcp(client, vip, 77_000, b"").syn();
                let run = bench.arrive(mode, &again);
                run.leaves(XDP_TX, NewTunnelledFlow, &sent(bench, kind, family, &again));
                assert_one_entry(bench, &again, Phase::Opening);
            }
            bench.forget_flows();
            let run = bench.arrive_at_tc(&syn);
            run.goes_out(NewTunnelledFlow, &sent(bench, kind, family, &syn));
            bench.forget_services();
        }
    });
}

#[test]
fn datagrams_padded_frames_and_sctp() {
    each_on_wires("tunnelled, others", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            bench.forget_flows();
            for protocol in [TCP, UDP, SCTP] {
                service(bench, vip, protocol, &[backend], backend_flags::PEER);
            }
            let question = Packet::udp(client, vip, b"?");
            bench.arrive_at_tc(&question).check(TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            let expected = sent(bench, kind, family, &question);
            bench.arrive(Mode::Native, &question).leaves(XDP_TX, Tunnelled, &expected);
            // What fills a frame up stays behind the packet, and is none of it.
            let padded = question.clone().padded();
            let expected = expected.with(|packet| packet.padding = padded.padding);
            bench.arrive(Mode::Native, &padded).leaves(XDP_TX, Tunnelled, &expected);
            bench.arrive_at_tc(&padded).goes_out(Tunnelled, &expected);
            let sctp = Packet::sctp(client, vip, 0, 1, &[0; 16]);
            bench.arrive(Mode::Native, &sctp).stays_for_tc();
            let run = bench.arrive_at_tc(&sctp);
            run.goes_out(NewTunnelledFlow, &sent(bench, kind, family, &sctp));
        }
    });
}

/// The device has summed up the packet as it came (`CHECKSUM_COMPLETE`): the kernel checks that the sum is still right.
#[test]
fn sums_of_devices_stay_right() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("tunnelled, sums", |bench, family| {
        // Nobody has a route here.
        bench.settings(&settings(Kind::Ipip));
        service(bench, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
        bench
            .send(Hook::Ingress, &Packet::tcp(family.client(), family.vip(), 1000, b"").syn())
            .drops(NoRoute);
    });
    super::wire::set_up();
    each("tunnelled, sums", |bench, family| {
        if bench.device() == Device::Bare {
            return;
        }
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            bench.forget_flows();
            service(bench, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
            let syn = Packet::tcp(family.client(), family.vip(), 1000, b"odd").syn();
            let run = bench.send(Hook::Ingress, &syn);
            let expected = sent(bench, kind, family, &syn);
            assert_eq!(run.output[14..], expected.bytes()[14..]);
            run.turns_around(NewTunnelledFlow);
        }
    });
}

#[test]
fn who_is_not_led_into_a_tunnel() {
    each_on_wires("no tunnel", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bench.settings(&settings(Kind::Ipip));
        bench.label("a backend that is who knows where is reached as without DSR");
        service(bench, vip, TCP, &[backend], 0);
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bench.forget_flows();
        bench.label("a backend on this node sees the client");
        service(bench, vip, TCP, &[backend], backend_flags::LOCAL);
        bench.arrive(Mode::Native, &syn).stays_for_tc();
        bench.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(backend));
        bench.assert_flows(1);
        let answer = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
        bench.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bench.forget_flows();
        bench.label("a client inside the cluster is masqueraded");
        service(bench, vip, TCP, &[backend], backend_flags::PEER);
        let inside = [Network::new(client.ip().into(), 24)];
        bench.settings(&Settings { internal: Networks::new(inside), ..settings(Kind::Ipip) });
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bench.forget_flows();
        bench.label("a node without an address of the family");
        let nobody = Address::from_v6([0; 16]);
        bench.settings(&Settings { source_v4: nobody, source_v6: nobody, ..settings(Kind::Ipip) });
        bench.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(NewRoutedFlow, 1)]);
    });
}

#[test]
fn what_does_not_fit_with_the_tunnel_is_answered_with_what_does() {
    each_on_wires("tunnelled, too large", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            bench.forget_flows();
            service(bench, vip, UDP, &[family.backend()], backend_flags::PEER);
            let network = if family == Family::V4 { 20 } else { 40 };
            let room = 1500 - kind.overhead(family);
            let fits = Packet::udp(client, vip, &vec![7; room - network - 8]);
            bench.arrive(Mode::Native, &fits).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
            let run = bench.arrive_at_tc(&fits);
            assert_eq!(run.output.len(), 1514);
            run.check(TC_ACT_REDIRECT, &[(Tunnelled, 1)]);
            let large = Packet::udp(client, vip, &vec![7; room - network - 7]);
            bench.arrive(Mode::Native, &large).stays_for_tc();
            let run = bench.arrive_at_tc(&large);
            run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
            let (kind, at) = if family == Family::V4 { ([3, 4], 34) } else { ([2, 0], 54) };
            assert_eq!(run.output[at..at + 2], kind);
            assert_eq!(run.output[at + 4..at + 8], u32::try_from(room).unwrap().to_be_bytes());
            // From the address that the client speaks to, with its own packet.
            let answer = etherparse::SlicedPacket::from_ethernet(&run.output).unwrap();
            let (from, to) = match answer.net.unwrap() {
                etherparse::NetSlice::Ipv4(ip) => {
                    (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
                }
                etherparse::NetSlice::Ipv6(ip) => {
                    (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
                }
                etherparse::NetSlice::Arp(_) => unreachable!(),
            };
            assert_eq!((from, to), (vip.ip(), client.ip()));
        }
    });
}

#[test]
fn the_last_hop_is_answered_and_frames_leave_by_the_way_to_the_backend() {
    each_on_wires("tunnelled, ways", |bench, family| {
        bench.settings(&settings(Kind::Ipip));
        service(bench, family.vip(), UDP, &[family.backend()], backend_flags::PEER);
        let packet = Packet::udp(family.client(), family.vip(), b"traceroute").hops(1);
        bench.arrive(Mode::Native, &packet).stays_for_tc();
        bench.arrive_at_tc(&packet).check(TC_ACT_REDIRECT, &[(TimeExceeded, 1)]);
        if family == Family::V6 {
            return;
        }
        bench.forget_flows();
        let backend: SocketAddr = "203.0.113.194:8080".parse().unwrap();
        service(bench, family.vip(), UDP, &[backend], backend_flags::PEER);
        let packet = packet.hops(9);
        let run = bench.arrive(Mode::Native, &packet);
        run.leaves(XDP_REDIRECT, NewTunnelledFlow, &sent(bench, Kind::Ipip, family, &packet));
        bench.no_wire(super::wire::OTHER);
        bench.forget_hops();
        bench.arrive(Mode::Native, &packet).stays_for_tc();
        bench.arrive_at_tc(&packet).check(TC_ACT_REDIRECT, &[(Tunnelled, 1)]);
        // One that takes less tells how much.
        bench.forget_flows();
        let backend: SocketAddr = "203.0.113.130:8080".parse().unwrap();
        service(bench, family.vip(), UDP, &[backend], backend_flags::PEER);
        let packet = Packet::udp(family.client(), family.vip(), &[1; 1280 - 28 + 1]);
        bench.arrive(Mode::Native, &packet).stays_for_tc();
        bench.no_wire(NARROW);
        let run = bench.arrive_at_tc(&packet);
        run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
        assert_eq!(run.output[38..42], 1280_u32.to_be_bytes());
    });
}

#[test]
fn fragments_go_the_same_way() {
    each_on_wires("tunnelled fragments", |bench, family| {
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            bench.forget_flows();
            service(bench, family.vip(), UDP, &[family.backend()], backend_flags::PEER);
            let whole = Packet::udp(family.client(), family.vip(), &[9; 301]);
            let parts = fragments(&whole, 77, 128);
            assert_eq!(parts.len(), 3);
            let outcomes = [NewTunnelledFlow, Tunnelled, Tunnelled];
            for (part, outcome) in parts.iter().zip(outcomes) {
                bench.arrive(Mode::Native, part).stays_for_tc();
                let run = bench.arrive_at_tc(part);
                let to = bench.flows()[&whole.tuple()].to;
                let inner = routed(part);
                let outer = in_tunnel(kind, to.source_port, family.node(), family.backend().ip(), &inner);
                run.goes_out(outcome, &outer);
            }
            assert_one_entry(bench, &whole, Phase::Unreplied);
        }
    });
}

#[test]
fn errors_about_answers_go_to_who_sent_them() {
    each_on_wires("tunnelled errors", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        for kind in Kind::BOTH {
            bench.settings(&settings(kind));
            bench.forget_flows();
            service(bench, vip, TCP, &[family.backend()], backend_flags::PEER);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            let answer = Packet::tcp(vip, client, 5000, &[1; 1400]).ack(1001);
            let mut quote = answer.network();
            quote.truncate(if family == Family::V4 { 28 } else { 48 });
            let code = if family == Family::V4 { [3, 4] } else { [2, 0] };
            let error = Packet::icmp(family.router(), vip.ip(), code, [0, 0, 5, 0x14], &quote);
            bench.arrive(Mode::Native, &error).stays_for_tc();
            let port = bench.flows()[&syn.tuple()].to.source_port;
            let expected = in_tunnel(kind, port, family.node(), family.backend().ip(), &routed(&error));
            bench.arrive_at_tc(&error).goes_out(Tunnelled, &expected);
            assert_one_entry(bench, &syn, Phase::Opening);
        }
    });
}

#[test]
fn a_reset_is_believed_only_where_the_client_stands() {
    each_on_wires("tunnelled resets", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        bench.settings(&settings(Kind::Ipip));
        service(bench, vip, TCP, &[family.backend()], backend_flags::PEER);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        bench
            .arrive(Mode::Native, &Packet::tcp(client, vip, 1001, b"123").ack(5001))
            .check(XDP_TX, &[(Tunnelled, 1)]);
        let reset = |seq| Packet::tcp(client, vip, seq, b"").rst();
        bench.arrive(Mode::Native, &reset(1003)).check(XDP_TX, &[(Tunnelled, 1)]);
        assert_one_entry(bench, &syn, Phase::Established);
        bench.arrive(Mode::Native, &reset(1004)).check(XDP_TX, &[(Tunnelled, 1)]);
        assert_one_entry(bench, &syn, Phase::Closed);
    });
}

#[test]
fn a_node_that_never_saw_a_connection_sends_it_where_the_first_one_did() {
    each_on_wires("tunnelled, failover", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        bench.settings(&settings(Kind::Ipip));
        let backends = [family.backend(), family.other_backend()];
        bench.scheduled(vip, TCP, Scheduler::Maglev, &backends.map(|backend| (backend, 1)));
        bench.make_direct(vip, TCP, backend_flags::PEER);
        let mut both = std::collections::BTreeSet::new();
        for port in 40_000..40_040 {
            let client = SocketAddr::new(client.ip(), port);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
            let first = bench.backend_of(&syn).ip();
            both.insert(first);
            // The other node: no flow.
            bench.forget_flows();
            let middle = Packet::tcp(client, vip, 1001, b"more").ack(5001);
            let run = bench.arrive(Mode::Native, &middle);
            run.leaves(XDP_TX, NewTunnelledFlow, &sent(bench, Kind::Ipip, family, &middle));
            assert_eq!(bench.backend_of(&middle).ip(), first);
            bench.forget_flows();
        }
        assert_eq!(both.len(), 2, "both backends get some");
    });
}

#[test]
fn flows_in_tunnels_count_until_the_client_is_done() {
    each_on_wires("tunnelled, counted", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        bench.settings(&settings(Kind::Ipip));
        let backends = [family.backend(), family.other_backend()];
        bench.scheduled(vip, TCP, Scheduler::LeastConnection, &backends.map(|backend| (backend, 1)));
        bench.make_direct(vip, TCP, backend_flags::PEER);
        bench.set_active(&[0, 0]);
        let client = |port| SocketAddr::new(client.ip(), port);
        for port in 1..=4 {
            let syn = Packet::tcp(client(port), vip, 1000, b"").syn();
            bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        }
        assert_eq!(bench.active(2), [2, 2]);
        let fin = Packet::tcp(client(1), vip, 1001, b"").fin().ack(5001);
        let reset = Packet::tcp(client(2), vip, 1001, b"").rst();
        for packet in [&fin, &fin, &reset] {
            bench.arrive(Mode::Native, packet).check(XDP_TX, &[(Tunnelled, 1)]);
        }
        assert_eq!(bench.active(2).iter().sum::<i64>(), 2);
        // A flow that begins anew counts once.
        bench
            .arrive(Mode::Native, &Packet::tcp(client(1), vip, 1000, b"").syn())
            .check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        assert_eq!(bench.active(2).iter().sum::<i64>(), 3);
    });
}

/// The mode changes while connections live: those that there are go on, and what takes their place leaves nothing behind.
#[test]
fn modes_change_under_living_flows() {
    each_on_wires("modes change", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.settings(&settings(Kind::Ipip));
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let snat = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        service(bench, vip, TCP, &[backend], backend_flags::PEER);
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        bench.service_with(vip, TCP, &[backend], snat);
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(Tunnelled, 1)]);
        let fin = Packet::tcp(client, vip, 1001, b"").fin().ack(5001);
        bench.arrive(Mode::Native, &fin).check(XDP_TX, &[(Tunnelled, 1)]);
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bench.assert_flows(1);
        let to = bench.flows()[&syn.tuple()].to;
        bench.arrive(Mode::Native, &Packet::tcp(client, vip, 1001, b"").ack(1)).check(XDP_TX, &[(Routed, 1)]);
        let node = SocketAddr::new(to.source.into(), to.source_port);
        let reset = Packet::tcp(backend, node, 0, b"").rst().ack(1001);
        bench.arrive(Mode::Native, &reset).check(XDP_TX, &[(Routed, 1)]);
        service(bench, vip, TCP, &[backend], backend_flags::PEER);
        bench.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        assert_one_entry(bench, &syn, Phase::Opening);
    });
}
