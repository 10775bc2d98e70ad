//! Clients whose address the backend must not see.
//!
//! A packet passes two hooks on its way: ingress of the client's device, egress towards the backend; its answer passes
//! two, too. `lap` runs both.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Network, Networks,
    Outcome::*,
    Service, ServiceKey, Settings, backend_flags,
    conntrack::{Flow, Phase, Tick, flow_flags},
    service_flags,
};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::{Packet, fragments},
    stage::{Family, each},
};

const FIRST_PORT: u16 = 10_000;

fn settings(family: Family, ports: u16) -> Settings {
    let whole = if family == Family::V4 { 32 } else { 128 };
    Settings {
        internal: Networks::new([Network::new(Address::from(family.client().ip()), whole)]),
        source_v4: Address::from(Family::V4.node()),
        source_v6: Address::from(Family::V6.node()),
        first_port: FIRST_PORT,
        ports,
        ..Settings::zeroed()
    }
}

/// In a network namespace without routes, so that the node's address is the one of the settings.
fn each_without_routes(case: &str, test: impl Fn(&mut Bench, Family)) {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each(case, test);
}

/// A service whose every client is masqueraded, with `ports` source ports.
fn masqueraded(bench: &mut Bench, family: Family, protocol: u8, ports: u16) {
    let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
    bench.service_with(family.vip(), protocol, &[family.backend()], record);
    bench.settings(&settings(family, ports));
}

/// With how many packets a flow comes to be: what the client sends there and what it leaves the node as.
#[track_caller]
fn there(bench: &mut Bench, family: Family, packet: &Packet, first: bool) -> Packet {
    let sent = bench.send(Hook::Ingress, packet);
    let port = bench.flows()[&packet.tuple()].to.source_port;
    let between = packet.clone().from((client_of(packet), port).into()).to(family.backend());
    sent.passes(if first { NewFlow } else { Forward }, &between);
    let outside = between.clone().from((family.node(), port).into());
    bench.send(Hook::Egress, &between).passes(Masquerade, &outside);
    outside
}

fn client_of(packet: &Packet) -> IpAddr {
    packet.tuple().source.into()
}

/// What the backend sends, back to the client.
#[track_caller]
fn back(bench: &mut Bench, family: Family, client: SocketAddr, reply: &Packet) {
    let between = reply.clone().to((client.ip(), reply.tuple().destination_port).into());
    bench.send(Hook::Ingress, reply).passes(Masquerade, &between);
    let seen = between.clone().from(family.vip()).to(client);
    bench.send(Hook::Egress, &between).passes(Reply, &seen);
}

fn source_of(packet: &Packet) -> SocketAddr {
    (IpAddr::from(packet.tuple().source), packet.tuple().source_port).into()
}

#[test]
fn a_connection_from_syn_to_both_fins() {
    each_without_routes("masqueraded TCP", |bench, family| {
        masqueraded(bench, family, TCP, 20_000);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let outside = there(bench, family, &syn, true);
        let node = source_of(&outside);
        assert_eq!(node.ip(), family.node());
        assert!((FIRST_PORT..FIRST_PORT + 20_000).contains(&node.port()), "{node}");
        bench.assert_flows(2);
        // A retransmission goes the same way.
        assert_eq!(source_of(&there(bench, family, &syn, false)), node);
        back(bench, family, client, &Packet::tcp(backend, node, 5000, b"").syn().ack(1001));
        there(bench, family, &Packet::tcp(client, vip, 1001, b"GET").ack(5001), false);
        back(bench, family, client, &Packet::tcp(backend, node, 5001, b"200").fin().ack(1004));
        there(bench, family, &Packet::tcp(client, vip, 1004, b"").fin().ack(5005), false);
        for (key, flow) in bench.flows() {
            let peer = bench.flows()[&flow.to.reversed()];
            let (forward, reply) = if flow.is_reply() { (&peer, &flow) } else { (&flow, &peer) };
            assert_eq!(Phase::of(forward, reply), Phase::TimeWait, "{key:?}");
        }
    });
}

