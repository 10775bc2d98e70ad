//! Churn for a configurable time: Services and endpoints change at random, agents are killed and restarted. All
//! requests to Services with pods succeed, and maps, memory and descriptors do not leak.
//!
//! `cargo xtask soak --minutes 30` runs it for that long (`LB_SOAK_SECONDS`, `LB_SOAK_SEED`).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use fastrand::Rng;
use lb_common::conntrack::Phase;
use lb_tests::{
    client::{self, PortsInTurn, echo},
    netns::Netns,
    pattern, wait_for,
};

use crate::bed::{Bed, http, udp, vips};

/// Default duration in seconds.
const SHORT: u64 = 15;
const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];
/// Services that are added and removed.
const NAMES: [&str; 8] = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"];
/// The virtual addresses of the first Service are `vips(FIRST)`.
const FIRST: u8 = 50;
/// Client ports of UDP requests, used in turn: a Service without pods keeps its flows, so a client that uses the port
/// of such a flow again would get an answer. When the range starts over, those flows must have expired.
const CLIENT_PORTS: RangeInclusive<u16> = 33_000..=60_000;
static PORTS: PortsInTurn = PortsInTurn::new(CLIENT_PORTS);
/// Limit, in bytes, for the growth of the agent's memory in the second half of the time, in addition to [`GC_INDEX`]
/// for each entry.
const GROWTH: u64 = 8 << 20;
/// The maps of flows.
const FLOWS: [&str; 2] = ["FLOWS", "CONNTRACK"];
/// Upper bound, in bytes, of the memory that the index of a garbage collection takes for each entry of the flow table.
/// Key and value have 40 bytes, and each entry has a control byte. The hash table may be half empty, which doubles its
/// size. While the table grows, the previous table, which is half as large, exists as well. The heap keeps the memory.
/// An agent that started shortly before the middle of the test may have run its first garbage collection after the
/// middle.
const GC_INDEX: u64 = 128;

/// The number in an environment variable, or `default` if it is not set or not a number.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The cluster, and the state that the test changes.
struct Soak {
    bed: Bed,
    rng: Rng,
    /// The pods of each existing Service.
    served: BTreeMap<usize, BTreeSet<&'static str>>,
    changes: u64,
    restarts: u64,
    asked: u64,
}

impl Soak {
    /// Adds, changes or removes a Service and waits until the kernel holds the change.
    fn change(&mut self) {
        self.changes += 1;
        let which = self.rng.usize(..NAMES.len());
        let vips = vips(FIRST + u8::try_from(which).unwrap());
        if self.rng.u8(..4) == 0 && self.served.remove(&which).is_some() {
            self.bed.cluster.manifests.remove(NAMES[which]).unwrap();
            return self.wait_served(which, None);
        }
        let pods: BTreeSet<&str> = PODS.into_iter().filter(|_| self.rng.bool()).collect();
        let mut service = self.bed.service(NAMES[which], vips, &pods.iter().copied().collect::<Vec<_>>());
        service.exposure.affinity = self.rng.bool().then_some(600);
        if self.rng.bool() {
            service.annotations = vec![(
                "lb.dev/scheduler",
                (*["rr", "lc", "mh"].get(self.rng.usize(..3)).unwrap()).to_owned(),
            )];
        }
        self.bed.cluster.manifests.put(&service).unwrap();
        self.wait_served(which, Some(&pods));
        self.served.insert(which, pods);
    }

    /// Waits until the kernel holds a Service with exactly these pods behind each port; for `None`, until it no longer
    /// holds the Service.
    fn wait_served(&self, which: usize, pods: Option<&BTreeSet<&str>>) {
        let addresses = |pods: &BTreeSet<&str>| -> BTreeSet<String> {
            let of =
                |pod: &&str| self.bed.cluster.pod(pod).unwrap().addresses.map(|address| address.to_string());
            pods.iter().flat_map(of).collect()
        };
        let wanted = pods.map(addresses);
        let told = || {
            let list = self.bed.json(&["service", "list"]);
            let ports = list.as_array()?.iter().filter(|port| port["name"] == NAMES[which]);
            let backends: Vec<BTreeSet<String>> = ports
                .map(|port| {
                    let backends = port["backends"].as_array().into_iter().flatten();
                    backends.filter_map(|backend| backend["address"].as_str().map(str::to_owned)).collect()
                })
                .collect();
            let right = match &wanted {
                Some(wanted) => backends.len() == 2 && backends.iter().all(|of_port| of_port == wanted),
                None => backends.is_empty(),
            };
            right.then_some(())
        };
        wait_for(client::PATIENCE, told)
            .unwrap_or_else(|| panic!("{} has not become {pods:?}", NAMES[which]));
    }

