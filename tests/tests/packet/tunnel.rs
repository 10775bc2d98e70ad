//! DSR: packets to backends on other nodes, which reply to the client directly, enter a tunnel at XDP or at tc.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_agent::explain::PacketKind;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Scheduler, Service, ServiceKey, Settings, backend_flags,
    conntrack::{Phase, flow_flags},
    service_flags, settings_flags,
};

use super::{
    explain,
    packets::{Ethernet, NODE, PEER, Packet, Transport, fragments},
    report::assert_same_packet,
    stage::{Family, PORTS, each, masquerade_settings},
    testbed::{Device, Hook, SCTP, TCP, Testbed, UDP},
    wire::{Mode, NARROW, Run, TC_ACT_REDIRECT, TC_ACT_UNSPEC, XDP_REDIRECT, XDP_TX, each_on_wires, routed},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ipip,
    Gue,
}

impl Kind {
    pub(crate) const BOTH: [Self; 2] = [Self::Ipip, Self::Gue];

    /// Bytes that the tunnel adds.
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
        flags: if kind == Kind::Gue { settings_flags::GUE } else { 0 },
        ..masquerade_settings(PORTS)
    }
}

/// Writes a DSR Service whose backends have these flags.
pub(crate) fn service(bed: &mut Testbed, vip: SocketAddr, protocol: u8, backends: &[SocketAddr], flags: u16) {
    service_of(bed, vip, protocol, backends, flags, Service { id: 1, ..Service::zeroed() });
}

pub(crate) fn service_of(
    bed: &mut Testbed,
    vip: SocketAddr,
    protocol: u8,
    backends: &[SocketAddr],
    flags: u16,
    record: Service,
) {
    let (backends_base, backends_count) = bed.slice(backends, flags);
    let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
    let flags = service_flags::MASQUERADE | service_flags::DSR;
    bed.record(&key, &Service { backends_base, backends_count, flags, ..record }.sealed(&key));
}

/// The packet in a tunnel from `from` to `to`, as it leaves `from`.
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

/// Begins, at tc, a connection of the client through a tunnel of this kind to the only backend; returns its SYN.
fn begin(bed: &mut Testbed, kind: Kind, family: Family) -> Packet {
    bed.settings(&settings(kind));
    service(bed, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
    let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
    bed.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
    syn
}

/// The packet that the node sends into the tunnel for `packet`, whose flow must exist.
fn sent(bed: &Testbed, kind: Kind, family: Family, packet: &Packet) -> Packet {
    let to = bed.flows()[&packet.tuple()].to;
    assert_eq!(IpAddr::from(to.source), family.node());
    assert!(to.source_port >= 0xc000);
    in_tunnel(kind, to.source_port, family.node(), to.destination.into(), &routed(packet))
}

impl Run {
    /// Like `leaves`, but at tc, where the kernel writes the MAC addresses later.
    #[track_caller]
    fn goes_out(self, outcome: Outcome, expected: &Packet) {
        self.check(TC_ACT_REDIRECT, &[(outcome, 1)]);
        assert_same_packet("at tc", false, &[], &self.output[14..], &expected.bytes()[14..]);
    }
}

#[track_caller]
fn assert_one_entry(bed: &Testbed, packet: &Packet, phase: Phase) {
    let flows = bed.flows();
    assert_eq!(flows.len(), 1, "{flows:#?}");
    let flow = flows[&packet.tuple()];
    assert!(flow.is_tunnelled() && flow.flags & flow_flags::ROUTED != 0);
    assert_eq!(Phase::of(&flow, &flow), phase);
}

#[test]
fn connection_is_tunnelled_by_xdp_and_by_tc() {
    each_on_wires("tunnelled TCP", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let steps = [
            (syn.clone(), Phase::Opening),
            (Packet::tcp(client, vip, 1001, b"").ack(5001), Phase::Established),
            (Packet::tcp(client, vip, 1001, b"GET / HTTP/1.1").ack(5001), Phase::Established),
            (Packet::tcp(client, vip, 1015, b"").fin().ack(5004), Phase::TimeWait),
        ];
        for kind in Kind::BOTH {
            bed.settings(&settings(kind));
            service(bed, vip, TCP, &[backend], backend_flags::PEER);
            for mode in Mode::BOTH {
                bed.clear_flows();
                let run = bed.arrive(mode, &syn);
                run.leaves(XDP_TX, NewTunnelledFlow, &sent(bed, kind, family, &syn));
                for (packet, phase) in &steps {
                    let expected = sent(bed, kind, family, packet);
                    bed.arrive(mode, packet).leaves(XDP_TX, Tunnelled, &expected);
                    bed.arrive_at_tc(packet).goes_out(Tunnelled, &expected);
                    assert_one_entry(bed, packet, *phase);
                }
                // The client reuses its port.
                let again = Packet::tcp(client, vip, 77_000, b"").syn();
                let run = bed.arrive(mode, &again);
                run.leaves(XDP_TX, NewTunnelledFlow, &sent(bed, kind, family, &again));
                assert_one_entry(bed, &again, Phase::Opening);
            }
            bed.clear_flows();
            let run = bed.arrive_at_tc(&syn);
            run.goes_out(NewTunnelledFlow, &sent(bed, kind, family, &syn));
            bed.clear_services();
        }
    });
}

