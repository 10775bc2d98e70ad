//! The backend that each scheduler chooses for a new flow.

use std::{collections::BTreeMap, net::SocketAddr};

use lb_common::{Outcome, Scheduler};

use super::{
    packets::Packet,
    stage::{Family, each, each_on},
    test_run::stay_on_one_cpu,
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

fn backends(family: Family, weights: &[u32]) -> Vec<(SocketAddr, u32)> {
    let socket = |port| SocketAddr::new(family.backend().ip(), port);
    (8001..).map(socket).zip(weights.iter().copied()).collect()
}

/// The first packet of a client's flow.
fn question(family: Family, port: u16) -> Packet {
    Packet::udp(SocketAddr::new(family.client().ip(), port), family.vip(), b"?")
}

/// Opens `count` new flows; returns the ports of their backends, in order. The flows are deleted.
#[track_caller]
fn choices(bed: &mut Testbed, family: Family, count: u16) -> Vec<u16> {
    let mut chosen = Vec::new();
    for port in 1..=count {
        let packet = question(family, port);
        let sent = bed.send(Hook::Ingress, &packet);
        let backend = bed.backend_of(&packet);
        sent.passes(Outcome::NewFlow, &packet.to(backend));
        chosen.push(backend.port());
        if port % 100 == 0 {
            bed.clear_flows();
        }
    }
    bed.clear_flows();
    chosen
}

fn shares(chosen: &[u16]) -> BTreeMap<u16, usize> {
    let mut shares = BTreeMap::new();
    chosen.iter().for_each(|port| *shares.entry(*port).or_default() += 1);
    shares
}

#[test]
fn rr_ignores_weights_and_takes_turns() {
    stay_on_one_cpu();
    each("rr", |bed, family| {
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::RoundRobin, &backends(family, &[1, 5, 9]));
        let chosen = choices(bed, family, 9);
        assert_eq!(chosen[..3], chosen[3..6]);
        assert_eq!(chosen[..3], chosen[6..]);
        assert_eq!(
            shares(&chosen),
            [(8001, 3), (8002, 3), (8003, 3)].into(),
            "weights do not count: {chosen:?}"
        );
    });
}

#[test]
fn wrr_takes_turns_by_weight() {
    stay_on_one_cpu();
    each("wrr", |bed, family| {
        let backends = backends(family, &[4, 3, 2]);
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::WeightedRoundRobin, &backends);
        let chosen = choices(bed, family, 18);
        assert_eq!(shares(&chosen), [(8001, 8), (8002, 6), (8003, 4)].into());
        let longest = chosen.chunk_by(|a, b| a == b).map(<[u16]>::len).max();
        assert!(longest <= Some(2), "mixed: {chosen:?}");
    });
}

#[test]
fn random_and_mh_follow_the_weights() {
    for scheduler in [Scheduler::Random, Scheduler::Maglev] {
        each(scheduler.as_str(), |bed, family| {
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[1, 3]));
            let shares = shares(&choices(bed, family, 200));
            // 50 flows are expected; the range allows 6 standard deviations of 6.1.
            assert!((13..=87).contains(&shares[&8001]), "{scheduler}: {shares:?}");
        });
    }
}

#[test]
fn mh_maps_a_tuple_to_the_same_backend_on_every_node() {
    each("mh", |bed, family| {
        let backends = backends(family, &[1; 20]);
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::Maglev, &backends);
        let before = choices(bed, family, 100);
        assert_eq!(before, choices(bed, family, 100));
        assert!(shares(&before).len() > 15, "{before:?}");
        // Simulates another node, where the backends are in other slots and the first backend is missing.
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::Maglev, &backends[1..]);
        let after = choices(bed, family, 100);
        let moved = before.iter().zip(&after).filter(|(was, is)| **was != 8001 && was != is).count();
        assert!(moved <= 15, "{moved} of 100 flows moved");
    });
}

/// A node without an entry of the connection sends the connection's packets to the same backend.
#[test]
fn mh_keeps_the_backend_of_a_mid_connection_segment() {
    each("mid-flow", |bed, family| {
        bed.service_with_scheduler(family.vip(), TCP, Scheduler::Maglev, &backends(family, &[1; 20]));
        for port in 1..=50 {
            let client = SocketAddr::new(family.client().ip(), port);
            let syn = Packet::tcp(client, family.vip(), 1000, b"").syn();
            bed.send(Hook::Ingress, &syn).passes_any(Outcome::NewFlow);
            let backend = bed.backend_of(&syn);
            bed.clear_flows();
            let data = Packet::tcp(client, family.vip(), 1001, b"data").ack(5001);
            bed.send(Hook::Ingress, &data).passes(Outcome::NewFlow, &data.clone().to(backend));
            bed.clear_flows();
        }
    });
}

