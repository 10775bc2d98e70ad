//! Packets of one flow on two CPUs at the same time.

use std::{
    hint, iter,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use lb_common::Outcome;

use super::{
    packets::Packet,
    stage::Family,
    test_run::test_run,
    testbed::{Device, Testbed, UDP},
};

/// Flows that begin on two CPUs, in one round: as many as the test's table has room for.
const FLOWS: usize = 200;
const ROUNDS: u32 = 20;
/// Packets of a family that may be dropped: those whose CPU waited in vain, because the other one was interrupted while
/// it inserted the flow.
const LOST: u64 = 8;
/// How often a thread checks for the other one before it yields its CPU, which the other thread may need.
const SPINS: u32 = 10_000;

/// Runs each of these frames on two threads at once.
fn run_twice(bed: &Testbed, frames: &[Vec<u8>]) {
    let program = bed.program("tc_ingress").fd().unwrap();
    let arrived = AtomicUsize::new(0);
    let run_all = || {
        for (nth, frame) in frames.iter().enumerate() {
            arrived.fetch_add(1, Ordering::SeqCst);
            for spin in iter::successors(Some(0u32), |spin| Some(spin.saturating_add(1))) {
                if arrived.load(Ordering::SeqCst) >= 2 * (nth + 1) {
                    break;
                }
                if spin < SPINS { hint::spin_loop() } else { thread::yield_now() }
            }
            test_run(program, frame, &mut vec![0; frame.len() + 512], &[], 0).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(run_all);
        scope.spawn(run_all);
    });
}

#[test]
fn first_packets_on_two_cpus_begin_one_whole_flow() {
    let mut bed = Testbed::new();
    for family in Family::BOTH {
        bed.start(&format!("two CPUs, {family:?}"), Device::Ethernet);
        bed.service(family.vip(), UDP, &[family.backend(), family.other_backend()]);
        let clients = (20_000..).map(|port| (family.client().ip(), port).into());
        let packets: Vec<Packet> =
            clients.take(FLOWS).map(|client| Packet::udp(client, family.vip(), b"x")).collect();
        let frames: Vec<Vec<u8>> = packets.iter().map(Packet::bytes).collect();
        let before = bed.counters();
        for _ in 0..ROUNDS {
            run_twice(&bed, &frames);
            assert_whole(&bed, &packets);
            bed.clear_flows();
        }
        let moved = bed.moved_since(&before);
        let is_translated = |outcome| matches!(outcome, Outcome::NewFlow | Outcome::Forward);
        let lost: u64 = moved.iter().filter(|moved| !is_translated(moved.0)).map(|moved| moved.1).sum();
        assert!(lost <= LOST, "{moved:?}");
    }
}

/// Asserts that each flow has both entries.
fn assert_whole(bed: &Testbed, packets: &[Packet]) {
    let flows = bed.flows();
    for packet in packets {
        let from = packet.tuple();
        let reply = flows.get(&from).and_then(|forward| flows.get(&forward.to.reversed()));
        assert_eq!(reply.map(|reply| reply.to), Some(from.reversed()));
    }
}
