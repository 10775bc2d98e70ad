//! No agent runs for a part of the time, by default for half of it, under floods and churn: no transaction fails.
//! Services do not change, because a change needs an agent.
//!
//! `cargo xtask soak --agent-dead 50 --minutes 20` runs it for that long (`LB_SOAK_SECONDS`, `LB_SOAK_AGENT_DEAD`).

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use lb_common::conntrack::flow_slots;
use lb_tests::{
    StopOnDrop, agent,
    client::PATIENCE,
    cluster::ClientLink,
    netns::Netns,
    snmp,
    traffic::{Kind, Report, Traffic},
    wait_for,
};

use crate::{
    attack::route_forged,
    bed::{Bed, RANGES, WEB, http, udp, vips},
    flood::{Forged, forge},
    no_agent::has_programs,
    soak::number,
};

/// Default duration in seconds, and percentage of the time without an agent.
const SHORT: u64 = 20;
const HALF: u64 = 50;
/// The longest time from one kill of the agent to the next.
const LONGEST_PERIOD: Duration = Duration::from_secs(240);
/// The agent's `--max-connections`: low enough that the floods and the churn fill the flow table within a minute
/// without an agent.
const CONNECTIONS: u32 = 8_000;
/// Forged SYNs, and half as many forged datagrams, in each [`FLOOD_PAUSE`]: about 100 SYNs/s.
const FLOOD: u32 = 2;
const FLOOD_PAUSE: Duration = Duration::from_millis(20);
const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];
/// A pod that starts in the first period without an agent.
const LATE_POD: &str = "pod5";
/// The virtual addresses of a Service with session affinity are `vips(STICKY)`.
const STICKY: u8 = 20;
/// The cluster, and the measurements of the test.
struct Soak {
    bed: Bed,
    /// The greatest number of entries of each map, and the limit for it.
    most: BTreeMap<String, (u64, u64)>,
    deaths: u64,
    dead_for: Duration,
}

impl Soak {
    fn start() -> Self {
        let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
        let mut sticky = bed.service("sticky", vips(STICKY), &PODS);
        sticky.exposure.affinity = Some(10_800);
        bed.cluster.manifests.put(&sticky).unwrap();
        start_agent(&mut bed);
        wait_for(PATIENCE, || has_programs(&bed, "lb-catch").then_some(())).unwrap();
        route_forged(&bed.cluster.node1);
        Self { bed, most: BTreeMap::new(), deaths: 0, dead_for: Duration::ZERO }
    }

    /// Kills the agent, and starts another one after `time`. The first time, also adds [`LATE_POD`] and its traffic.
    fn be_without_agent(&mut self, time: Duration, traffic: &mut Traffic) {
        let begun = Instant::now();
        self.bed.agent.take().unwrap().kill().unwrap();
        self.deaths += 1;
        if self.deaths == 1 {
            self.bed.cluster.add_pod(LATE_POD, 1, 5).unwrap();
            for (kind, to) in kinds(WEB) {
                traffic.add(self.bed.netns(LATE_POD), kind, to);
            }
        }
        self.hold(time, traffic);
        self.dead_for += begun.elapsed();
        start_agent(&mut self.bed);
    }

    /// Checks the maps and the traffic repeatedly for a time.
    fn hold(&mut self, time: Duration, traffic: &Traffic) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.look_at_maps();
            traffic.progresses().unwrap();
            sleep(Duration::from_millis(500));
        }
    }

    /// Asserts that no map grows beyond its bounds, and records the greatest number of entries of each.
    fn look_at_maps(&mut self) {
        for map in self.bed.status()["maps"].as_array().unwrap() {
            let name = map["name"].as_str().unwrap().to_owned();
            let (entries, capacity) = (map["entries"].as_u64().unwrap(), map["capacity"].as_u64().unwrap());
            // For FLOWS, `status` gives the capacity for established flows; a flood may fill all slots of the map.
            let room = if name == "FLOWS" { flow_slots(CONNECTIONS).into() } else { capacity };
            assert!(entries <= room, "{name} has {entries} entries and room for {room}");
            let most = self.most.entry(name).or_default();
            *most = (most.0.max(entries), room);
        }
    }
}

fn start_agent(bed: &mut Bed) {
    bed.start_agent_with(&[RANGES[0], RANGES[1], "--max-connections", &CONNECTIONS.to_string()]);
}