#[test]
fn udp_sctp_and_padded_frames_are_tunnelled() {
    each_on_wires("tunnelled, others", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for kind in Kind::BOTH {
            bed.settings(&settings(kind));
            bed.clear_flows();
            for protocol in [TCP, UDP, SCTP] {
                service(bed, vip, protocol, &[backend], backend_flags::PEER);
            }
            let question = Packet::udp(client, vip, b"?");
            bed.arrive_at_tc(&question).check(TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            let expected = sent(bed, kind, family, &question);
            bed.arrive(Mode::Native, &question).leaves(XDP_TX, Tunnelled, &expected);
            // Padding stays after the packet and is not part of it.
            let padded = question.clone().padded();
            let expected = expected.with(|packet| packet.padding = padded.padding);
            bed.arrive(Mode::Native, &padded).leaves(XDP_TX, Tunnelled, &expected);
            bed.arrive_at_tc(&padded).goes_out(Tunnelled, &expected);
            let sctp = Packet::sctp(client, vip, 0, 1, &[0; 16]);
            bed.arrive(Mode::Native, &sctp).stays_for_tc();
            let run = bed.arrive_at_tc(&sctp);
            run.goes_out(NewTunnelledFlow, &sent(bed, kind, family, &sctp));
        }
    });
}

/// The device has computed the sum over the packet that arrived (`CHECKSUM_COMPLETE`). The kernel verifies the sum over
/// the packet that leaves.
#[test]
fn checksum_complete_stays_correct_in_a_tunnel() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("tunnelled, sums", |bed, family| {
        // This namespace has no routes.
        bed.settings(&settings(Kind::Ipip));
        service(bed, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
        bed.send(Hook::Ingress, &Packet::tcp(family.client(), family.vip(), 1000, b"").syn()).drops(NoRoute);
    });
    super::wire::set_up();
    each("tunnelled, sums", |bed, family| {
        if bed.device() == Device::Bare {
            return;
        }
        for kind in Kind::BOTH {
            bed.settings(&settings(kind));
            bed.clear_flows();
            service(bed, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
            let syn = Packet::tcp(family.client(), family.vip(), 1000, b"odd").syn();
            let run = bed.send(Hook::Ingress, &syn);
            let expected = sent(bed, kind, family, &syn);
            assert_eq!(run.output[14..], expected.bytes()[14..]);
            run.redirects_any(NewTunnelledFlow);
        }
    });
}

/// A process of another node, or a pod there that the node masquerades, uses a node port of this node.
#[test]
fn client_that_is_a_node_gets_no_tunnel() {
    each_on_wires("a node as client", |bed, family| {
        bed.settings(&settings(Kind::Ipip));
        service(bed, family.vip(), TCP, &[family.backend()], backend_flags::PEER);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        bed.insert("PEERS", Address::from(family.client().ip()), 1_u32);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bed.clear_flows();
        bed.clear::<Address, u32>("PEERS");
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        bed.clear_services();
    });
}

#[test]
fn internal_clients_and_local_backends_get_no_tunnel() {
    each_on_wires("no tunnel", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.settings(&settings(Kind::Ipip));
        bed.label("a backend of unknown location is reached as without DSR");
        service(bed, vip, TCP, &[backend], 0);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bed.clear_flows();
        bed.label("a backend on this node sees the client");
        service(bed, vip, TCP, &[backend], backend_flags::LOCAL);
        bed.arrive(Mode::Native, &syn).stays_for_tc();
        bed.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(backend));
        bed.assert_flows(1);
        let answer = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
        bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(vip));
        bed.clear_flows();
        bed.label("a client inside the cluster is masqueraded");
        service(bed, vip, TCP, &[backend], backend_flags::PEER);
        let inside = [Network::new(client.ip().into(), 24)];
        bed.settings(&Settings { internal: Networks::new(inside), ..settings(Kind::Ipip) });
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bed.clear_flows();
        bed.label("a node without an address of the family");
        let unset = Address::from_v6([0; 16]);
        bed.settings(&Settings { source_v4: unset, source_v6: unset, ..settings(Kind::Ipip) });
        bed.arrive_at_tc(&syn).check(TC_ACT_REDIRECT, &[(NewRoutedFlow, 1)]);
    });
}

