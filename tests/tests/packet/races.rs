//! Packets on two CPUs at the same time.

use std::{
    hint, iter,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use lb_common::Outcome;

use super::{
    packets::Packet,
    stage::Family,
    test_run::test_run,
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

/// Number of flows that begin on two CPUs, in one round: small enough that the test's flow table and overflow have room
/// for all of their entries.
const FLOWS: usize = 200;
const ROUNDS: u32 = 20;
/// The most packets of an address family that may be dropped, in all rounds together. If a CPU is interrupted while it
/// inserts a flow, the program on the other CPU may wait in vain, and then drops its packet.
const LOST: u64 = 8;
/// Number of clients, each with a connection that has ended. The test's flow table has room for five entries of each
/// client.
const CLIENTS: usize = 40;
/// How often a thread checks whether the other thread has arrived, before it yields its CPU, which the other thread may
/// need.
const SPINS: u32 = 10_000;

/// Runs the frames on two threads, which run their nth frames at the same time.
fn run_both(bed: &Testbed, frames: [&[Vec<u8>]; 2]) {
    let program = bed.program("tc_ingress").fd().unwrap();
    let arrived = &AtomicUsize::new(0);
    let run_all = &|frames: &[Vec<u8>]| {
        for (nth, frame) in frames.iter().enumerate() {
            arrived.fetch_add(1, Ordering::SeqCst);
            for spin in iter::successors(Some(0u32), |spin| Some(spin.saturating_add(1))) {
                if arrived.load(Ordering::SeqCst) >= 2 * (nth + 1) {
                    break;
                }
                if spin < SPINS { hint::spin_loop() } else { thread::yield_now() }
            }
            test_run(program, frame, &mut vec![0; frame.len() + 512], (&[], &mut []), 0).unwrap();
        }
    };
    thread::scope(|scope| {
        for frames in frames {
            scope.spawn(move || run_all(frames));
        }
    });
}

fn bytes(packets: &[Packet]) -> Vec<Vec<u8>> {
    packets.iter().map(Packet::bytes).collect()
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
        let frames = bytes(&packets);
        let before = bed.counters();
        for _ in 0..ROUNDS {
            run_both(&bed, [&frames, &frames]);
            assert_whole(&bed, &packets);
            bed.clear_flows();
        }
        let moved = bed.moved_since(&before);
        let is_translated = |outcome| matches!(outcome, Outcome::NewFlow | Outcome::Forward);
        let lost: u64 = moved.iter().filter(|moved| !is_translated(moved.0)).map(|moved| moved.1).sum();
        assert!(lost <= LOST, "{moved:?}");
    }
}

/// Two new connections compete for the source port of an ended connection. Each new connection gets both entries; the
/// later one gets another port.
#[test]
fn port_of_an_ended_connection_is_reused_by_only_one_of_two_cpus() {
    let mut bed = Testbed::new();
    for family in Family::BOTH {
        bed.start(&format!("two CPUs and one port, {family:?}"), Device::Ethernet);
        let (backend, vips) = (family.backend(), [family.vip(), family.other_vip(), family.empty_vip()]);
        for vip in vips {
            bed.service(vip, TCP, &[backend]);
        }
        let clients = || (20_000..).take(CLIENTS).map(|port| SocketAddr::new(family.client().ip(), port));
        let [ended, first, second] = vips
            .map(|vip| clients().map(|client| Packet::tcp(client, vip, 1000, b"").syn()).collect::<Vec<_>>());
        for _ in 0..ROUNDS {
            for (syn, client) in ended.iter().zip(clients()) {
                bed.send(Hook::Ingress, syn).passes_any(Outcome::NewFlow);
                let reset = Packet::tcp(backend, client, 0, b"").rst().ack(1001);
                bed.send(Hook::Egress, &reset).passes_any(Outcome::Reply);
            }
            run_both(&bed, [&bytes(&first), &bytes(&second)]);
            assert_whole(&bed, &first);
            assert_whole(&bed, &second);
            bed.clear_flows();
        }
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