#[test]
fn a_udp_flow() {
    each_without_routes("masqueraded UDP", |bench, family| {
        masqueraded(bench, family, UDP, 20_000);
        for payload in [&b"odd"[..], b"even", b""] {
            let packet = Packet::udp(family.client(), family.vip(), payload);
            let outside = there(bench, family, &packet, bench.flows().is_empty());
            let reply = Packet::udp(family.backend(), source_of(&outside), payload);
            back(bench, family, family.client(), &reply);
        }
        bench.assert_flows(2);
    });
}

#[test]
fn clients_never_share_a_port() {
    each_without_routes("masqueraded clients", |bench, family| {
        masqueraded(bench, family, UDP, 40);
        let mut seen = std::collections::BTreeSet::new();
        for port in 1..=20 {
            let packet = Packet::udp((family.client().ip(), port).into(), family.vip(), b"x");
            assert!(seen.insert(source_of(&there(bench, family, &packet, true))), "{seen:?}");
        }
        bench.assert_flows(40);
    });
}

/// A new client gets the port of a connection that is over; while none is, it is dropped and counted.
#[test]
fn ports_run_out_and_come_back() {
    each_without_routes("no port left", |bench, family| {
        masqueraded(bench, family, TCP, 1);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let first = there(bench, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
        let other = Packet::tcp(family.stranger(), vip, 7000, b"").syn();
        bench.send(Hook::Ingress, &other).drops(NoSourcePort);
        bench.assert_flows(2);
        // The backend refuses the first one: its port is free again.
        back(bench, family, client, &Packet::tcp(backend, source_of(&first), 0, b"").rst().ack(1001));
        let second = there(bench, family, &other, true);
        assert_eq!(source_of(&second), source_of(&first));
        back(
            bench,
            family,
            family.stranger(),
            &Packet::tcp(backend, source_of(&second), 0, b"").syn().ack(7001),
        );
    });
}

/// A connection of the same client has both translations of the finished one in its way.
#[test]
fn a_client_gets_the_port_of_its_own_finished_connection() {
    each_without_routes("port of a finished connection", |bench, family| {
        masqueraded(bench, family, TCP, 1);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let first = there(bench, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
        let next = SocketAddr::new(client.ip(), client.port() + 1);
        let syn = Packet::tcp(next, vip, 7000, b"").syn();
        bench.send(Hook::Ingress, &syn).drops(NoSourcePort);
        back(bench, family, client, &Packet::tcp(backend, source_of(&first), 0, b"").rst().ack(1001));
        let second = there(bench, family, &syn, true);
        assert_eq!(source_of(&second), source_of(&first));
        bench.assert_flows(2);
        back(bench, family, next, &Packet::tcp(backend, source_of(&second), 0, b"").syn().ack(7001));
    });
}

#[test]
fn a_port_is_free_only_where_both_translations_find_it_free() {
    each_without_routes("inner port taken", |bench, family| {
        masqueraded(bench, family, UDP, 1);
        // A reply to the client's own port of that number belongs to somebody else.
        let taken = Packet::udp(family.backend(), (family.client().ip(), FIRST_PORT).into(), b"").tuple();
        let flags = flow_flags::REPLY | flow_flags::AT_EGRESS;
        let to = Packet::udp(family.other_vip(), family.client(), b"").tuple();
        bench.conntrack().insert(taken, Flow::new(&taken, &to, 1, flags, Tick(0)), 0).unwrap();
        let before = bench.flows();
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bench.send(Hook::Ingress, &packet).drops(NoSourcePort);
        assert_eq!(bench.flows(), before, "nothing is left behind");
    });
}

#[test]
fn only_clients_outside_are_masqueraded_where_those_inside_are_known() {
    each_without_routes("masqueraded outsiders", |bench, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE_EXTERNAL, ..Service::zeroed() };
        bench.service_with(family.vip(), UDP, &[family.backend()], record);
        bench.settings(&settings(family, 100));
        let inside = Packet::udp(family.client(), family.vip(), b"x");
        bench.send(Hook::Ingress, &inside).passes(NewFlow, &inside.clone().to(family.backend()));
        bench.assert_flows(1);
        there(bench, family, &inside.clone().from(family.stranger()), true);
        bench.assert_flows(3);
    });
}

