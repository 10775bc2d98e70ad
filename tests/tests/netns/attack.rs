//! Tests of attacks on connection tracking by senders that do not receive the replies: after forged segments, new
//! clients must be served, and established connections must stay.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_common::conntrack::Phase;
use lb_tests::{
    client::{self, Connection, ask_udp},
    cluster::{CLIENT, ClientLink},
    netns::Netns,
    wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp},
    flood::{self, Forged, forge},
};

/// Number of connections for which the maps have room; each flood begins more.
const ROOM: u32 = 400;
/// Value of `--masquerade-ports` that allows 200 connections to one backend.
const FEW_PORTS: &str = "20000-20199";
/// How long a new client may wait to be served. Among the flows of these floods, UDP streams ([`Phase::Stream`]) are
/// evicted last: under pressure, they are evicted after 10 s without a packet. `RECOVERY` is twice that time, for slow
/// machines.
const RECOVERY: Duration = Duration::from_secs(2 * Phase::Stream.least_timeout_seconds() as u64);
/// The timeout of streams must be much longer than [`RECOVERY`], so that the tests can tell eviction from expiry.
const _: () = assert!(
    Phase::Stream.timeout_seconds() as u64 >= 3 * RECOVERY.as_secs(),
    "shorten RECOVERY with the timeout"
);

/// A cluster with a Service that has one backend; node1 routes the forged addresses to the client.
fn bed(arguments: &[&str]) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    bed.start_agent_with(arguments);
    route_forged(&bed.cluster.node1);
    bed
}

/// Adds routes on a node that lead replies to forged addresses back to the client.
pub(crate) fn route_forged(node: &Netns) {
    let [IpAddr::V4(v4), IpAddr::V6(v6)] = CLIENT else { panic!("one of each family") };
    flood::route_back(node, (v4, v6));
}

fn is_served(client: &Netns, to: SocketAddr) -> bool {
    client.run(|| client::ask_here(to)).is_ok()
}

/// How long a new client takes to be served; `None` if it is not served within [`client::limit`].
fn time_to_be_served(client: &Netns, to: SocketAddr) -> Option<Duration> {
    let begun = Instant::now();
    is_served(client, to).then(|| begun.elapsed())
}

/// Asserts that a new client is served within [`RECOVERY`] after the attack.
#[track_caller]
fn assert_recovers(client: &Netns, to: SocketAddr) {
    assert!(
        wait_for(RECOVERY, || is_served(client, to).then_some(())).is_some(),
        "no new client gets in within {RECOVERY:?}"
    );
}

#[test]
fn forged_syn_and_fin_hold_no_entry_longer_than_a_syn() {
    for fin in [Forged::BareFin, Forged::Fin] {
        let bed = bed(&["--max-connections", &ROOM.to_string()]);
        let client = &bed.cluster.client;
        for first in (0..4 * ROOM).step_by(50) {
            forge(client, http(WEB[0]), first..first + 50, Forged::Syn).unwrap();
            thread::sleep(Duration::from_millis(10));
            forge(client, http(WEB[0]), first..first + 50, fin).unwrap();
        }
        assert_recovers(client, http(WEB[0]));
    }
}

/// The attack sends 40 SYNs per second. If each held its source port for the minute of an incomplete handshake, this
/// test's 200 ports would run out within seconds.
#[test]
fn forged_syns_exhaust_no_source_ports() {
    let bed = bed(&["--masquerade-all", "--masquerade-ports", FEW_PORTS]);
    let client = &bed.cluster.client;
    let to = http(WEB[0]);
    let mut established = Connection::open(client, to).unwrap();
    let seen = established.ask().unwrap().seen;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                forge(client, to, number..number + 1, Forged::Syn).unwrap();
                forge(client, to, number..number + 1, Forged::BareFin).unwrap();
                thread::sleep(Duration::from_millis(25));
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        thread::sleep(Duration::from_secs(7));
        let times: Vec<_> = (0..10).map(|_| time_to_be_served(client, to)).collect();
        over.store(true, Ordering::Relaxed);
        assert!(
            times.iter().all(Option::is_some),
            "within {:?}, clients got in after {times:?}",
            client::limit()
        );
    });
    assert_eq!(established.ask().unwrap().seen, seen, "the established connection keeps its port");
}

