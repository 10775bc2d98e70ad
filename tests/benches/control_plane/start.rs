//! Measures how long the agent takes to start on a node with few Services: from the start of the process until
//! `/healthz` succeeds. Most of this time is spent in the kernel's verifier.

use std::{
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use lb_tests::{
    agent::{Agent, Settings, binary},
    bench::{Figure, Quantile, Unit},
    cgroup::Cgroup,
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
/// Time for the agent to finish its background work after a start.
const PAUSE: Duration = Duration::from_millis(500);

/// In each of `runs` runs, starts the agent without maps, then again with the maps that it left; adds the results to
/// the report. If there is an `other` agent, each run measures both, one after the other.
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
    Ok(())
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
    let (path, _guard) = temporary_folder()?;
    let (node, _network, _pod) = node()?;
    let manifests = Manifests::create(path.join("manifests"))?;
    for (name, text) in Folder::new(SIZE, 1).files() {
        manifests.write(&name, &text)?;
    }
    let cgroup = Cgroup::create(node.name())?;
    let settings = Settings {
        cgroup: Some(cgroup.path().to_owned()),
        node_name: "bench".to_owned(),
        manifests: manifests.folder().to_owned(),
        bpffs: path.join("bpffs"),
        log: path.join("log"),
        // With a range of cluster IPs the agent creates the catch device, as it does with an API server.
        arguments: vec!["--service-cluster-ip-range".to_owned(), CLUSTER_IP_RANGE.to_owned()],
        binary: Some(binary.to_owned()),
    };
    for seconds in [&mut figures.first, &mut figures.again] {
        let start = Instant::now();
        let agent = Agent::start(&node, settings.clone())?;
        seconds.push(start.elapsed().as_secs_f64());
        sleep(PAUSE);
        ensure!(agent.terminate()?.success(), "the agent failed to stop");
    }
    Ok(())
}

/// The namespaces of a node, of another machine at the end of a wire, and of a pod.
fn node() -> anyhow::Result<(Netns, Netns, Netns)> {
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
