//! Measures the agent as a process with an API server: the time from when the server has sent the lists until
//! `/healthz` succeeds, the time from a watch event until the kernel has the change, and the agent's memory.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    thread::sleep,
    time::Instant,
};

use anyhow::{Context as _, ensure};
use lb_datapath::Pinned;
use lb_tests::{
    agent::binary,
    bench::{Figure, Quantile, Resident, Unit},
    cleanup::Cleanup,
    netns::{Netns, unique_prefix},
    wait_for,
};

use crate::{
    agent::{Kernel, METRICS, PATIENCE, PAUSE, POLL, SETTLE, synchronisations},
    api_server::ApiServer,
    growth::{Growth, Range},
    objects::{NODE, Objects},
    report::Report,
    temporary_folder,
    workload::Size,
};

/// Limits that the results of one size must not exceed.
#[derive(Clone, Copy)]
struct Limits {
    /// Limit in seconds on the time that passes after the API server has sent the lists of Services and EndpointSlices,
    /// until `/healthz` succeeds.
    start: f64,
    /// Limit on the agent's memory, in bytes.
    memory: f64,
}

impl Limits {
    /// The limits for this size: one set for up to 250,000 endpoints, another for more.
    fn of(size: Size) -> Self {
        if size.endpoints() <= 250_000 {
            Self { start: 5.0, memory: 600e6 }
        } else {
            Self { start: 8.0, memory: 800e6 }
        }
    }
}

/// Runs the agent `runs` times with the endpoints of each Service in `slices` slices; adds the results to the report.
pub(crate) fn measure(
    size: Size,
    slices: u32,
    runs: u32,
    changes: u32,
    report: &mut Report,
) -> anyhow::Result<Growth> {
    let Size { services, endpoints } = size;
    let place =
        format!("API server, {services} x {endpoints}, {slices} slice{}", if slices == 1 { "" } else { "s" });
    let mut figures = Figures::default();
    let lists = Arc::new(Objects::new(size, slices).lists());
    for run in 1..=runs {
        eprintln!("{place}: run {run} of {runs}");
        let netns = Netns::create(&unique_prefix())?;
        let server = ApiServer::start(&netns, Arc::clone(&lists))?;
        one_run(&netns, &server, size, Objects::new(size, slices), changes, &mut figures)?;
    }
    let growth = figures.growth(size);
    figures.report(&place, size, report);
    Ok(growth)
}

/// Each field has the samples of one quantity: times in seconds, memory in bytes.
#[derive(Default)]
struct Figures {
    lists: Vec<f64>,
    start: Vec<f64>,
    resident: Vec<f64>,
    resident_later: Vec<f64>,
    resident_peak: Vec<f64>,
    change: Vec<f64>,
    sync: Vec<f64>,
    restart: Vec<f64>,
    restart_peak: Vec<f64>,
}

impl Figures {
    fn growth(&self, size: Size) -> Growth {
        let range = |samples: &[f64], scale: f64| Range::of(samples.iter().map(|sample| sample * scale));
        Growth {
            size,
            start: range(&self.start, 1.0),
            change: range(&self.change, 1e3),
            resident_peak: range(&self.resident_peak, 1e-6),
        }
    }

    fn report(self, place: &str, size: Size, report: &mut Report) {
        let limits = Limits::of(size);
        let all = format!("{place}: first start");
        let again = format!("{place}: start with maps from before");
        let one = format!("{place}: one slice changes");
        let seconds = |place, what, samples| Figure::new(place, what, Unit::Seconds, samples);
        let bytes = |place, what, samples| {
            Figure::new(place, what, Unit::Bytes, samples).target(Quantile::Max, limits.memory)
        };
        report.add(seconds(&all, "process to the end of the lists", self.lists));
        let start = seconds(&all, "end of the lists to /healthz 200", self.start);
        report.add(start.target(Quantile::Max, limits.start));
        let each = self.resident.iter().map(|bytes| bytes / f64::from(size.services)).collect();
        report.add(Figure::new(&all, "- for each Service", Unit::Bytes, each));
        report.add(bytes(&all, "resident memory when settled", self.resident));
        let change = seconds(&one, "watch event to kernel", self.change);
        report.add(change.target(Quantile::P99, 0.020));
        report.add(seconds(&one, "- change to kernel, as the agent says", self.sync));
        report.add(bytes(&one, "resident memory after all changes", self.resident_later));
        report.add(bytes(&one, "resident memory at its highest", self.resident_peak));
        let restart = seconds(&again, "end of the lists to /healthz 200", self.restart);
        report.add(restart.target(Quantile::Max, limits.start));
        report.add(bytes(&again, "resident memory at its highest", self.restart_peak));
    }
}