#[test]
fn packet_too_large_for_the_tunnel_is_answered_with_the_mtu() {
    each_on_wires("tunnelled, too large", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        for kind in Kind::BOTH {
            bed.settings(&settings(kind));
            bed.clear_flows();
            service(bed, vip, UDP, &[family.backend()], backend_flags::PEER);
            let network = if family == Family::V4 { 20 } else { 40 };
            let room = 1500 - kind.overhead(family);
            let fits = Packet::udp(client, vip, &vec![7; room - network - 8]);
            bed.arrive(Mode::Native, &fits).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
            let run = bed.arrive_at_tc(&fits);
            assert_eq!(run.output.len(), 1514);
            run.check(TC_ACT_REDIRECT, &[(Tunnelled, 1)]);
            let large = Packet::udp(client, vip, &vec![7; room - network - 7]);
            bed.arrive(Mode::Native, &large).stays_for_tc();
            let run = bed.arrive_at_tc(&large);
            run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
            let (kind, at) = if family == Family::V4 { ([3, 4], 34) } else { ([2, 0], 54) };
            assert_eq!(run.output[at..at + 2], kind);
            assert_eq!(run.output[at + 4..at + 8], u32::try_from(room).unwrap().to_be_bytes());
            // The error comes from the VIP.
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
fn last_hop_is_answered_and_tunnels_follow_the_route_to_the_backend() {
    each_on_wires("tunnelled, ways", |bed, family| {
        bed.settings(&settings(Kind::Ipip));
        service(bed, family.vip(), UDP, &[family.backend()], backend_flags::PEER);
        let packet = Packet::udp(family.client(), family.vip(), b"traceroute").hops(1);
        bed.arrive(Mode::Native, &packet).stays_for_tc();
        bed.arrive_at_tc(&packet).check(TC_ACT_REDIRECT, &[(TimeExceeded, 1)]);
        if family == Family::V6 {
            return;
        }
        bed.clear_flows();
        let backend: SocketAddr = "203.0.113.194:8080".parse().unwrap();
        service(bed, family.vip(), UDP, &[backend], backend_flags::PEER);
        let packet = packet.hops(9);
        let run = bed.arrive(Mode::Native, &packet);
        run.leaves(XDP_REDIRECT, NewTunnelledFlow, &sent(bed, Kind::Ipip, family, &packet));
        bed.remove_wire(super::wire::OTHER);
        bed.expire_next_hops();
        bed.arrive(Mode::Native, &packet).stays_for_tc();
        bed.arrive_at_tc(&packet).check(TC_ACT_REDIRECT, &[(Tunnelled, 1)]);
        // A route with a smaller MTU makes the node report that MTU, less the 20 bytes of the outer header.
        bed.clear_flows();
        let backend: SocketAddr = "203.0.113.130:8080".parse().unwrap();
        service(bed, family.vip(), UDP, &[backend], backend_flags::PEER);
        let packet = Packet::udp(family.client(), family.vip(), &[1; 1280 - 28 + 1]);
        bed.arrive(Mode::Native, &packet).stays_for_tc();
        bed.remove_wire(NARROW);
        let run = bed.arrive_at_tc(&packet);
        run.check(TC_ACT_REDIRECT, &[(TooBig, 1)]);
        assert_eq!(run.output[38..42], 1280_u32.to_be_bytes());
    });
}

#[test]
fn fragments_enter_the_tunnel_of_the_first_one() {
    each_on_wires("tunnelled fragments", |bed, family| {
        for kind in Kind::BOTH {
            bed.settings(&settings(kind));
            bed.clear_flows();
            service(bed, family.vip(), UDP, &[family.backend()], backend_flags::PEER);
            let whole = Packet::udp(family.client(), family.vip(), &[9; 301]);
            let parts = fragments(&whole, 77, 128);
            assert_eq!(parts.len(), 3);
            let outcomes = [NewTunnelledFlow, Tunnelled, Tunnelled];
            for (part, outcome) in parts.iter().zip(outcomes) {
                bed.arrive(Mode::Native, part).stays_for_tc();
                let run = bed.arrive_at_tc(part);
                let to = bed.flows()[&whole.tuple()].to;
                let inner = routed(part);
                let outer = in_tunnel(kind, to.source_port, family.node(), family.backend().ip(), &inner);
                run.goes_out(outcome, &outer);
            }
            assert_one_entry(bed, &whole, Phase::Unreplied);
        }
    });
}

#[test]
fn icmp_errors_about_replies_are_tunnelled_to_the_backend() {
    each_on_wires("tunnelled errors", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        for kind in Kind::BOTH {
            bed.clear_flows();
            let syn = begin(bed, kind, family);
            let answer = Packet::tcp(vip, client, 5000, &[1; 1400]).ack(1001);
            let mut quote = answer.network();
            quote.truncate(if family == Family::V4 { 28 } else { 48 });
            let code = if family == Family::V4 { [3, 4] } else { [2, 0] };
            let error = Packet::icmp(family.router(), vip.ip(), code, [0, 0, 5, 0x14], &quote);
            bed.arrive(Mode::Native, &error).stays_for_tc();
            let port = bed.flows()[&syn.tuple()].to.source_port;
            let expected = in_tunnel(kind, port, family.node(), family.backend().ip(), &routed(&error));
            bed.arrive_at_tc(&error).goes_out(Tunnelled, &expected);
            assert_one_entry(bed, &syn, Phase::Opening);
        }
    });
}

/// Type and code of a router's ICMP error, its MTU (0 if it has none), and type and code of the ICMP error that the
/// client gets.
const ERRORS: [(Family, [u8; 2], u32, [u8; 2]); 6] = [
    (Family::V4, [3, 4], 1400, [3, 4]),
    (Family::V4, [3, 0], 0, [3, 1]),
    (Family::V4, [11, 0], 0, [3, 1]),
    (Family::V6, [2, 0], 1400, [2, 0]),
    (Family::V6, [1, 0], 0, [1, 3]),
    (Family::V6, [3, 0], 0, [1, 3]),
];

/// A router between the nodes drops a tunnelled packet: the client gets an ICMP error about its own packet, from the
/// VIP.
#[test]
fn icmp_errors_about_a_tunnel_reach_the_client() {
    each_on_wires("errors about tunnels", |bed, family| {
        let (client, vip, node) = (family.client(), family.vip(), family.node());
        for kind in Kind::BOTH {
            bed.clear_flows();
            let syn = begin(bed, kind, family);
            let data = Packet::tcp(client, vip, 1001, &[1; 1400]).ack(5001);
            let tunnelled = sent(bed, kind, family, &data).network();
            let header = if family == Family::V4 { 20 } else { 40 };
            for (_, code, mtu, answer) in ERRORS.into_iter().filter(|error| error.0 == family) {
                // Quotes of 512 bytes, and quotes that end after 8 bytes of the inner transport header.
                for quoted in [512, kind.overhead(family) + header + 8] {
                    let error =
                        Packet::icmp(family.router(), node, code, mtu.to_be_bytes(), &tunnelled[..quoted]);
                    bed.arrive(Mode::Native, &error).stays_for_tc();
                    let inner = routed(&data).network();
                    let mtu = mtu.saturating_sub(u32::try_from(kind.overhead(family)).unwrap());
                    let expected =
                        Packet::icmp(vip.ip(), client.ip(), answer, mtu.to_be_bytes(), &inner[..header + 8]);
                    bed.arrive_at_tc(&error).goes_out(TunnelError, &answer_of_node(&expected));
                }
            }
            assert_one_entry(bed, &syn, Phase::Opening);
        }
    });
}

/// A packet that the node itself has made.
fn answer_of_node(packet: &Packet) -> Packet {
    packet.clone().hops(64).with(|packet| {
        if packet.is_v4() {
            packet.v4().identification = 0;
        }
    })
}

/// Any host can send an ICMP error, so an error about a tunnel that this node has not used passes unchanged.
#[test]
fn icmp_errors_about_unknown_tunnels_pass_untouched() {
    each_on_wires("errors about unknown tunnels", |bed, family| {
        let (vip, node) = (family.vip(), family.node());
        let (backend, other) = (family.backend().ip(), family.other_backend().ip());
        let syn = begin(bed, Kind::Ipip, family);
        let stranger = Packet::tcp(family.stranger(), vip, 1000, b"").syn();
        let tunnel = |from, to, packet| in_tunnel(Kind::Ipip, 0, from, to, packet).network();
        let too_big = if family == Family::V4 { [3, 4] } else { [2, 0] };
        let parameter = if family == Family::V4 { [12, 0] } else { [4, 0] };
        let whole = tunnel(node, backend, &syn);
        let cut = whole.len() - syn.network().len() + if family == Family::V4 { 24 } else { 44 };
        for (name, code, mtu, quote) in [
            ("no flow", too_big, 1400, tunnel(node, backend, &stranger)),
            ("another backend", too_big, 1400, tunnel(node, other, &syn)),
            ("another node", too_big, 1400, tunnel(other, backend, &syn)),
            ("no tunnel", too_big, 1400, stranger.network()),
            ("cut within the first 8 bytes", too_big, 1400, whole[..cut].to_vec()),
            ("a problem of the outer header", parameter, 0, whole.clone()),
        ] {
            bed.label(name);
            let error = Packet::icmp(family.router(), node, code, u32::to_be_bytes(mtu), &quote);
            bed.arrive_at_tc(&error).check(TC_ACT_UNSPEC, &[(UnknownIcmpError, 1)]);
        }
        bed.label("an error for another host");
        let to_other = Packet::icmp(family.router(), other, too_big, [0, 0, 5, 0x78], &whole);
        bed.arrive_at_tc(&to_other).check(TC_ACT_UNSPEC, &[(UnknownIcmpError, 1)]);
        bed.label("a pod may have sent the error: no tunnel ends at its device");
        let error = Packet::icmp(family.router(), node, too_big, [0, 0, 5, 0x78], &whole);
        bed.send(Hook::Ingress, &error).passes_untouched(UnknownIcmpError);
        bed.label("the same error where tunnels end");
        bed.arrive_at_tc(&error).check(TC_ACT_REDIRECT, &[(TunnelError, 1)]);
    });
}

#[test]
fn rst_closes_a_tunnelled_flow_only_at_the_expected_sequence() {
    each_on_wires("tunnelled resets", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        bed.settings(&settings(Kind::Ipip));
        service(bed, vip, TCP, &[family.backend()], backend_flags::PEER);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        bed.arrive(Mode::Native, &Packet::tcp(client, vip, 1001, b"123").ack(5001))
            .check(XDP_TX, &[(Tunnelled, 1)]);
        let reset = |seq| Packet::tcp(client, vip, seq, b"").rst();
        bed.arrive(Mode::Native, &reset(1003)).check(XDP_TX, &[(Tunnelled, 1)]);
        assert_one_entry(bed, &syn, Phase::Established);
        bed.arrive(Mode::Native, &reset(1004)).check(XDP_TX, &[(Tunnelled, 1)]);
        assert_one_entry(bed, &syn, Phase::Closed);
    });
}

#[test]
fn second_node_tunnels_a_connection_to_the_same_backend() {
    each_on_wires("tunnelled, failover", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        bed.settings(&settings(Kind::Ipip));
        let backends = [family.backend(), family.other_backend()];
        bed.service_with_scheduler(vip, TCP, Scheduler::Maglev, &backends.map(|backend| (backend, 1)));
        bed.enable_dsr(vip, TCP, backend_flags::PEER);
        let mut both = std::collections::BTreeSet::new();
        for port in 40_000..40_040 {
            let client = SocketAddr::new(client.ip(), port);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
            let first = bed.backend_of(&syn).ip();
            both.insert(first);
            // The next packet arrives at the second node, which has no flow.
            bed.clear_flows();
            let middle = Packet::tcp(client, vip, 1001, b"more").ack(5001);
            let run = bed.arrive(Mode::Native, &middle);
            run.leaves(XDP_TX, NewTunnelledFlow, &sent(bed, Kind::Ipip, family, &middle));
            assert_eq!(bed.backend_of(&middle).ip(), first);
            bed.clear_flows();
        }
        assert_eq!(both.len(), 2, "both backends get flows");
    });
}

