//! Masqueraded clients: the backend receives packets from the node's address instead of the client's.
//!
//! A packet passes two hooks: ingress of the client's device and egress towards the backend. Its reply passes the
//! opposite hooks. `there` and `back` run both.

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
    packets::{Packet, fragments},
    stage::{FIRST_PORT, Family, each, masquerade_settings},
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

fn settings(family: Family, ports: u16) -> Settings {
    let whole = if family == Family::V4 { 32 } else { 128 };
    Settings {
        internal: Networks::new([Network::new(Address::from(family.client().ip()), whole)]),
        ..masquerade_settings(ports)
    }
}

/// Runs `test` in a network namespace without routes, so that the node's address comes from the settings.
pub(super) fn each_without_routes(case: &str, test: impl Fn(&mut Testbed, Family)) {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each(case, test);
}

/// Writes a Service that masquerades every client, with `ports` source ports.
pub(super) fn masqueraded(bed: &mut Testbed, family: Family, protocol: u8, ports: u16) {
    let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
    bed.service_with(family.vip(), protocol, &[family.backend()], record);
    bed.settings(&settings(family, ports));
}

/// Sends the client's packet through both hooks; returns the packet that leaves the node. `first` says whether the
/// client's packet creates the flow.
#[track_caller]
pub(super) fn there(bed: &mut Testbed, family: Family, packet: &Packet, first: bool) -> Packet {
    let sent = bed.send(Hook::Ingress, packet);
    let port = bed.flows()[&packet.tuple()].to.source_port;
    let between = packet.clone().from((client_of(packet), port).into()).to(family.backend());
    sent.passes(if first { NewFlow } else { Forward }, &between);
    let outside = between.clone().from((family.node(), port).into());
    bed.send(Hook::Egress, &between).passes(Masquerade, &outside);
    outside
}

fn client_of(packet: &Packet) -> IpAddr {
    packet.tuple().source.into()
}

/// Sends the backend's reply through both hooks, back to the client.
#[track_caller]
fn back(bed: &mut Testbed, family: Family, client: SocketAddr, reply: &Packet) {
    let between = reply.clone().to((client.ip(), reply.tuple().destination_port).into());
    bed.send(Hook::Ingress, reply).passes(Masquerade, &between);
    let seen = between.clone().from(family.vip()).to(client);
    bed.send(Hook::Egress, &between).passes(Reply, &seen);
}

pub(super) fn source_of(packet: &Packet) -> SocketAddr {
    (IpAddr::from(packet.tuple().source), packet.tuple().source_port).into()
}

#[test]
fn masqueraded_tcp_connection_is_tracked_from_syn_to_both_fins() {
    each_without_routes("masqueraded TCP", |bed, family| {
        masqueraded(bed, family, TCP, 20_000);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let outside = there(bed, family, &syn, true);
        let node = source_of(&outside);
        assert_eq!(node.ip(), family.node());
        assert!((FIRST_PORT..FIRST_PORT + 20_000).contains(&node.port()), "{node}");
        bed.assert_flows(2);
        // A retransmission is translated the same way.
        assert_eq!(source_of(&there(bed, family, &syn, false)), node);
        back(bed, family, client, &Packet::tcp(backend, node, 5000, b"").syn().ack(1001));
        there(bed, family, &Packet::tcp(client, vip, 1001, b"GET").ack(5001), false);
        back(bed, family, client, &Packet::tcp(backend, node, 5001, b"200").fin().ack(1004));
        there(bed, family, &Packet::tcp(client, vip, 1004, b"").fin().ack(5005), false);
        for (key, flow) in bed.flows() {
            let peer = bed.flows()[&flow.to.reversed()];
            let (forward, reply) = if flow.is_reply() { (&peer, &flow) } else { (&flow, &peer) };
            assert_eq!(Phase::of(forward, reply), Phase::TimeWait, "{key:?}");
        }
    });
}

#[test]
fn masqueraded_udp_flow_is_translated_in_both_directions() {
    each_without_routes("masqueraded UDP", |bed, family| {
        masqueraded(bed, family, UDP, 20_000);
        for payload in [&b"odd"[..], b"even", b""] {
            let packet = Packet::udp(family.client(), family.vip(), payload);
            let outside = there(bed, family, &packet, bed.flows().is_empty());
            let reply = Packet::udp(family.backend(), source_of(&outside), payload);
            back(bed, family, family.client(), &reply);
        }
        bed.assert_flows(2);
    });
}

