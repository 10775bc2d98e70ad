//! Measures the agent as a process: the time from its start until `/healthz` succeeds, the time from an edit of a file
//! until the kernel has the change, and the agent's memory.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use lb_common::{Address, Backend, Service, ServiceKey};
use lb_datapath::Pinned;
use lb_tests::{
    agent::{Agent, Settings},
    bench::{Figure, Quantile, Resident, Unit},
    manifests::Manifests,
    netns::{Netns, unique_prefix},
    wait_for,
};

use crate::{
    report::{FULL_SYNC_LIMIT, Report},
    temporary_folder,
    workload::{Edit, Folder, Size},
};

/// Pause after the start of the agent, and after the edits, before the benchmark reads the agent's memory.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);
/// Pause between edits of manifests, longer than the grace period of the previous edit.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);
/// Interval at which the benchmark reads the maps.
pub(crate) const POLL: Duration = Duration::from_micros(100);
/// How long the benchmark waits for an edit to reach the maps.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// The agent's histogram of the seconds from the arrival of a change until the kernel has it; the benchmark uses its
/// sum and count.
const SYNC_LATENCY: &str = "lb_sync_latency_seconds";
pub(crate) const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
/// Maximum memory that the agent may use, in bytes.
const MEMORY_LIMIT: f64 = 200e6;

/// Runs the agent `runs` times with the Services in `files` manifest files; adds the results to the report.
pub(crate) fn measure(
    size: Size,
    files: u32,
    runs: u32,
    changes: u32,
    report: &mut Report,
) -> anyhow::Result<()> {
    let place = format!("agent, {files} {}", if files == 1 { "file" } else { "files" });
    let mut figures = Figures::default();
    for run in 1..=runs {
        eprintln!("{place}: run {run} of {runs}");
        one_run(size, files, changes, &mut figures)?;
    }
    figures.report(&place, report);
    Ok(())
}

/// Each field has the samples of one quantity: times in seconds, memory in bytes.
#[derive(Default)]
struct Figures {
    start: Vec<f64>,
    first_sync: Vec<f64>,
    resident: Vec<f64>,
    resident_later: Vec<f64>,
    resident_peak: Vec<f64>,
    edit: Vec<f64>,
    sync: Vec<f64>,
    restart: Vec<f64>,
    restart_resident: Vec<f64>,
    restart_peak: Vec<f64>,
}

impl Figures {
    fn report(self, place: &str, report: &mut Report) {
        let all = format!("{place}: first start");
        let again = format!("{place}: start with maps from before");
        let one = format!("{place}: one endpoint moves");
        let seconds = |place, what, samples| Figure::new(place, what, Unit::Seconds, samples);
        let add_memory = |report: &mut Report, place, what, samples| {
            report.add_limited(Figure::new(place, what, Unit::Bytes, samples), MEMORY_LIMIT);
        };
        report.add(seconds(&all, "process to /healthz 200", self.start));
        let first_sync = seconds(&all, "- objects to programmed maps, as the agent says", self.first_sync);
        report.add_limited(first_sync, FULL_SYNC_LIMIT);
        add_memory(report, &all, "resident memory when settled", self.resident);
        report.add(seconds(&one, "rename of the file to kernel", self.edit));
        let sync = seconds(&one, "- event to kernel, as the agent says", self.sync);
        report.add(sync.target(Quantile::P99, 0.010));
        add_memory(report, &one, "resident memory after all changes", self.resident_later);
        add_memory(report, &one, "resident memory at its highest", self.resident_peak);
        report.add(seconds(&again, "process to /healthz 200", self.restart));
        add_memory(report, &again, "resident memory when settled", self.restart_resident);
        add_memory(report, &again, "resident memory at its highest", self.restart_peak);
    }
}