/// The programs tunnel the first packet of a connection, and later ones, without creating an entry.
#[test]
fn packets_follow_the_maglev_table_while_the_flow_table_is_full() {
    each_on_wires("tunnelled, full", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        let backends = [family.backend(), family.other_backend()].map(|backend| (backend, 1));
        bed.settings(&settings(Kind::Ipip));
        bed.service_with_scheduler(vip, TCP, Scheduler::Maglev, &backends);
        bed.enable_dsr(vip, TCP, backend_flags::PEER);
        let mut both = std::collections::BTreeSet::new();
        let connection = |port| {
            let client = SocketAddr::new(client.ip(), port);
            let packets = [
                (PacketKind::Syn, Packet::tcp(client, vip, 1000, b"").syn()),
                (PacketKind::Data, Packet::tcp(client, vip, 1001, b"GET / HTTP/1.1").ack(5001)),
                (PacketKind::Fin, Packet::tcp(client, vip, 1015, b"").fin().ack(5004)),
            ];
            bed.arrive_at_tc(&packets[0].1).check(TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            both.insert(bed.backend_of(&packets[0].1).ip());
            packets.map(|(kind, packet)| {
                let expected = sent(bed, Kind::Ipip, family, &packet);
                (kind, packet, expected)
            })
        };
        let packets: Vec<_> = (40_000..40_020).flat_map(connection).collect();
        assert_eq!(both.len(), 2, "both backends get connections");

        bed.clear_flows();
        bed.fill_overflow();
        let before = bed.flows();
        for (kind, packet, expected) in &packets {
            assert_eq!(explain::outcomes_at_tc(bed, packet, *kind), [Stateless]);
            for mode in Mode::BOTH {
                bed.arrive(mode, packet).leaves(XDP_TX, Stateless, expected);
            }
            bed.arrive_at_tc(packet).goes_out(Stateless, expected);
        }
        assert_eq!(bed.flows(), before);

        bed.label("another scheduler would choose anew for each packet");
        bed.service_with_scheduler(vip, TCP, Scheduler::Random, &backends);
        bed.enable_dsr(vip, TCP, backend_flags::PEER);
        bed.arrive(Mode::Native, &packets[0].1).drops(ConntrackFull);
        bed.take_all_into_overflow(false);
    });
}