/// What the node itself serves never leaves it, so nobody could exchange the address.
#[test]
fn a_backend_that_is_the_node_sees_the_client() {
    each_without_routes("backend on the node", |bench, family| {
        bench.settings(&settings(family, 100));
        let (backends_base, backends_count) = bench.slice(&[family.backend()], backend_flags::HOST);
        let key = ServiceKey::new(Address::from(family.vip().ip()), family.vip().port(), UDP);
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bench.record(&key, &Service { backends_base, backends_count, ..record }.sealed(&key));
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bench.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.backend()));
    });
}

/// As long as the agent has said nothing, there is no address and no port to masquerade with.
#[test]
fn without_settings_nobody_is_masqueraded() {
    each_without_routes("no settings", |bench, family| {
        masqueraded(bench, family, UDP, 100);
        bench.settings(&Settings::zeroed());
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bench.send(Hook::Ingress, &packet).drops(NoSourcePort);
        bench.assert_flows(0);
    });
}

#[test]
fn a_pod_that_reaches_itself_is_not_masqueraded() {
    each_without_routes("hairpin", |bench, family| {
        masqueraded(bench, family, UDP, 100);
        let packet = Packet::udp((family.backend().ip(), 40_000).into(), family.vip(), b"x");
        let seen = packet.clone().from((family.vip().ip(), 40_000).into()).to(family.backend()).bounced();
        bench.send(Hook::Ingress, &packet).bounces(Hairpin, &seen);
    });
}

#[test]
fn errors_about_masqueraded_packets_find_their_way() {
    each_without_routes("masqueraded ICMP", |bench, family| {
        masqueraded(bench, family, UDP, 100);
        let packet = Packet::udp(family.client(), family.vip(), b"a question");
        let outside = there(bench, family, &packet, true);
        let port = outside.tuple().source_port;
        let between = outside.clone().from((family.client().ip(), port).into());
        let (kind, rest) = match family {
            Family::V4 => ([3, 4], [0, 0, 5, 0x78]),
            Family::V6 => ([2, 0], [0, 0, 5, 0x78]),
        };
        let error =
            |from: IpAddr, to: IpAddr, about: &Packet| Packet::icmp(from, to, kind, rest, &about.network());
        // A router behind the node complains to the node: the client learns it from the VIP.
        let to_node = error(family.router(), family.node(), &outside);
        let halfway = error(family.router(), family.client().ip(), &between);
        bench.send(Hook::Ingress, &to_node).passes(IcmpError, &halfway);
        let to_client = error(family.vip().ip(), family.client().ip(), &packet);
        bench
            .send(Hook::Egress, &error(family.backend().ip(), family.client().ip(), &between))
            .passes(IcmpError, &to_client);
        // The client complains about an answer: the backend learns it from the node.
        let reply = Packet::udp(family.backend(), source_of(&outside), b"an answer");
        back(bench, family, family.client(), &reply);
        let seen = reply.clone().from(family.vip()).to(family.client());
        let reply_between = reply.clone().to((family.client().ip(), port).into());
        let from_client = error(family.client().ip(), family.vip().ip(), &seen);
        let halfway = error(family.client().ip(), family.backend().ip(), &reply_between);
        bench.send(Hook::Ingress, &from_client).passes(IcmpError, &halfway);
        let to_backend = error(family.node(), family.backend().ip(), &reply);
        bench.send(Hook::Egress, &halfway).passes(IcmpError, &to_backend);
    });
}

