//! Tests of attacks on connection tracking by senders that do not receive the replies: after forged segments, new
//! clients must be served, and established connections must stay.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_common::conntrack::Phase;
use lb_tests::{
    StopOnDrop, agent,
    client::{self, Connection, ask_udp},
    cluster::{CLIENT, ClientLink},
    netns::Netns,
    wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp},
    flood::{self, Forged, forge},
};

/// The agent's `--max-connections`. The flow table and its overflow then have 2,848 entries, two for each connection.
const ROOM: u32 = 400;
/// Number of connections that each flood tries to begin.
const FLOOD: u32 = 10 * ROOM;
/// Value of `--masquerade-ports` that allows [`PORTS`] connections to one backend.
const FEW_PORTS: &str = "20000-20199";
const PORTS: u32 = 200;
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
pub(crate) fn bed(arguments: &[&str]) -> Bed {
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

/// Number of packets that the programs of node1 have counted under this outcome. (Needs no running agent.)
pub(crate) fn counted(bed: &Bed, outcome: &str) -> u64 {
    agent::counted(&bed.cluster.node1, &bed.cluster.bpffs(1), outcome).unwrap()
}

/// The tracked flows of node1, as `conntrack list` shows them. (Needs no running agent.)
fn flows(bed: &Bed) -> Vec<serde_json::Value> {
    let list = agent::ask_json(&bed.cluster.node1, &bed.cluster.bpffs(1), &["conntrack", "list"]).unwrap();
    serde_json::from_value(list).unwrap()
}

fn is_served(client: &Netns, to: SocketAddr) -> bool {
    client.run(|| client::ask_here(to)).is_ok()
}

/// How long a new client takes to be served; `None` if its `connect`, or one of its reads or writes, fails. Each of
/// these operations has the timeout [`client::limit`].
pub(crate) fn time_to_be_served(client: &Netns, to: SocketAddr) -> Option<Duration> {
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
    /// Number of forged connections whose SYNs are sent before their FINs.
    const WAVE: u32 = 200;
    for (fin, outcome) in [(Forged::BareFin, "invalid_flags"), (Forged::Fin, "forward")] {
        let bed = bed(&["--max-connections", &ROOM.to_string()]);
        let (client, to) = (&bed.cluster.client, http(WEB[0]));
        let forge_wave = |first| {
            forge(client, to, first..first + WAVE, Forged::Syn).unwrap();
            // In the meantime, the backend answers.
            thread::sleep(Duration::from_millis(10));
            forge(client, to, first..first + WAVE, fin).unwrap();
        };
        forge_wave(0);
        // While the flow table has room, no pressure shortens the time that is left.
        let flows = flows(&bed);
        let of_syn = u64::from(Phase::Opening.timeout_seconds());
        let is_short = |flow: &serde_json::Value| flow["secondsLeft"].as_u64().unwrap() <= of_syn;
        assert!(!flows.is_empty() && flows.iter().all(is_short), "{fin:?}: {flows:#?}");

        for first in (WAVE..FLOOD).step_by(WAVE as usize) {
            forge_wave(first);
        }
        assert!(counted(&bed, "conntrack_full") > 0, "{fin:?}: the flood fills the flow table");
        let fins = counted(&bed, outcome);
        assert!(fins >= u64::from(ROOM), "{fins} of {FLOOD} {fin:?} have reached a Service or its flow");
        assert_recovers(client, to);
    }
}

/// The attack sends 40 SYNs per second. If each held its source port for the minute of an incomplete handshake, this
/// test's 200 ports would run out within seconds.
#[test]
fn forged_syns_exhaust_no_source_ports() {
    const SYNS: u32 = PORTS + 80;
    let bed = bed(&["--masquerade-all", "--masquerade-ports", FEW_PORTS]);
    let client = &bed.cluster.client;
    let to = http(WEB[0]);
    let mut established = Connection::open(client, to).unwrap();
    let seen = established.ask().unwrap().seen;
    let (over, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let _end = StopOnDrop(&over);
        scope.spawn(|| {
            for number in 0.. {
                forge(client, to, number..number + 1, Forged::Syn).unwrap();
                forge(client, to, number..number + 1, Forged::BareFin).unwrap();
                sent.store(number + 1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(25));
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let has_sent = || (sent.load(Ordering::Relaxed) >= SYNS).then_some(());
        wait_for(Duration::from_secs(30), has_sent).expect("the attack sends its SYNs");
        let begun = counted(&bed, "new_flow");
        assert!(begun > u64::from(PORTS), "{begun} flows have begun, which need a port each");
        let times: Vec<_> = (0..10).map(|_| time_to_be_served(client, to)).collect();
        assert!(
            times.iter().all(Option::is_some),
            "within {:?}, clients got in after {times:?}",
            client::limit()
        );
    });
    assert_eq!(established.ask().unwrap().seen, seen, "the established connection keeps its port");
}

/// Sends five waves of datagrams from [`FLOOD`] forged sources, so that the flows that find room and get an answer
/// become streams. Asserts that node1 has no room for the other flows. Returns the time of the last wave.
fn forge_streams(bed: &Bed, to: SocketAddr) -> Instant {
    /// Number of datagrams after which the backend gets time to answer: otherwise most datagrams would overflow the
    /// socket of the backend.
    const PIECE: u32 = 100;
    let before = counted(bed, "conntrack_full");
    let mut last_wave = Instant::now();
    for _ in 0..5 {
        last_wave = Instant::now();
        for first in (0..FLOOD).step_by(PIECE as usize) {
            forge(&bed.cluster.client, to, first..first + PIECE, Forged::Datagram).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_secs(1));
    }
    assert!(counted(bed, "conntrack_full") > before, "the flood fills the flow table");
    let streams = flows(bed).iter().filter(|flow| flow["phase"] == Phase::Stream.as_str()).count();
    assert!(streams > 0, "the flood begins streams");
    last_wave
}

#[test]
fn entries_of_forged_udp_streams_are_evicted_for_new_clients() {
    let bed = bed(&["--max-connections", &ROOM.to_string()]);
    let client = &bed.cluster.client;
    let last_wave = forge_streams(&bed, udp(WEB[0]));
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

    forge(&client, to, 0..FLOOD, Forged::Syn).unwrap();
    assert!(counted(&bed, "conntrack_full") > 0, "the flood fills the flow table");
    assert_recovers(&client, to);
    let before = ["conntrack_full", "invalid_flags"].map(|outcome| counted(&bed, outcome));
    for first in (FLOOD..2 * FLOOD).step_by(50) {
        forge(&client, to, first..first + 50, Forged::Syn).unwrap();
        forge(&client, to, first..first + 50, Forged::BareFin).unwrap();
    }
    let after = ["conntrack_full", "invalid_flags"].map(|outcome| counted(&bed, outcome));
    assert!(
        after[0] > before[0] && after[1] > before[1],
        "the flood of SYN and FIN arrives: {before:?}, {after:?}"
    );
    assert_recovers(&client, to);
    forge_streams(&bed, udp(WEB[0]));
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
        let before = counted(&bed, "conntrack_full");
        let mut established =
            [client, attacker, bed.netns("pod2")].map(|netns| Connection::open(netns, to).unwrap());
        let servers = established.each_mut().map(|connection| connection.ask().unwrap().server);

        forge(attacker, to, round * FLOOD..(round + 1) * FLOOD, Forged::Syn).unwrap();
        assert!(counted(&bed, "conntrack_full") > before, "{vip}: the flood fills the flow table");
        assert_recovers(client, to);
        assert_recovers(attacker, to);
        let again = established.each_mut().map(|connection| connection.ask().unwrap().server);
        assert_eq!(again, servers, "{vip}: established connections keep their backends");
    }
}