fn one_run(
    netns: &Netns,
    server: &ApiServer,
    size: Size,
    mut objects: Objects,
    changes: u32,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let (folder, _guard) = temporary_folder()?;
    fs::write(folder.join("kubeconfig"), server.kubeconfig())?;
    let (agent, lists, seconds) = Agent::start(netns, server, size, &folder)?;
    figures.lists.push(lists);
    figures.start.push(seconds);
    sleep(SETTLE);
    figures.resident.push(agent.resident()?.now as f64);

    let kernel = Kernel::open(&Pinned::open(&folder.join("bpffs"))?.folder())?;
    for _ in 0..changes {
        let (seconds, agents) = one_change(netns, server, &kernel, &mut objects)
            .with_context(|| format!("log of the agent:\n{}", agent.log()))?;
        figures.change.push(seconds);
        figures.sync.push(agents);
    }
    sleep(SETTLE);
    let resident = agent.resident()?;
    figures.resident_later.push(resident.now as f64);
    figures.resident_peak.push(resident.peak as f64);
    drop(agent);

    server.reset();
    let (agent, _, seconds) = Agent::start(netns, server, size, &folder)?;
    figures.restart.push(seconds);
    sleep(SETTLE);
    figures.restart_peak.push(agent.resident()?.peak as f64);
    Ok(())
}

/// Sends a watch event; returns the seconds until the kernel has the change, and the seconds that the agent's histogram
/// of synchronisations has counted for the change.
fn one_change(
    netns: &Netns,
    server: &ApiServer,
    kernel: &Kernel,
    objects: &mut Objects,
) -> anyhow::Result<(f64, f64)> {
    let before = synchronisations(netns)?;
    let moved = objects.move_endpoint();
    sleep(PAUSE);
    let start = Instant::now();
    server.tell("endpointslices", &moved.line)?;
    while !kernel.has(&moved.frontend, moved.address)? {
        ensure!(start.elapsed() < PATIENCE, "a change did not reach the kernel: {}", moved.line);
        sleep(POLL);
    }
    let seconds = start.elapsed().as_secs_f64();
    let counted = |after: &_| synchronisations(netns).ok().filter(|now| now.count > *after);
    let after = wait_for(PATIENCE, || counted(&before.count));
    let after = after.context("the agent does not count its synchronisations")?;
    Ok((seconds, after.seconds - before.seconds))
}

/// A running agent, which is killed when this is dropped.
struct Agent {
    child: Child,
    log: PathBuf,
    _cleanup: Cleanup,
}

impl Agent {
    /// Starts the agent; returns it, the seconds until the lists were sent, and the seconds from then until `/healthz`
    /// answers 200.
    fn start(
        netns: &Netns,
        server: &ApiServer,
        size: Size,
        folder: &Path,
    ) -> anyhow::Result<(Self, f64, f64)> {
        let log = folder.join("log");
        let mut command = netns.command(binary());
        command.arg("run").arg("--kubeconfig").arg(folder.join("kubeconfig"));
        command.arg("--bpffs").arg(folder.join("bpffs")).args(["--node-name", NODE]);
        command.args(["--metrics-bind-address", &METRICS.to_string()]);
        if let Some(backends) = size.max_backends() {
            command.args(["--max-backends", &backends.to_string()]);
        }
        let stderr = File::options().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let start = Instant::now();
        let (child, cleanup) = Cleanup::spawn(&mut command).context("starting the agent")?;
        let agent = Self { child, log, _cleanup: cleanup };
        let healthy =
            wait_for(PATIENCE * 6, || lb_tests::agent::is_healthy(netns).unwrap_or(false).then(Instant::now));
        let healthy =
            healthy.with_context(|| format!("/healthz did not return 200; log:\n{}", agent.log()))?;
        let listed = server.listed().context("the agent is healthy without having listed anything")?;
        let watched = wait_for(PATIENCE, || (server.watches("endpointslices") > 0).then_some(()));
        watched.context("the agent does not watch")?;
        let seconds = (listed - start, healthy.saturating_duration_since(listed));
        Ok((agent, seconds.0.as_secs_f64(), seconds.1.as_secs_f64()))
    }

    fn resident(&self) -> anyhow::Result<Resident> {
        Resident::of(self.child.id())
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_else(|error| format!("(no log: {error})"))
    }
}

impl Drop for Agent {
    /// Kills the agent and waits until its process has ended: the next agent must find the pins unlocked, and a large
    /// process takes a while to end.
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("cannot end the agent {}: {error}", self.child.id());
        }
    }
}