#[test]
fn entries_of_forged_udp_streams_are_evicted_for_new_clients() {
    let bed = bed(&["--max-connections", &ROOM.to_string()]);
    let client = &bed.cluster.client;
    let mut last_wave = Instant::now();
    for _ in 0..5 {
        last_wave = Instant::now();
        forge(client, udp(WEB[0]), 0..3 * ROOM, Forged::Datagram).unwrap();
        thread::sleep(Duration::from_millis(1_200));
    }
    let served = || ask_udp(client, udp(WEB[0]), 8).ok();
    assert!(wait_for(RECOVERY, served).is_some(), "no new client gets in within {RECOVERY:?}");
    // Without pressure, no stream of the last wave would have expired yet. (The test measures this time itself, because
    // `wait_for` does not count time in which tasks wait for a CPU, I/O or memory.)
    let recovered = last_wave.elapsed();
    assert!(recovered < Duration::from_secs(Phase::Stream.timeout_seconds().into()), "{recovered:?}");
}

/// Without an agent, only the programs evict the flows of the floods.
#[test]
fn new_clients_are_served_after_floods_without_an_agent() {
    let mut bed = bed(&["--max-connections", &ROOM.to_string()]);
    let client = bed.cluster.client.clone();
    let to = http(WEB[0]);
    let mut established = Connection::open(&client, to).unwrap();
    let server = established.ask().unwrap().server;
    bed.agent.take().unwrap().kill().unwrap();

    const FLOOD: u32 = 10 * ROOM;
    forge(&client, to, 0..FLOOD, Forged::Syn).unwrap();
    assert_recovers(&client, to);
    for first in (FLOOD..2 * FLOOD).step_by(50) {
        forge(&client, to, first..first + 50, Forged::Syn).unwrap();
        forge(&client, to, first..first + 50, Forged::BareFin).unwrap();
    }
    assert_recovers(&client, to);
    for _ in 0..5 {
        forge(&client, udp(WEB[0]), 0..3 * ROOM, Forged::Datagram).unwrap();
        thread::sleep(Duration::from_millis(1_200));
    }
    let served = || ask_udp(&client, udp(WEB[0]), 8).ok();
    assert!(wait_for(RECOVERY, served).is_some(), "no new client gets in within {RECOVERY:?}");
    assert_recovers(&client, to);
    assert_eq!(established.ask().unwrap().server, server, "the established connection keeps its backend");
}

/// A pod with NET_RAW may forge addresses as an external client does, and the same limits apply to its flows.
#[test]
fn forged_syn_flood_of_a_pod_takes_away_no_connection() {
    let bed = bed(&["--max-connections", &ROOM.to_string()]);
    let (client, attacker) = (&bed.cluster.client, bed.netns("pod1"));
    for (round, vip) in (0..).zip(WEB) {
        let to = http(vip);
        let full = || bed.metric("lb_packets_total{outcome=\"conntrack_full\"}");
        let before = full();
        let mut established =
            [client, attacker, bed.netns("pod2")].map(|netns| Connection::open(netns, to).unwrap());
        let servers = established.each_mut().map(|connection| connection.ask().unwrap().server);

        const FLOOD: u32 = 10 * ROOM;
        forge(attacker, to, round * FLOOD..(round + 1) * FLOOD, Forged::Syn).unwrap();
        assert!(full() > before, "{vip}: the flood fills the flow table");
        assert_recovers(client, to);
        assert_recovers(attacker, to);
        let again = established.each_mut().map(|connection| connection.ask().unwrap().server);
        assert_eq!(again, servers, "{vip}: established connections keep their backends");
    }
}
