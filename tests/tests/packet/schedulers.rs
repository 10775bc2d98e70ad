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
    for scheduler in Scheduler::ALL.into_iter().filter(|scheduler| !scheduler.counts()) {
        each(scheduler.as_str(), |bench, family| {
            bench.scheduled(family.vip(), UDP, scheduler, &backends(family, &[0, 1, 0]));
            assert_eq!(shares(&choices(bench, family, 20)), [(8002, 20)].into(), "{scheduler}");
        });
    }
}

/// As if there were no backend.
#[test]
fn where_all_have_weight_0_new_flows_are_refused_and_others_stay() {
    for scheduler in Scheduler::ALL.into_iter().filter(|scheduler| !scheduler.counts()) {
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