#[test]
fn tunnelled_flow_is_active_until_the_client_finishes() {
    each_on_wires("tunnelled, counted", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        bed.settings(&settings(Kind::Ipip));
        let backends = [family.backend(), family.other_backend()];
        bed.service_with_scheduler(
            vip,
            TCP,
            Scheduler::LeastConnection,
            &backends.map(|backend| (backend, 1)),
        );
        bed.enable_dsr(vip, TCP, backend_flags::PEER);
        bed.set_active_flows(&[0, 0]);
        let client = |port| SocketAddr::new(client.ip(), port);
        for port in 1..=4 {
            let syn = Packet::tcp(client(port), vip, 1000, b"").syn();
            bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        }
        assert_eq!(bed.active_flows(2), [2, 2]);
        let fin = Packet::tcp(client(1), vip, 1001, b"").fin().ack(5001);
        let reset = Packet::tcp(client(2), vip, 1001, b"").rst();
        for packet in [&fin, &fin, &reset] {
            bed.arrive(Mode::Native, packet).check(XDP_TX, &[(Tunnelled, 1)]);
        }
        assert_eq!(bed.active_flows(2).iter().sum::<i64>(), 2);
        // A SYN of client 1 replaces its ended flow: only the new flow is counted.
        bed.arrive(Mode::Native, &Packet::tcp(client(1), vip, 1000, b"").syn())
            .check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        assert_eq!(bed.active_flows(2).iter().sum::<i64>(), 3);
    });
}