/// The first flow of a masqueraded connection may end before the connection's second flow. Another connection of the
/// same client, without masquerading, must not get the source port of the remaining second flow: that flow would
/// masquerade the connection.
#[test]
fn connection_avoids_the_port_of_a_second_flow_that_has_outlived_its_first_one() {
    each_without_routes("leftover second flow", |bed, family| {
        masqueraded(bed, family, UDP, 20_000);
        let (client, backend) = (family.client(), family.backend());
        let port = source_of(&there(bed, family, &Packet::udp(client, family.vip(), b"x"), true)).port();
        let mut flows = bed.flows();
        flows.retain(|_, flow| flow.is_second());
        assert_eq!(flows.len(), 2);
        bed.restore_flows(&flows);
        bed.service(family.other_vip(), UDP, &[backend]);
        let packet = Packet::udp((client.ip(), port).into(), family.other_vip(), b"y");
        let sent = bed.send(Hook::Ingress, &packet);
        let chosen = bed.flows()[&packet.tuple()].to.source_port;
        assert_ne!(chosen, port);
        sent.passes(NewFlow, &packet.clone().from((client.ip(), chosen).into()).to(backend));
    });
}

#[test]
fn masqueraded_clients_never_share_a_port() {
    each_without_routes("masqueraded clients", |bed, family| {
        masqueraded(bed, family, UDP, 40);
        let mut seen = std::collections::BTreeSet::new();
        for port in 1..=20 {
            let packet = Packet::udp((family.client().ip(), port).into(), family.vip(), b"x");
            assert!(seen.insert(source_of(&there(bed, family, &packet, true))), "{seen:?}");
        }
        bed.assert_flows(40);
    });
}

/// A new client gets the port of an ended connection. As long as none has ended, the client's packets are dropped and
/// counted.
#[test]
fn port_of_an_ended_connection_is_reused_when_none_is_free() {
    each_without_routes("no port left", |bed, family| {
        masqueraded(bed, family, TCP, 1);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let first = there(bed, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
        let other = Packet::tcp(family.stranger(), vip, 7000, b"").syn();
        bed.send(Hook::Ingress, &other).drops(NoSourcePort);
        bed.assert_flows(2);
        // The backend refuses the first connection, which frees its port.
        back(bed, family, client, &Packet::tcp(backend, source_of(&first), 0, b"").rst().ack(1001));
        let second = there(bed, family, &other, true);
        assert_eq!(source_of(&second), source_of(&first));
        back(
            bed,
            family,
            family.stranger(),
            &Packet::tcp(backend, source_of(&second), 0, b"").syn().ack(7001),
        );
    });
}

/// The new connection collides with both translations of the client's ended connection.
#[test]
fn client_reuses_the_port_of_its_own_ended_connection() {
    each_without_routes("port of a finished connection", |bed, family| {
        masqueraded(bed, family, TCP, 1);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let first = there(bed, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
        let next = SocketAddr::new(client.ip(), client.port() + 1);
        let syn = Packet::tcp(next, vip, 7000, b"").syn();
        bed.send(Hook::Ingress, &syn).drops(NoSourcePort);
        back(bed, family, client, &Packet::tcp(backend, source_of(&first), 0, b"").rst().ack(1001));
        let second = there(bed, family, &syn, true);
        assert_eq!(source_of(&second), source_of(&first));
        bed.assert_flows(2);
        back(bed, family, next, &Packet::tcp(backend, source_of(&second), 0, b"").syn().ack(7001));
    });
}

#[test]
fn port_is_free_only_if_both_translations_are() {
    each_without_routes("inner port taken", |bed, family| {
        masqueraded(bed, family, UDP, 1);
        // Another flow has the reverse entry for the client's address with the only masquerade port.
        let taken = Packet::udp(family.backend(), (family.client().ip(), FIRST_PORT).into(), b"").tuple();
        let flags = flow_flags::REPLY | flow_flags::AT_EGRESS;
        let to = Packet::udp(family.other_vip(), family.client(), b"").tuple();
        bed.insert_entry(&taken, &Flow::new(&taken, &to, 1, flags, Tick(0)));
        let before = bed.flows();
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bed.send(Hook::Ingress, &packet).drops(NoSourcePort);
        assert_eq!(bed.flows(), before, "no entry is left");
    });
}

#[test]
fn internal_clients_are_not_masqueraded() {
    each_without_routes("masqueraded outsiders", |bed, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE_EXTERNAL, ..Service::zeroed() };
        bed.service_with(family.vip(), UDP, &[family.backend()], record);
        bed.settings(&settings(family, 100));
        let inside = Packet::udp(family.client(), family.vip(), b"x");
        bed.send(Hook::Ingress, &inside).passes(NewFlow, &inside.clone().to(family.backend()));
        bed.assert_flows(1);
        there(bed, family, &inside.clone().from(family.stranger()), true);
        bed.assert_flows(3);
    });
}

