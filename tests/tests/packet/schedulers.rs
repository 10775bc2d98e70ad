//! Which backend a new flow gets from each scheduler.

use std::{collections::BTreeMap, net::SocketAddr};

use lb_common::{Outcome, Scheduler};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::Packet,
    stage::{Family, each, each_on},
};

fn backends(family: Family, weights: &[u32]) -> Vec<(SocketAddr, u32)> {
    let socket = |port| SocketAddr::new(family.backend().ip(), port);
    (8001..).map(socket).zip(weights.iter().copied()).collect()
}

/// The first packet of a client's flow.
fn question(family: Family, port: u16) -> Packet {
    Packet::udp(SocketAddr::new(family.client().ip(), port), family.vip(), b"?")
}

/// The ports of the backends that `count` new flows get, in their order; the flows are forgotten.
#[track_caller]
fn choices(bench: &mut Bench, family: Family, count: u16) -> Vec<u16> {
    let mut chosen = Vec::new();
    for port in 1..=count {
        let packet = question(family, port);
        let sent = bench.send(Hook::Ingress, &packet);
        let backend = bench.backend_of(&packet);
        sent.passes(Outcome::NewFlow, &packet.to(backend));
        chosen.push(backend.port());
        if port % 100 == 0 {
            bench.forget_flows();
        }
    }
    bench.forget_flows();
    chosen
}

fn shares(chosen: &[u16]) -> BTreeMap<u16, usize> {
    let mut shares = BTreeMap::new();
    chosen.iter().for_each(|port| *shares.entry(*port).or_default() += 1);
    shares
}

/// Each CPU has a sequence of its own.
fn stay_on_one_cpu() {
    let mut cpus = CpuSet::new();
    cpus.set(0).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
}

#[test]
fn rr_takes_turns() {
    stay_on_one_cpu();
    each("rr", |bench, family| {
        bench.scheduled(family.vip(), UDP, Scheduler::RoundRobin, &backends(family, &[1, 5, 9]));
        let chosen = choices(bench, family, 9);
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
    each("wrr", |bench, family| {
        let backends = backends(family, &[4, 3, 2]);
        bench.scheduled(family.vip(), UDP, Scheduler::WeightedRoundRobin, &backends);
        let chosen = choices(bench, family, 18);
        assert_eq!(shares(&chosen), [(8001, 8), (8002, 6), (8003, 4)].into());
        let longest = chosen.chunk_by(|a, b| a == b).map(<[u16]>::len).max();
        assert!(longest <= Some(2), "mixed: {chosen:?}");
    });
}

#[test]
fn random_and_hashes_keep_to_the_weights() {
    for scheduler in [Scheduler::Random, Scheduler::Maglev] {
        each(scheduler.as_str(), |bench, family| {
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[1, 3]));
            let shares = shares(&choices(bench, family, 200));
            // 50 with a standard deviation of 6.1: 6 of them.
            assert!((13..=87).contains(&shares[&8001]), "{scheduler}: {shares:?}");
        });
    }
}

#[test]
fn mh_gives_the_same_tuple_the_same_backend() {
    each("mh", |bench, family| {
        let backends = backends(family, &[1; 20]);
        bench.scheduled(family.vip(), UDP, Scheduler::Maglev, &backends);
        let before = choices(bench, family, 100);
        assert_eq!(before, choices(bench, family, 100));
        assert!(shares(&before).len() > 15, "{before:?}");
        // Another node has another slice, and perhaps one backend less.
        bench.scheduled(family.vip(), UDP, Scheduler::Maglev, &backends[1..]);
        let after = choices(bench, family, 100);
        let moved = before.iter().zip(&after).filter(|(was, is)| **was != 8001 && was != is).count();
        assert!(moved <= 15, "{moved} of 100 moved");
    });
}

/// A node that has never seen the connection takes it up.
#[test]
fn mh_takes_up_a_segment_in_the_middle_of_a_connection() {
    each("mid-flow", |bench, family| {
        bench.scheduled(family.vip(), TCP, Scheduler::Maglev, &backends(family, &[1; 20]));
        for port in 1..=50 {
            let client = SocketAddr::new(family.client().ip(), port);
            let syn = Packet::tcp(client, family.vip(), 1000, b"").syn();
            bench.send(Hook::Ingress, &syn).goes_on(Outcome::NewFlow);
            let backend = bench.backend_of(&syn);
            bench.forget_flows();
            let data = Packet::tcp(client, family.vip(), 1001, b"data").ack(5001);
            bench.send(Hook::Ingress, &data).passes(Outcome::NewFlow, &data.clone().to(backend));
            bench.forget_flows();
        }
    });
}