    /// Sends requests to all Services: those with pods must answer, the others must not.
    fn ask(&mut self) {
        for (which, pods) in &self.served {
            let vips = vips(FIRST + u8::try_from(*which).unwrap());
            let clients: [&Netns; 3] =
                [&self.bed.cluster.client, self.bed.netns("pod1"), &self.bed.cluster.node1];
            for netns in clients {
                let vip = vips[self.rng.usize(..2)];
                let answers = [
                    netns.run(|| client::ask_here(http(vip))),
                    PORTS.udp_socket(netns, udp(vip)).and_then(|socket| echo(&socket, pattern::at(0, 100))),
                ];
                for answer in answers {
                    self.asked += 1;
                    match answer {
                        Ok(answer) => {
                            assert!(pods.contains(&*answer.server), "{vip}, served by {pods:?}: {answer:?}");
                        }
                        Err(error) => {
                            assert!(pods.is_empty(), "{vip}, served by {pods:?}: {error}");
                        }
                    }
                }
            }
        }
    }

    fn restart(&mut self) {
        self.restarts += 1;
        let agent = self.bed.agent.take().unwrap();
        if self.rng.bool() {
            agent.kill().unwrap();
        } else {
            assert!(agent.terminate().unwrap().success());
        }
        self.ask();
        self.bed.start_agent();
    }

    /// Resident bytes and open descriptors of the agent.
    fn memory_and_descriptors(&self) -> (u64, usize) {
        let pid = self.bed.agent.as_ref().unwrap().pid();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kilobytes: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
        (kilobytes << 10, fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
    }

    /// Number of entries of each map except [`FLOWS`].
    fn maps(&self) -> BTreeMap<String, u64> {
        self.entries().into_iter().filter(|(name, _)| !FLOWS.contains(&name.as_str())).collect()
    }

    /// Number of entries of each map.
    fn entries(&self) -> BTreeMap<String, u64> {
        let status = self.bed.json(&["status"]);
        let maps = status["maps"].as_array().unwrap().iter();
        maps.map(|map| (map["name"].as_str().unwrap().to_owned(), map["entries"].as_u64().unwrap())).collect()
    }
}

#[test]
fn no_request_fails_and_nothing_leaks_under_churn() {
    let (seconds, seed) = (number("LB_SOAK_SECONDS", SHORT), number("LB_SOAK_SEED", 5));
    let mut soak = Soak {
        bed: Bed::with_web(&PODS),
        rng: Rng::with_seed(seed),
        served: BTreeMap::new(),
        changes: 0,
        restarts: 0,
        asked: 0,
    };
    let before = soak.maps();
    let traffic = soak.bed.traffic();
    let (start, time) = (Instant::now(), Duration::from_secs(seconds));
    let mut next_restart = start + time / 8;
    while start.elapsed() < time / 2 {
        soak.change();
        soak.ask();
        if next_restart <= Instant::now() {
            soak.restart();
            next_restart = Instant::now() + (time / 4).min(Duration::from_secs(60));
        }
    }
    // From here on the agent is not restarted, so that a leak would be visible.
    let middle = soak.memory_and_descriptors();
    while start.elapsed() < time {
        soak.change();
        soak.ask();
    }
    for which in std::mem::take(&mut soak.served).into_keys() {
        soak.bed.cluster.manifests.remove(NAMES[which]).unwrap();
    }
    let clean = || (soak.maps() == before).then_some(());
    wait_for(Duration::from_secs(20), clean)
        .unwrap_or_else(|| panic!("maps had {before:?} and have {:?}", soak.maps()));
    let end = soak.memory_and_descriptors();
    let entries = soak.entries();
    let flows: u64 = FLOWS.iter().map(|map| entries[*map]).sum();
    let limit = middle.0 + GROWTH + GC_INDEX * flows;
    assert!(end.0 <= limit, "{} bytes of memory, then {} with {flows} entries of flows", middle.0, end.0);
    assert!(end.1 <= middle.1 + 2, "{} descriptors, then {}", middle.1, end.1);
    // Every second request is UDP; its flow has the timeout of `Replied`.
    let ports_per_timeout = soak.asked / 2 * u64::from(Phase::Replied.timeout_seconds()) / seconds;
    assert!(
        ports_per_timeout < CLIENT_PORTS.len() as u64,
        "{ports_per_timeout} client ports within a timeout"
    );
    let report = traffic.stop();
    report.assert_unharmed();
    println!(
        "seed {seed}, {seconds} s: {} changes, {} restarts, {} questions to what changes, {} MB and {} descriptors in the end",
        soak.changes,
        soak.restarts,
        soak.asked,
        end.0 >> 20,
        end.1
    );
}