/// Packets for the node itself never pass an egress hook, which would translate the address.
#[test]
fn backend_on_the_node_receives_the_client_address() {
    each_without_routes("backend on the node", |bed, family| {
        bed.settings(&settings(family, 100));
        let (backends_base, backends_count) = bed.slice(&[family.backend()], backend_flags::HOST);
        let key = ServiceKey::new(Address::from(family.vip().ip()), family.vip().port(), UDP);
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bed.record(&key, &Service { backends_base, backends_count, ..record }.sealed(&key));
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bed.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.backend()));
    });
}

/// Until the agent writes the settings, there is no address for masquerading, and there are no ports.
#[test]
fn flows_that_need_masquerade_are_dropped_without_settings() {
    each_without_routes("no settings", |bed, family| {
        masqueraded(bed, family, UDP, 100);
        bed.settings(&Settings::zeroed());
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        bed.send(Hook::Ingress, &packet).drops(NoSourcePort);
        bed.assert_flows(0);
    });
}

#[test]
fn hairpin_flow_is_not_masqueraded() {
    each_without_routes("hairpin", |bed, family| {
        masqueraded(bed, family, UDP, 100);
        let packet = Packet::udp((family.backend().ip(), 40_000).into(), family.vip(), b"x");
        let seen =
            packet.clone().from((family.vip().ip(), 40_000).into()).to(family.backend()).swapped_macs();
        bed.send(Hook::Ingress, &packet).redirects(Hairpin, &seen);
    });
}

#[test]
fn icmp_errors_about_masqueraded_packets_reach_both_ends() {
    each_without_routes("masqueraded ICMP", |bed, family| {
        masqueraded(bed, family, UDP, 100);
        let packet = Packet::udp(family.client(), family.vip(), b"a question");
        let outside = there(bed, family, &packet, true);
        let port = outside.tuple().source_port;
        let between = outside.clone().from((family.client().ip(), port).into());
        let (kind, rest) = match family {
            Family::V4 => ([3, 4], [0, 0, 5, 0x78]),
            Family::V6 => ([2, 0], [0, 0, 5, 0x78]),
        };
        let error =
            |from: IpAddr, to: IpAddr, about: &Packet| Packet::icmp(from, to, kind, rest, &about.network());
        // A router beyond the node sends an error to the node: the client gets it from the VIP.
        let to_node = error(family.router(), family.node(), &outside);
        let halfway = error(family.router(), family.client().ip(), &between);
        bed.send(Hook::Ingress, &to_node).passes(IcmpError, &halfway);
        let to_client = error(family.vip().ip(), family.client().ip(), &packet);
        bed.send(Hook::Egress, &error(family.backend().ip(), family.client().ip(), &between))
            .passes(IcmpError, &to_client);
        // The client sends an error about a reply: the backend gets it from the node.
        let reply = Packet::udp(family.backend(), source_of(&outside), b"an answer");
        back(bed, family, family.client(), &reply);
        let seen = reply.clone().from(family.vip()).to(family.client());
        let reply_between = reply.clone().to((family.client().ip(), port).into());
        let from_client = error(family.client().ip(), family.vip().ip(), &seen);
        let halfway = error(family.client().ip(), family.backend().ip(), &reply_between);
        bed.send(Hook::Ingress, &from_client).passes(IcmpError, &halfway);
        let to_backend = error(family.node(), family.backend().ip(), &reply);
        bed.send(Hook::Egress, &halfway).passes(IcmpError, &to_backend);
    });
}

#[test]
fn fragments_are_masqueraded_as_the_first_one() {
    each_without_routes("masqueraded fragments", |bed, family| {
        masqueraded(bed, family, UDP, 1);
        if bed.device() == Device::EthernetWithSum {
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
            bed.send(Hook::Ingress, sent).passes(outcome, halfway);
            bed.send(Hook::Egress, halfway).passes(Masquerade, left);
        }
    });
}

fn another(family: Family, number: u16) -> SocketAddr {
    SocketAddr::new(family.client().ip(), 50_000 + number)
}