#[test]
fn sh_and_dh_hash_one_address() {
    each("sh and dh", |bed, family| {
        for scheduler in [Scheduler::SourceHash, Scheduler::DestinationHash] {
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[1; 4]));
            assert_eq!(shares(&choices(bed, family, 50)).len(), 1, "{scheduler}: one client, one address");
        }
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::SourceHash, &backends(family, &[1; 4]));
        let mut chosen = Vec::new();
        for client in 1..=60 {
            let client = match family.client() {
                SocketAddr::V4(_) => SocketAddr::from(([192, 0, 2, client], 1000)),
                SocketAddr::V6(_) => {
                    SocketAddr::from(([0x2001, 0xdb8, 0xc, 0, 0, 0, 0, u16::from(client)], 1000))
                }
            };
            let packet = Packet::udp(client, family.vip(), b"?");
            bed.send(Hook::Ingress, &packet).passes_any(Outcome::NewFlow);
            chosen.push(bed.backend_of(&packet).port());
        }
        let shares = shares(&chosen);
        assert_eq!(shares.len(), 4, "{shares:?}");
    });
}

#[test]
fn backend_of_weight_0_gets_no_new_flow() {
    for scheduler in Scheduler::ALL {
        each(scheduler.as_str(), |bed, family| {
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[0, 1, 0]));
            assert_eq!(shares(&choices(bed, family, 20)), [(8002, 20)].into(), "{scheduler}");
        });
    }
}

#[test]
fn unanswered_syn_tries_no_backend_of_weight_0() {
    let mut bed = Testbed::with_syn_retries(1);
    for family in Family::BOTH {
        assert!(bed.start(&format!("SYN without an answer, {family:?}"), Device::Ethernet));
        bed.service_with_scheduler(family.vip(), TCP, Scheduler::Random, &backends(family, &[1, 0]));
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        for _ in 0..6 {
            let _sent = bed.send(Hook::Ingress, &syn);
            assert_eq!(bed.flows()[&syn.tuple()].to.destination_socket().port(), 8001);
        }
    }
}

/// For new flows, backends of weight 0 are treated as if they did not exist.
#[test]
fn new_flows_are_rejected_if_all_weights_are_0() {
    for scheduler in Scheduler::ALL {
        each_on(&[Device::Ethernet, Device::Bare], scheduler.as_str(), |bed, family| {
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[1]));
            let known = question(family, 1);
            bed.send(Hook::Ingress, &known).passes_any(Outcome::NewFlow);
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[0, 0]));
            let backend = bed.backend_of(&known);
            bed.send(Hook::Ingress, &known).passes(Outcome::Forward, &known.clone().to(backend));
            bed.send(Hook::Ingress, &question(family, 2)).redirects_any(Outcome::RejectUdp);
        });
    }
}

/// Opens a flow for each client port; returns the ports of the backends. The flows stay.
fn open(bed: &mut Testbed, family: Family, clients: std::ops::Range<u16>) -> Vec<u16> {
    let mut chosen = Vec::new();
    for port in clients {
        let packet = question(family, port);
        bed.send(Hook::Ingress, &packet).passes_any(Outcome::NewFlow);
        chosen.push(bed.backend_of(&packet).port());
    }
    chosen
}

#[test]
fn lc_spreads_connections_evenly_regardless_of_weights() {
    each("lc", |bed, family| {
        bed.set_active_flows(&[7, 0, 5]);
        bed.service_with_scheduler(
            family.vip(),
            UDP,
            Scheduler::LeastConnection,
            &backends(family, &[1, 9, 3]),
        );
        assert_eq!(open(bed, family, 1..6), [8002; 5]);
        open(bed, family, 6..16);
        assert_eq!(bed.active_flows(3), [9, 9, 9]);
    });
}

#[test]
fn wlc_and_sed_spread_connections_by_weight() {
    for scheduler in [Scheduler::WeightedLeastConnection, Scheduler::ShortestExpectedDelay] {
        each(scheduler.as_str(), |bed, family| {
            bed.set_active_flows(&[0, 0, 0]);
            bed.service_with_scheduler(family.vip(), UDP, scheduler, &backends(family, &[1, 3, 0]));
            open(bed, family, 1..41);
            assert_eq!(bed.active_flows(3), [10, 30, 0], "{scheduler}");
        });
    }
}

/// `sed` prefers the fast backend even if the slow one is idle. `nq` leaves no backend idle.
#[test]
fn sed_prefers_the_fast_backend_and_nq_an_idle_one() {
    each("sed and nq", |bed, family| {
        let backends = backends(family, &[1, 10]);
        bed.set_active_flows(&[0, 5]);
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::ShortestExpectedDelay, &backends);
        assert_eq!(open(bed, family, 1..4), [8002; 3]);
        bed.clear_flows();
        bed.set_active_flows(&[0, 5]);
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::NeverQueue, &backends);
        assert_eq!(open(bed, family, 1..4), [8001, 8002, 8002]);
    });
}