#[test]
fn fragments_follow_the_first_one_through_both_translations() {
    each_without_routes("masqueraded fragments", |bench, family| {
        masqueraded(bench, family, UDP, 1);
        if bench.device() == Device::EthernetWithSum {
            return;
        }
        let whole = Packet::udp(family.client(), family.vip(), &[0xa5; 200]);
        let between = whole.clone().from((family.client().ip(), FIRST_PORT).into()).to(family.backend());
        let outside = between.clone().from((family.node(), FIRST_PORT).into());
        let sent = fragments(&whole, 9, 64);
        let halfway = fragments(&between, 9, 64);
        let left = fragments(&outside, 9, 64);
        for (index, ((sent, halfway), left)) in sent.iter().zip(&halfway).zip(&left).enumerate() {
            let outcome = if index == 0 { NewFlow } else { Forward };
            bench.send(Hook::Ingress, sent).passes(outcome, halfway);
            bench.send(Hook::Egress, halfway).passes(Masquerade, left);
        }
    });
}

fn another(family: Family, number: u16) -> SocketAddr {
    SocketAddr::new(family.client().ip(), 50_000 + number)
}

/// A backend waits for a while for stray segments of a connection that it has closed, and may refuse a new one from the
/// same port. So such ports are the last that are taken.
#[test]
fn ports_of_closed_connections_are_taken_when_no_other_is_free() {
    each_without_routes("closed connections", |bench, family| {
        let (vip, backend) = (family.vip(), family.backend());
        for round in 0..20 {
            bench.forget_flows();
            masqueraded(bench, family, TCP, 2);
            let client = another(family, 3 * round);
            let first = there(bench, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
            let node = source_of(&first);
            back(bench, family, client, &Packet::tcp(backend, node, 5000, b"").syn().ack(1001));
            there(bench, family, &Packet::tcp(client, vip, 1001, b"").fin().ack(5001), false);
            back(bench, family, client, &Packet::tcp(backend, node, 5001, b"").fin().ack(1002));
            let second = Packet::tcp(another(family, 3 * round + 1), vip, 1000, b"").syn();
            let second = source_of(&there(bench, family, &second, true));
            assert_ne!(second, node, "the other one is free");
            let third = Packet::tcp(another(family, 3 * round + 2), vip, 1000, b"").syn();
            assert_eq!(source_of(&there(bench, family, &third, true)), node, "no other is");
            // Both flows of the first connection are gone: nothing of it leaves with the client's own address.
            bench.assert_flows(4);
            assert!(!bench.flows().contains_key(&Packet::tcp(client, vip, 0, b"").tuple()));
        }
    });
}

#[test]
fn idle_datagram_flows_give_their_ports_up_when_there_are_no_others() {
    each_without_routes("idle datagrams", |bench, family| {
        masqueraded(bench, family, UDP, 1);
        there(bench, family, &Packet::udp(another(family, 0), family.vip(), b"?"), true);
        let packet = Packet::udp(another(family, 1), family.vip(), b"?");
        bench.send(Hook::Ingress, &packet).drops(NoSourcePort);
        for (key, mut flow) in bench.flows() {
            flow.last_seen = Tick(flow.last_seen.0 - 6);
            bench.conntrack().insert(key, flow, 0).unwrap();
        }
        there(bench, family, &packet, true);
        bench.assert_flows(2);
    });
}

/// The node has got another address towards the backend since: what leads there by the old one is not taken away.
#[test]
fn a_claim_that_fails_leaves_the_flows_of_others() {
    each_without_routes("a failed claim", |bench, family| {
        masqueraded(bench, family, UDP, 1);
        let client = family.client();
        there(bench, family, &Packet::udp(client, family.vip(), b"?"), true);
        let other = SocketAddr::new(family.router(), 0);
        let source = Address::from(other.ip());
        let sources = match family {
            Family::V4 => Settings { source_v4: source, ..settings(family, 1) },
            Family::V6 => Settings { source_v6: source, ..settings(family, 1) },
        };
        bench.settings(&sources);
        let before = bench.flows();
        let packet = Packet::udp(another(family, 0), family.vip(), b"?");
        bench.send(Hook::Ingress, &packet).drops(NoSourcePort);
        assert_eq!(bench.flows(), before);
    });
}