fn one_run(size: Size, files: u32, changes: u32, figures: &mut Figures) -> anyhow::Result<()> {
    let (path, _guard) = temporary_folder()?;
    let netns = Netns::create(&unique_prefix())?;
    let mut folder = Folder::new(size, files);
    let manifests = Manifests::create(path.join("manifests"))?;
    for (name, text) in folder.files() {
        manifests.write(&name, &text)?;
    }
    let settings = Settings {
        cgroup: None,
        node_name: "bench".to_owned(),
        manifests: manifests.folder().to_owned(),
        bpffs: path.join("bpffs"),
        log: path.join("log"),
        arguments: vec!["--metrics-bind-address".to_owned(), METRICS.to_string()],
        binary: None,
    };
    let (agent, seconds) = start(&netns, &settings)?;
    figures.start.push(seconds);
    figures.first_sync.push(synchronisations(&netns)?.seconds);
    sleep(SETTLE);
    figures.resident.push(Resident::of(agent.pid())?.now as f64);

    let kernel = Kernel::open(&Pinned::open(&settings.bpffs)?.folder())?;
    for _ in 0..changes {
        let edit = folder.move_endpoint();
        let (seconds, agents) = one_edit(&netns, &manifests, &kernel, &edit)
            .with_context(|| format!("log of the agent:\n{}", agent.log()))?;
        figures.edit.push(seconds);
        figures.sync.push(agents);
    }
    sleep(SETTLE);
    let resident = Resident::of(agent.pid())?;
    figures.resident_later.push(resident.now as f64);
    figures.resident_peak.push(resident.peak as f64);
    ensure!(agent.terminate()?.success(), "the agent failed to stop");

    let (agent, seconds) = start(&netns, &settings)?;
    figures.restart.push(seconds);
    sleep(SETTLE);
    let resident = Resident::of(agent.pid())?;
    figures.restart_resident.push(resident.now as f64);
    figures.restart_peak.push(resident.peak as f64);
    ensure!(agent.terminate()?.success(), "the agent failed to stop");
    Ok(())
}

/// Starts the agent; returns it, and the seconds until `/healthz` answers 200.
fn start(netns: &Netns, settings: &Settings) -> anyhow::Result<(Agent, f64)> {
    let start = Instant::now();
    let agent = Agent::start(netns, settings.clone())?;
    Ok((agent, start.elapsed().as_secs_f64()))
}

/// Edits a manifest; returns the seconds until the kernel has the change, and the seconds that the agent's histogram
/// [`SYNC_LATENCY`] has counted for the change.
fn one_edit(
    netns: &Netns,
    manifests: &Manifests,
    kernel: &Kernel,
    edit: &Edit,
) -> anyhow::Result<(f64, f64)> {
    let before = synchronisations(netns)?;
    let file = manifests.folder().join(format!("{}.yaml", edit.file));
    let hidden = manifests.folder().join(".edit.tmp");
    fs::write(&hidden, &edit.text)?;
    sleep(PAUSE);
    let start = Instant::now();
    fs::rename(&hidden, &file)?;
    while !kernel.has(&edit.frontend, edit.address)? {
        ensure!(start.elapsed() < PATIENCE, "a change of {} did not reach the kernel", file.display());
        sleep(POLL);
    }
    let seconds = start.elapsed().as_secs_f64();
    let after = wait_for(PATIENCE, || match synchronisations(netns) {
        Ok(after) if after.count == before.count => None,
        other => Some(other),
    });
    let after = after.context("the agent does not count its synchronisations")??;
    ensure!(
        after.count == before.count + 1,
        "one edit caused {} synchronisations",
        after.count - before.count
    );
    Ok((seconds, after.seconds - before.seconds))
}

/// The agent's maps, read directly.
pub(crate) struct Kernel {
    services: HashMap<MapData, [u8; size_of::<ServiceKey>()], [u8; size_of::<Service>()]>,
    backends: Array<MapData, [u8; size_of::<Backend>()]>,
}

impl Kernel {
    /// Opens the maps that are pinned in the folder.
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let open = |name| Map::from_map_data(MapData::from_pin(folder.join(name))?);
        Ok(Self { services: open("SERVICES")?.try_into()?, backends: open("BACKENDS")?.try_into()? })
    }

    /// Whether the backends of the Service port with this frontend include the address.
    pub(crate) fn has(&self, frontend: &ServiceKey, address: Address) -> anyhow::Result<bool> {
        let record: Service = bytemuck::must_cast(self.services.get(&bytemuck::must_cast(*frontend), 0)?);
        for slot in record.backends_base..record.backends_base + record.backends_count {
            let backend: Backend = bytemuck::must_cast(self.backends.get(&slot, 0)?);
            if backend.address == address {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The agent's metrics of synchronisations: their number, and their total seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synchronisations {
    pub(crate) count: u64,
    pub(crate) seconds: f64,
}

pub(crate) fn synchronisations(netns: &Netns) -> anyhow::Result<Synchronisations> {
    let metrics = scrape(netns).context("reading /metrics of the agent")?;
    let value = |suffix: &str| {
        let name = format!("{SYNC_LATENCY}_{suffix} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.ok_or_else(|| anyhow!("the agent has no metric {name}"))
    };
    Ok(Synchronisations { count: value("count")?.parse()?, seconds: value("sum")?.parse()? })
}

fn scrape(netns: &Netns) -> anyhow::Result<String> {
    let mut stream = netns.run(|| TcpStream::connect(METRICS))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if !answer.starts_with("HTTP/1.1 200") {
        bail!("the answer is {}", answer.lines().next().unwrap_or("empty"));
    }
    Ok(answer)
}