#[test]
fn sh_and_dh_look_at_one_address() {
    each("sh and dh", |bench, family| {
        for scheduler in [Scheduler::SourceHash, Scheduler::DestinationHash] {
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[1; 4]));
            assert_eq!(shares(&choices(bench, family, 50)).len(), 1, "{scheduler}: one client, one address");
        }
        bench.scheduled(family.vip(), UDP, Scheduler::SourceHash, &backends(family, &[1; 4]));
        let mut chosen = Vec::new();
        for client in 1..=60 {
            let client = match family.client() {
                SocketAddr::V4(_) => SocketAddr::from(([192, 0, 2, client], 1000)),
                SocketAddr::V6(_) => {
                    SocketAddr::from(([0x2001, 0xdb8, 0xc, 0, 0, 0, 0, u16::from(client)], 1000))
                }
            };
            let packet = Packet::udp(client, family.vip(), b"?");
            bench.send(Hook::Ingress, &packet).goes_on(Outcome::NewFlow);
            chosen.push(bench.backend_of(&packet).port());
        }
        let shares = shares(&chosen);
        assert_eq!(shares.len(), 4, "{shares:?}");
    });
}

#[test]
fn nobody_of_weight_0_gets_a_new_flow() {
    for scheduler in Scheduler::ALL {
        each(scheduler.as_str(), |bench, family| {
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[0, 1, 0]));
            assert_eq!(shares(&choices(bench, family, 20)), [(8002, 20)].into(), "{scheduler}");
        });
    }
}

/// As if there were no backend.
#[test]
fn where_all_have_weight_0_new_flows_are_refused_and_others_stay() {
    for scheduler in Scheduler::ALL {
        each_on(&[Device::Ethernet, Device::Bare], scheduler.as_str(), |bench, family| {
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[1]));
            let known = question(family, 1);
            bench.send(Hook::Ingress, &known).goes_on(Outcome::NewFlow);
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[0, 0]));
            let backend = bench.backend_of(&known);
            bench.send(Hook::Ingress, &known).passes(Outcome::Forward, &known.clone().to(backend));
            bench.send(Hook::Ingress, &question(family, 2)).turns_around(Outcome::RejectUdp);
        });
    }
}

/// The first packets of so many clients; their flows stay.
fn open(bench: &mut Bench, family: Family, clients: std::ops::Range<u16>) -> Vec<u16> {
    let mut chosen = Vec::new();
    for port in clients {
        let packet = question(family, port);
        bench.send(Hook::Ingress, &packet).goes_on(Outcome::NewFlow);
        chosen.push(bench.backend_of(&packet).port());
    }
    chosen
}

#[test]
fn lc_evens_out_whatever_the_weights() {
    each("lc", |bench, family| {
        bench.set_active(&[7, 0, 5]);
        bench.scheduled(family.vip(), UDP, Scheduler::LeastConnection, &backends(family, &[1, 9, 3]));
        assert_eq!(open(bench, family, 1..6), [8002; 5]);
        open(bench, family, 6..16);
        assert_eq!(bench.active(3), [9, 9, 9]);
    });
}

#[test]
fn wlc_and_sed_even_out_by_weight() {
    for scheduler in [Scheduler::WeightedLeastConnection, Scheduler::ShortestExpectedDelay] {
        each(scheduler.as_str(), |bench, family| {
            bench.set_active(&[0, 0, 0]);
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[1, 3, 0]));
            open(bench, family, 1..41);
            assert_eq!(bench.active(3), [10, 30, 0], "{scheduler}");
        });
    }
}

/// Under `sed` the fast one gets what the slow one would take longer for, under `nq` nobody is left idle.
#[test]
fn sed_waits_for_the_fast_one_and_nq_never_queues() {
    each("sed and nq", |bench, family| {
        let backends = backends(family, &[1, 10]);
        bench.set_active(&[0, 5]);
        bench.scheduled(family.vip(), UDP, Scheduler::ShortestExpectedDelay, &backends);
        assert_eq!(open(bench, family, 1..4), [8002; 3]);
        bench.forget_flows();
        bench.set_active(&[0, 5]);
        bench.scheduled(family.vip(), UDP, Scheduler::NeverQueue, &backends);
        assert_eq!(open(bench, family, 1..4), [8001, 8002, 8002]);
    });
}

#[test]
fn there_may_be_any_number_of_backends() {
    each("many", |bench, family| {
        bench.set_active(&[9; 40]);
        bench.scheduled(family.vip(), UDP, Scheduler::LeastConnection, &backends(family, &[1; 40]));
        bench.set_active(&[&[9; 33][..], &[3], &[9; 6]].concat());
        assert_eq!(open(bench, family, 1..7), [8034; 6]);
    });
}