/// After closing a connection, a backend keeps it in TIME_WAIT and may reject a new one from the same port. So the
/// programs take such ports last.
#[test]
fn ports_of_closed_connections_are_taken_last() {
    each_without_routes("closed connections", |bed, family| {
        let (vip, backend) = (family.vip(), family.backend());
        for round in 0..20 {
            bed.clear_flows();
            masqueraded(bed, family, TCP, 2);
            let client = another(family, 3 * round);
            let first = there(bed, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
            let node = source_of(&first);
            back(bed, family, client, &Packet::tcp(backend, node, 5000, b"").syn().ack(1001));
            there(bed, family, &Packet::tcp(client, vip, 1001, b"").fin().ack(5001), false);
            back(bed, family, client, &Packet::tcp(backend, node, 5001, b"").fin().ack(1002));
            let second = Packet::tcp(another(family, 3 * round + 1), vip, 1000, b"").syn();
            let second = source_of(&there(bed, family, &second, true));
            assert_ne!(second, node, "the other port is free");
            let third = Packet::tcp(another(family, 3 * round + 2), vip, 1000, b"").syn();
            assert_eq!(source_of(&there(bed, family, &third, true)), node, "no other port is free");
            // Both flows of the first connection are deleted: none of its packets leaves with the client's own address.
            bed.assert_flows(4);
            assert!(!bed.flows().contains_key(&Packet::tcp(client, vip, 0, b"").tuple()));
        }
    });
}

#[test]
fn ports_of_idle_udp_flows_are_taken_when_none_is_free() {
    /// One more than `PORT_REUSE_AFTER_IDLE` in lb-ebpf.
    const IDLE_TICKS: u32 = 6;
    each_without_routes("idle datagrams", |bed, family| {
        masqueraded(bed, family, UDP, 1);
        there(bed, family, &Packet::udp(another(family, 0), family.vip(), b"?"), true);
        let packet = Packet::udp(another(family, 1), family.vip(), b"?");
        bed.send(Hook::Ingress, &packet).drops(NoSourcePort);
        age(bed, IDLE_TICKS);
        there(bed, family, &packet, true);
        bed.assert_flows(2);
    });
}

/// A backend repeats its answer to a forged SYN for half a minute. If these answers kept the port of the connection in
/// use, a few forged SYNs a second would take all ports.
#[test]
fn retransmitted_syn_acks_do_not_keep_the_port_of_an_unproven_connection() {
    /// One more than `PORT_REUSE_UNPROVEN` in lb-ebpf.
    const IDLE_TICKS: u32 = 3;
    each_without_routes("an unproven connection", |bed, family| {
        masqueraded(bed, family, TCP, 1);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let forged = there(bed, family, &Packet::tcp(client, vip, 1000, b"").syn(), true);
        let answer = Packet::tcp(backend, source_of(&forged), 5000, b"").syn().ack(1001);
        back(bed, family, client, &answer);
        let other = Packet::tcp(another(family, 1), vip, 7000, b"").syn();
        bed.send(Hook::Ingress, &other).drops(NoSourcePort);
        age(bed, IDLE_TICKS);
        back(bed, family, client, &answer);
        assert_eq!(source_of(&there(bed, family, &other, true)), source_of(&forged));
        bed.assert_flows(2);
    });
}

/// A backend still has the connection that had the source port before, so it answers a SYN with an ACK. The client
/// resets that connection, and its next SYN comes from the same port.
#[test]
fn client_that_resets_an_unknown_connection_keeps_its_source_port() {
    each_without_routes("an unknown connection", |bed, family| {
        masqueraded(bed, family, TCP, 20_000);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        let node = source_of(&there(bed, family, &syn, true));
        back(bed, family, client, &Packet::tcp(backend, node, 5000, b"").ack(77));
        there(bed, family, &Packet::tcp(client, vip, 77, b"").rst(), false);
        assert_eq!(source_of(&there(bed, family, &syn, true)), node);
        bed.assert_flows(2);
        back(bed, family, client, &Packet::tcp(backend, node, 6000, b"").syn().ack(1001));
    });
}

/// Makes all entries look as if this many ticks had passed.
fn age(bed: &mut Testbed, ticks: u32) {
    for (key, mut flow) in bed.flows() {
        flow.last_seen = Tick(flow.last_seen.0 - ticks);
        bed.insert_entry(&key, &flow);
    }
}

/// The node had another address towards the backend before. The flow with the old address stays.
#[test]
fn failed_port_claim_leaves_other_flows() {
    each_without_routes("a failed claim", |bed, family| {
        masqueraded(bed, family, UDP, 1);
        let client = family.client();
        there(bed, family, &Packet::udp(client, family.vip(), b"?"), true);
        let other = SocketAddr::new(family.router(), 0);
        let source = Address::from(other.ip());
        let sources = match family {
            Family::V4 => Settings { source_v4: source, ..settings(family, 1) },
            Family::V6 => Settings { source_v6: source, ..settings(family, 1) },
        };
        bed.settings(&sources);
        let before = bed.flows();
        let packet = Packet::udp(another(family, 0), family.vip(), b"?");
        bed.send(Hook::Ingress, &packet).drops(NoSourcePort);
        assert_eq!(bed.flows(), before);
    });
}