#[test]
fn schedulers_work_with_any_number_of_backends() {
    each("many", |bed, family| {
        bed.set_active_flows(&[9; 40]);
        bed.service_with_scheduler(
            family.vip(),
            UDP,
            Scheduler::LeastConnection,
            &backends(family, &[1; 40]),
        );
        bed.set_active_flows(&[&[9; 33][..], &[3], &[9; 6]].concat());
        assert_eq!(open(bed, family, 1..7), [8034; 6]);
    });
}

/// Opens a connection through the VIP with SYN, SYN-ACK and ACK; returns its backend.
fn connect(bed: &mut Testbed, client: SocketAddr, vip: SocketAddr) -> SocketAddr {
    let syn = Packet::tcp(client, vip, 1000, b"").syn();
    bed.send(Hook::Ingress, &syn).passes_any(Outcome::NewFlow);
    let backend = bed.backend_of(&syn);
    let accept = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
    bed.send(Hook::Egress, &accept).passes_any(Outcome::Reply);
    bed.send(Hook::Ingress, &Packet::tcp(client, vip, 1001, b"").ack(5001)).passes_any(Outcome::Forward);
    backend
}

#[test]
fn connection_is_active_until_both_sides_finish() {
    each("FIN", |bed, family| {
        bed.set_active_flows(&[0]);
        let (client, vip) = (family.client(), family.vip());
        bed.service_with_scheduler(vip, TCP, Scheduler::LeastConnection, &backends(family, &[1]));
        let backend = connect(bed, client, vip);
        assert_eq!(bed.active_flows(1), [1]);
        let retransmission = Packet::tcp(client, vip, 1001, b"data").ack(5001);
        bed.send(Hook::Ingress, &retransmission).passes_any(Outcome::Forward);
        bed.send(Hook::Ingress, &Packet::tcp(client, vip, 1005, b"").ack(5001).fin())
            .passes_any(Outcome::Forward);
        assert_eq!(bed.active_flows(1), [1], "the backend has not finished");
        let fin = Packet::tcp(backend, client, 5001, b"").ack(1006).fin();
        for _ in 0..2 {
            bed.send(Hook::Egress, &fin).passes_any(Outcome::Reply);
            assert_eq!(bed.active_flows(1), [0], "counted once");
        }
        // The client uses the same port again: the new connection replaces the ended one.
        connect(bed, client, vip);
        assert_eq!(bed.active_flows(1), [1]);
    });
}

#[test]
fn connection_is_active_until_it_is_reset() {
    each("RST", |bed, family| {
        bed.set_active_flows(&[0]);
        let (client, vip) = (family.client(), family.vip());
        bed.service_with_scheduler(vip, TCP, Scheduler::ShortestExpectedDelay, &backends(family, &[1]));
        for from_client in [true, false] {
            let backend = connect(bed, client, vip);
            assert_eq!(bed.active_flows(1), [1]);
            let blind = Packet::tcp(client, vip, 77_777, b"").rst();
            bed.send(Hook::Ingress, &blind).passes_any(Outcome::Forward);
            assert_eq!(bed.active_flows(1), [1], "the RST is outside the window");
            for _ in 0..2 {
                if from_client {
                    let reset = Packet::tcp(client, vip, 1001, b"").rst();
                    bed.send(Hook::Ingress, &reset).passes_any(Outcome::Forward);
                } else {
                    let reset = Packet::tcp(backend, client, 5001, b"").ack(1001).rst();
                    bed.send(Hook::Egress, &reset).passes_any(Outcome::Reply);
                }
                assert_eq!(bed.active_flows(1), [0]);
            }
        }
    });
}

/// A SYN whose backend was removed is rebalanced, which ends the earlier flow.
#[test]
fn replaced_flow_is_not_active() {
    each("replacement", |bed, family| {
        bed.set_active_flows(&[0, 0]);
        let (client, vip) = (family.client(), family.vip());
        bed.service_with_scheduler(vip, TCP, Scheduler::LeastConnection, &backends(family, &[1]));
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes_any(Outcome::NewFlow);
        bed.send(Hook::Ingress, &syn).passes_any(Outcome::Forward);
        assert_eq!(bed.active_flows(2), [1, 0], "a retransmission opens no flow");
        // Replaces the only backend by another one with the same counter.
        let rest = &backends(family, &[1, 1])[1..];
        bed.service_with_scheduler(vip, TCP, Scheduler::LeastConnection, rest);
        bed.set_active_flows(&[1]);
        bed.send(Hook::Ingress, &syn).passes_any(Outcome::NewFlow);
        assert_eq!(bed.backend_of(&syn).port(), 8002);
        // Both backends have the testbed's first counter: the flow that ended subtracts 1, the new flow adds 1.
        assert_eq!(bed.active_flows(2), [1, 0]);
    });
}

#[test]
fn flows_of_other_schedulers_are_not_counted() {
    each("not counted", |bed, family| {
        bed.set_active_flows(&[0, 0]);
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::RoundRobin, &backends(family, &[1, 1]));
        open(bed, family, 1..11);
        assert_eq!(bed.active_flows(2), [0, 0]);
        assert!(bed.flows().values().all(|flow| flow.active_flows_slot == 0));
    });
}