/// A connection through the VIP, up to where both sides have spoken.
fn connect(bench: &mut Bench, client: SocketAddr, vip: SocketAddr) -> SocketAddr {
    let syn = Packet::tcp(client, vip, 1000, b"").syn();
    bench.send(Hook::Ingress, &syn).goes_on(Outcome::NewFlow);
    let backend = bench.backend_of(&syn);
    let accept = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
    bench.send(Hook::Egress, &accept).goes_on(Outcome::Reply);
    bench.send(Hook::Ingress, &Packet::tcp(client, vip, 1001, b"").ack(5001)).goes_on(Outcome::Forward);
    backend
}

#[test]
fn a_connection_counts_until_both_sides_have_finished() {
    each("FIN", |bench, family| {
        bench.set_active(&[0]);
        let (client, vip) = (family.client(), family.vip());
        bench.scheduled(vip, TCP, Scheduler::LeastConnection, &backends(family, &[1]));
        let backend = connect(bench, client, vip);
        assert_eq!(bench.active(1), [1]);
        let retransmission = Packet::tcp(client, vip, 1001, b"data").ack(5001);
        bench.send(Hook::Ingress, &retransmission).goes_on(Outcome::Forward);
        bench
            .send(Hook::Ingress, &Packet::tcp(client, vip, 1005, b"").ack(5001).fin())
            .goes_on(Outcome::Forward);
        assert_eq!(bench.active(1), [1], "the backend may still have much to say");
        let fin = Packet::tcp(backend, client, 5001, b"").ack(1006).fin();
        for _ in 0..2 {
            bench.send(Hook::Egress, &fin).goes_on(Outcome::Reply);
            assert_eq!(bench.active(1), [0], "once");
        }
        // The same port again, in place of the connection that is over.
        connect(bench, client, vip);
        assert_eq!(bench.active(1), [1]);
    });
}

#[test]
fn a_connection_counts_until_it_is_reset() {
    each("RST", |bench, family| {
        bench.set_active(&[0]);
        let (client, vip) = (family.client(), family.vip());
        bench.scheduled(vip, TCP, Scheduler::ShortestExpectedDelay, &backends(family, &[1]));
        for from_client in [true, false] {
            let backend = connect(bench, client, vip);
            assert_eq!(bench.active(1), [1]);
            let blind = Packet::tcp(client, vip, 77_777, b"").rst();
            bench.send(Hook::Ingress, &blind).goes_on(Outcome::Forward);
            assert_eq!(bench.active(1), [1], "nobody believes this one");
            for _ in 0..2 {
                if from_client {
                    let reset = Packet::tcp(client, vip, 1001, b"").rst();
                    bench.send(Hook::Ingress, &reset).goes_on(Outcome::Forward);
                } else {
                    let reset = Packet::tcp(backend, client, 5001, b"").ack(1001).rst();
                    bench.send(Hook::Egress, &reset).goes_on(Outcome::Reply);
                }
                assert_eq!(bench.active(1), [0]);
            }
        }
    });
}

/// A SYN to a backend that is gone is balanced anew: the flow before it ends with that.
#[test]
fn what_is_replaced_does_not_count_any_more() {
    each("replacement", |bench, family| {
        bench.set_active(&[0, 0]);
        let (client, vip) = (family.client(), family.vip());
        bench.scheduled(vip, TCP, Scheduler::LeastConnection, &backends(family, &[1]));
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).goes_on(Outcome::NewFlow);
        bench.send(Hook::Ingress, &syn).goes_on(Outcome::Forward);
        assert_eq!(bench.active(2), [1, 0], "a retransmission is no flow of its own");
        // Without the backend, which keeps its counter.
        let rest = &backends(family, &[1, 1])[1..];
        bench.scheduled(vip, TCP, Scheduler::LeastConnection, rest);
        bench.set_active(&[1]);
        bench.send(Hook::Ingress, &syn).goes_on(Outcome::NewFlow);
        assert_eq!(bench.backend_of(&syn).port(), 8002);
        // One ended, one began, both counted by the first counter of the bench.
        assert_eq!(bench.active(2), [1, 0]);
    });
}

#[test]
fn others_are_not_counted() {
    each("not counted", |bench, family| {
        bench.set_active(&[0, 0]);
        bench.scheduled(family.vip(), UDP, Scheduler::RoundRobin, &backends(family, &[1, 1]));
        open(bench, family, 1..11);
        assert_eq!(bench.active(2), [0, 0]);
        assert!(bench.flows().values().all(|flow| flow.active_flows_slot == 0));
    });
}