/// Each kind of traffic, to both addresses.
fn kinds(vips: [std::net::IpAddr; 2]) -> Vec<(Kind, std::net::SocketAddr)> {
    let of = |vip| {
        let tcp = Kind::TCP.map(|kind| (kind, http(vip)));
        tcp.into_iter().chain(Kind::UDP.map(|kind| (kind, udp(vip))))
    };
    vips.into_iter().flat_map(of).collect()
}

/// Starts clients outside the cluster, in a pod and on the node: to `web` with each kind of traffic, to `sticky` with
/// the kinds that use a new connection or socket each time.
fn traffic(bed: &Bed) -> Traffic {
    let mut clients = Vec::new();
    for netns in [&bed.cluster.client, bed.netns("pod1"), &bed.cluster.node1] {
        clients.extend(kinds(WEB).into_iter().map(|(kind, to)| (netns, kind, to)));
        let new = |(kind, _): &(Kind, _)| matches!(kind, Kind::Requests | Kind::Questions);
        clients.extend(kinds(vips(STICKY)).into_iter().filter(new).map(|(kind, to)| (netns, kind, to)));
    }
    Traffic::start(clients).unwrap()
}

/// Sends forged SYNs and datagrams to `web` until `over` is true; returns the number of SYNs.
fn flood(client: &Netns, over: &AtomicBool) -> u32 {
    let mut sent = 0;
    while !over.load(Ordering::Relaxed) {
        let vip = WEB[usize::from(sent % (2 * FLOOD) == 0)];
        forge(client, http(vip), sent..sent + FLOOD, Forged::Syn).unwrap();
        forge(client, udp(vip), sent..sent + FLOOD / 2, Forged::Datagram).unwrap();
        sent += FLOOD;
        sleep(FLOOD_PAUSE);
    }
    sent
}

/// Asserts that each client of `sticky` has always reached the same server.
fn assert_affinity(report: &Report) {
    let [one, other] = vips(STICKY).map(|vip| vip.to_string());
    let sticky: Vec<_> =
        report.0.iter().filter(|(name, _)| name.contains(&one) || name.contains(&other)).collect();
    assert_eq!(sticky.len(), 12, "clients of `sticky`");
    for (name, tally) in sticky {
        assert_eq!(tally.servers.len(), 1, "{name} has reached {:?}", tally.servers);
    }
}

/// Number of datagrams for which the kernel has found no socket in the namespace, so that it has sent an ICMP error.
fn without_socket(netns: &Netns) -> u64 {
    [false, true].map(|is_ipv6| snmp::counter(netns, is_ipv6, "Udp", "NoPorts").unwrap()).iter().sum()
}

/// Prints who has refused datagrams: the programs, or the kernel of a pod. (In `pod1`, a reply to a client that has
/// closed its socket counts as well.)
fn show_refusals(bed: &Bed) {
    let by_programs = agent::counted(&bed.cluster.node1, &bed.cluster.bpffs(1), "reject_udp").unwrap();
    let by_pods = PODS.map(|pod| (pod, without_socket(bed.netns(pod))));
    println!("datagrams refused: {by_programs} by the programs, by the pods' kernels {by_pods:?}");
}

#[test]
fn churn_and_floods_without_an_agent_break_no_connection() {
    let time = Duration::from_secs(number("LB_SOAK_SECONDS", SHORT));
    let percent = u32::try_from(number("LB_SOAK_AGENT_DEAD", HALF)).unwrap();
    let period = if percent < 100 { (time / 2).min(LONGEST_PERIOD) } else { time };
    let dead = period * percent / 100;
    let mut soak = Soak::start();
    let mut traffic = traffic(&soak.bed);
    let (client, over) = (soak.bed.cluster.client.clone(), AtomicBool::new(false));
    let begun = Instant::now();
    let syns = thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&client, &over));
        let end = StopOnDrop(&over);
        while begun.elapsed() < time {
            soak.be_without_agent(dead, &mut traffic);
            soak.hold(period - dead, &traffic);
        }
        drop(end);
        flood.join().unwrap()
    });
    let report = traffic.stop();
    show_refusals(&soak.bed);
    report.assert_unharmed();
    assert_affinity(&report);
    println!(
        "{:?}, {} deaths of the agent, {:?} without one: {syns} forged SYNs, most entries, of how many {:?}",
        begun.elapsed(),
        soak.deaths,
        soak.dead_for,
        soak.most
    );
}
