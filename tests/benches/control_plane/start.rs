//! Measures how long the agent takes to start on a node with few Services: from the start of the process until
//! `/healthz` succeeds. Most of this time is spent in the kernel's verifier.

use std::{
    hint,
    num::NonZero,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use lb_tests::{
    agent::{Agent, Settings, binary},
    bench::{Figure, Quantile, Unit},
    cgroup::Cgroup,
    cleanup::Cleanup,
    manifests::Manifests,
    netns::{Netns, unique_prefix},
};

use crate::{
    report::Report,
    temporary_folder,
    workload::{CLUSTER_IP_RANGE, Folder, Size},
};

/// Number of Services on the node, and of endpoints per Service.
const SIZE: Size = Size { services: 100, endpoints: 5 };
/// Maximum of the median time of a start, in seconds.
const LIMIT: f64 = 0.7;
/// Number of agents that start at once, as after a rollout on a machine that has several nodes.
const TOGETHER: usize = 3;
/// Maximum of the median time until the last of [`TOGETHER`] agents is ready, in seconds.
const LIMIT_TOGETHER: f64 = 2.0;
/// Time for the agent to finish its background work after a start.
const PAUSE: Duration = Duration::from_millis(500);

/// In each of `runs` runs, starts the agent without maps, then again with the maps that it left; adds the results to
/// the report. If there is an `other` agent, each run measures both, one after the other. Then starts several agents at
/// once.
pub(crate) fn measure(other: Option<&Path>, runs: u32, report: &mut Report) -> anyhow::Result<()> {
    let agents =
        [("start, 100 Services x 5", Some(binary())), ("start, other agent", other.map(PathBuf::from))];
    let agents = agents.into_iter().filter_map(|(place, binary)| Some((place, binary?, Figures::default())));
    let mut agents: Vec<_> = agents.collect();
    for run in 1..=runs {
        eprintln!("start: run {run} of {runs}");
        for (_, binary, figures) in &mut agents {
            one_run(binary, figures).with_context(|| format!("starting {}", binary.display()))?;
        }
    }
    for (place, _, figures) in agents {
        figures.report(place, report);
    }
    measure_together(&binary(), runs, report)
}

/// Samples of the seconds until `/healthz` succeeded.
#[derive(Default)]
struct Figures {
    first: Vec<f64>,
    again: Vec<f64>,
}

impl Figures {
    fn report(self, place: &str, report: &mut Report) {
        for (what, samples) in [
            ("process to /healthz 200, first start", self.first),
            ("process to /healthz 200, with maps and devices from before", self.again),
        ] {
            report.add(Figure::new(place, what, Unit::Seconds, samples).target(Quantile::Median, LIMIT));
        }
    }
}

fn one_run(binary: &Path, figures: &mut Figures) -> anyhow::Result<()> {
    let node = Node::create(binary)?;
    for seconds in [&mut figures.first, &mut figures.again] {
        let (agent, taken) = node.start()?;
        seconds.push(taken);
        sleep(PAUSE);
        ensure!(agent.terminate()?.success(), "the agent failed to stop");
    }
    Ok(())
}

/// In each of `runs` runs, starts [`TOGETHER`] agents at the same time: on the idle machine, then beside a busy loop
/// for each CPU. Adds the time until the last of them is ready to the report.
fn measure_together(binary: &Path, runs: u32, report: &mut Report) -> anyhow::Result<()> {
    let (mut idle, mut busy) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        eprintln!("start, {TOGETHER} agents at once: run {run} of {runs}");
        idle.push(start_together(binary)?);
        busy.push(beside_busy_loops(|| start_together(binary))?);
    }
    for (what, samples) in [
        ("the last process to /healthz 200", idle),
        ("the last process to /healthz 200, beside a busy loop for each CPU", busy),
    ] {
        let place = format!("start, {TOGETHER} agents at once");
        let figure = Figure::new(&place, what, Unit::Seconds, samples);
        report.add(figure.target(Quantile::Median, LIMIT_TOGETHER));
    }
    Ok(())
}

/// Starts agents without maps at the same time; returns the longest time that one of them took, in seconds.
fn start_together(binary: &Path) -> anyhow::Result<f64> {
    let nodes: Vec<Node> = (0..TOGETHER).map(|_| Node::create(binary)).collect::<anyhow::Result<_>>()?;
    let started: Vec<(Agent, f64)> = thread::scope(|scope| {
        let starts: Vec<_> = nodes.iter().map(|node| scope.spawn(|| node.start())).collect();
        starts.into_iter().map(|start| start.join().expect("a start panicked")).collect::<anyhow::Result<_>>()
    })?;
    Ok(started.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max))
}

/// A guard that sets the flag when the guard is dropped, also during a panic.
struct AtEnd<'a>(&'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` while one thread for each CPU runs a busy loop.
fn beside_busy_loops<T>(work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = AtEnd(&done);
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        work()
    })
}

/// A node on which an agent starts, with a folder of Services.
struct Node {
    settings: Settings,
    netns: Netns,
    _far_ends: [Netns; 2],
    _manifests: Manifests,
    _cgroup: Cgroup,
    _folder: Cleanup,
}

impl Node {
    fn create(binary: &Path) -> anyhow::Result<Self> {
        let (path, folder) = temporary_folder()?;
        let (netns, network, pod) = namespaces()?;
        let manifests = Manifests::create(path.join("manifests"))?;
        for (name, text) in Folder::new(SIZE, 1).files() {
            manifests.write(&name, &text)?;
        }
        let cgroup = Cgroup::create(netns.name())?;
        let settings = Settings {
            cgroup: Some(cgroup.path().to_owned()),
            node_name: "bench".to_owned(),
            manifests: manifests.folder().to_owned(),
            bpffs: path.join("bpffs"),
            log: path.join("log"),
            // Because this flag is given, the agent creates the catch device, as it does with an API server.
            arguments: vec!["--service-cluster-ip-range".to_owned(), CLUSTER_IP_RANGE.to_owned()],
            binary: Some(binary.to_owned()),
        };
        let _far_ends = [network, pod];
        Ok(Self { settings, netns, _far_ends, _manifests: manifests, _cgroup: cgroup, _folder: folder })
    }

    /// Starts the agent; returns it, and the seconds until `/healthz` succeeded.
    fn start(&self) -> anyhow::Result<(Agent, f64)> {
        let start = Instant::now();
        let agent = Agent::start(&self.netns, self.settings.clone())?;
        Ok((agent, start.elapsed().as_secs_f64()))
    }
}

/// The namespaces of a node, of another machine at the end of a wire, and of a pod.
fn namespaces() -> anyhow::Result<(Netns, Netns, Netns)> {
    let [node, network, pod] = [(); 3].map(|()| Netns::create(&unique_prefix()));
    let (node, network, pod) = (node?, network?, pod?);
    for (device, far) in [("wire", &network), ("pod", &pod)] {
        node.ip(&format!("link add {device} type veth peer name eth0 netns {}", far.name()))?;
        node.ip(&format!("link set {device} up"))?;
        far.ip("link set eth0 up")?;
    }
    node.ip("address add 192.0.2.1/24 dev wire")?;
    Ok((node, network, pod))
}