/// The Service changes from DSR to masquerading and back while connections exist. They continue in their own mode. If a
/// new flow replaces one of them, no entry of the replaced flow stays.
#[test]
fn existing_flows_survive_mode_changes() {
    each_on_wires("modes change", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.settings(&settings(Kind::Ipip));
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let snat = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        service(bed, vip, TCP, &[backend], backend_flags::PEER);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        bed.service_with(vip, TCP, &[backend], snat);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(Tunnelled, 1)]);
        let fin = Packet::tcp(client, vip, 1001, b"").fin().ack(5001);
        bed.arrive(Mode::Native, &fin).check(XDP_TX, &[(Tunnelled, 1)]);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        bed.assert_flows(1);
        let to = bed.flows()[&syn.tuple()].to;
        bed.arrive(Mode::Native, &Packet::tcp(client, vip, 1001, b"").ack(1)).check(XDP_TX, &[(Routed, 1)]);
        let node = to.source_socket();
        let reset = Packet::tcp(backend, node, 0, b"").rst().ack(1001);
        bed.arrive(Mode::Native, &reset).check(XDP_TX, &[(Routed, 1)]);
        service(bed, vip, TCP, &[backend], backend_flags::PEER);
        bed.arrive(Mode::Native, &syn).check(XDP_TX, &[(NewTunnelledFlow, 1)]);
        assert_one_entry(bed, &syn, Phase::Opening);
    });
}
