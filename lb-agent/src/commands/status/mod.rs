//! The command `status`: shows the state of the kernel, read from the pins, and the state of the agent, read from its
//! status socket.

mod text;

use jiff::Timestamp;
use lb_common::{Outcome, Verdict};
use lb_web::{Problem, Severity};
use serde::Serialize;

use self::text::{last_sync, missing_line, page, serves_sockets, shortage_text, socket_line};
use super::output::{print, print_json};
use crate::{
    cli::{StatusArgs, TableOrJson},
    config::KernelPaths,
    daemon::{
        report::{DeviceReport, Report},
        socket,
    },
    leftovers::{self, Findings, Leftover},
};
use lb_datapath::{
    Attachment, Direction, MapFill, Missing, Pinned, Probe, SocketAttachment, XdpAttachment, XdpMode,
};

/// The state that `status` shows. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Status {
    agent: Agent,
    missing: MissingView,
    /// Optional kernel features that are missing, and settings of the host that harm the data plane.
    degraded: Vec<DegradedView>,
    /// Objects of a kube-proxy in the kernel, such as rules and virtual servers: that kube-proxy has left them, or
    /// still runs.
    kube_proxy: Vec<Leftover>,
    /// Errors of the tools that search for objects of kube-proxy: kube-proxy may have left more than `kube_proxy`
    /// lists.
    kube_proxy_errors: Vec<String>,
    /// Path of the directory of the pins.
    folder: String,
    programs: Vec<ProgramView>,
    /// Attached programs that translate Service addresses in socket system calls.
    socket_programs: Vec<SocketProgramView>,
    maps: Vec<MapView>,
    outcomes: Vec<OutcomeView>,
}

/// The JSON output of `status`: the state, and the conditions of every severity, worst first.
#[derive(Debug, Serialize)]
struct Page {
    #[serde(flatten)]
    status: Status,
    conditions: Vec<Problem>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Agent {
    running: bool,
    /// The process that holds the lock of the data plane, such as `pid 17 lb-agent`.
    process: Option<String>,
    /// Why the agent's report could not be read; `None` if it could, or if no agent listens on the status socket.
    silent: Option<String>,
    #[serde(flatten)]
    report: Option<Report>,
}

/// Missing pins and programs: see [`Missing`].
#[derive(Debug, Serialize)]
struct MissingView {
    maps: Vec<&'static str>,
    programs: Vec<String>,
    hooks: Vec<String>,
    sockets: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct DegradedView {
    name: &'static str,
    detail: String,
}

/// A program that is attached to one side of an interface of this network namespace.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProgramView {
    device: String,
    /// Kind of the interface: `wire`, `workload` or `catch`; `None` if no agent reports it.
    kind: Option<String>,
    direction: &'static str,
    /// How the program is attached: `tcx`, `clsact`, `xdp native` or `xdp generic`.
    layer: &'static str,
    program: String,
    program_id: u32,
}

/// A program that is attached to a cgroup and translates Service addresses in socket system calls of that cgroup's
/// processes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SocketProgramView {
    program: &'static str,
    program_id: u32,
    /// Inode number of the cgroup directory; 0 if the cgroup was removed, which detaches the program.
    cgroup: u64,
}

#[derive(Debug, Serialize)]
struct MapView {
    name: &'static str,
    entries: usize,
    capacity: u32,
}

#[derive(Debug, Serialize)]
struct OutcomeView {
    outcome: &'static str,
    verdict: &'static str,
    packets: u64,
}

/// Runs `status`.
///
/// # Errors
/// There is no data plane, or it cannot be read.
pub fn status(paths: &KernelPaths, args: &StatusArgs) -> anyhow::Result<()> {
    let status = look(paths, &Pinned::open(&paths.bpffs)?)?;
    match args.output {
        TableOrJson::Json => print_json(&Page { conditions: problems(&status, Timestamp::now()), status }),
        TableOrJson::Table => print(&page(&status, Timestamp::now(), args.all)),
    }
}

/// Collects the state that `status` shows.
pub(super) fn look(paths: &KernelPaths, pinned: &Pinned) -> anyhow::Result<Status> {
    look_beside(paths, pinned, &leftovers::find())
}

/// Like [`look`], with leftovers of kube-proxy that the caller has found earlier, because a search for them runs other
/// programs.
pub(super) fn look_beside(
    paths: &KernelPaths,
    pinned: &Pinned,
    Findings { leftovers, errors }: &Findings,
) -> anyhow::Result<Status> {
    let agent = agent(paths, pinned);
    let devices = agent.report.as_ref().map_or(&[][..], |report| &report.devices);
    Ok(Status {
        missing: missing(pinned, agent.report.as_ref())?,
        programs: programs(pinned, devices)?,
        socket_programs: pinned.socket_attachments()?.iter().map(socket_program).collect(),
        maps: pinned.fill()?.into_iter().map(map).collect(),
        outcomes: outcomes(pinned.stats().read()?),
        kube_proxy: leftovers.clone(),
        kube_proxy_errors: errors.iter().map(ToString::to_string).collect(),
        degraded: lb_datapath::degraded(&paths.bpffs).into_iter().map(degraded_view).collect(),
        folder: pinned.folder().display().to_string(),
        agent,
    })
}

/// The conditions of every severity, with advice, worst first.
pub(super) fn problems(status: &Status, now: Timestamp) -> Vec<Problem> {
    let Status { agent, missing, degraded, kube_proxy, kube_proxy_errors, socket_programs, .. } = status;
    let mut problems = Vec::new();
    let mut add = |severity, topic, text| problems.push(Problem { severity, topic, text });
    if let Some(text) = missing_line(missing, agent.running) {
        add(Severity::Error, "Missing", text);
    }
    match &agent.report {
        Some(report) => report_problems(report, now, &mut add),
        None if agent.running => {
            let why = agent.silent.as_deref().unwrap_or("it has no status socket");
            add(Severity::Warning, "Agent", format!("runs, but sends no report: {why}"));
        }
        None => {
            let text = "not running: the data plane works without it, but follows no changes. Start it";
            add(Severity::Error, "Agent", text.to_owned());
        }
    }
    for found in leftovers::advice(kube_proxy).iter().chain(kube_proxy_errors) {
        add(Severity::Warning, "Leftovers", found.clone());
    }
    if !serves_sockets(socket_programs) {
        add(Severity::Note, "Sockets", socket_line(socket_programs));
    }
    for DegradedView { name, detail } in degraded {
        add(Severity::Note, "Degraded", format!("{name}: {detail}"));
    }
    problems.sort_by_key(|problem| problem.severity);
    problems
}

/// Adds the problems that the agent reports.
fn report_problems(report: &Report, now: Timestamp, add: &mut impl FnMut(Severity, &'static str, String)) {
    if !report.healthy {
        let last = last_sync(report, now);
        add(Severity::Error, "Sync", format!("not healthy, last change written {last}: see the agent's log"));
    }
    for failure in &report.failures {
        add(Severity::Error, "Failure", failure.clone());
    }
    for shortage in &report.shortages {
        add(Severity::Error, "Shortage", shortage_text(shortage, now));
    }
    for problem in &report.problems {
        let is_advice = report.advice.contains(problem);
        let (severity, topic) =
            if is_advice { (Severity::Note, "Advice") } else { (Severity::Warning, "Problem") };
        add(severity, topic, problem.clone());
    }
    if !report.node_eligible {
        let text = "the node is being deleted, or the cluster autoscaler is about to remove it: /healthz answers 503";
        add(Severity::Note, "Healthz", text.to_owned());
    }
}

fn missing(pinned: &Pinned, report: Option<&Report>) -> anyhow::Result<MissingView> {
    let Missing { maps, programs, hooks, mut sockets } = Missing::find(pinned)?;
    if report.is_some_and(|report| !report.synchronised) {
        // Not missing yet: the agent attaches programs on sockets after its first synchronisation.
        sockets.clear();
    }
    Ok(MissingView { maps, programs, hooks, sockets })
}

fn degraded_view(probe: Probe) -> DegradedView {
    DegradedView { name: probe.name, detail: probe.detail }
}

fn agent(paths: &KernelPaths, pinned: &Pinned) -> Agent {
    let process = pinned.agent();
    let (report, silent) = match socket::ask(&paths.bpffs) {
        Ok(report) => (report, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    Agent { running: process.is_some() || report.is_some(), process, silent, report }
}

/// The programs that are attached to interfaces, sorted by interface.
fn programs(pinned: &Pinned, devices: &[DeviceReport]) -> anyhow::Result<Vec<ProgramView>> {
    let tc = pinned.attachments()?;
    let xdp = pinned.xdp_attachments()?;
    let mut views: Vec<(u32, ProgramView)> = xdp.iter().map(|a| (a.index, xdp_program(a, devices))).collect();
    views.extend(tc.iter().map(|a| (a.index, program(a, devices))));
    views.sort_by_key(|(index, _)| *index);
    Ok(views.into_iter().map(|(_, view)| view).collect())
}

fn kind_of(index: u32, device: &str, devices: &[DeviceReport]) -> Option<String> {
    let known = devices.iter().find(|known| known.index == index && known.name == device);
    known.map(|known| known.kind.clone())
}

fn xdp_program(attachment: &XdpAttachment, devices: &[DeviceReport]) -> ProgramView {
    let XdpAttachment { index, device, mode, program } = attachment;
    ProgramView {
        device: device.clone(),
        kind: kind_of(*index, device, devices),
        direction: Direction::Ingress.as_str(),
        layer: match mode {
            XdpMode::Native => "xdp native",
            XdpMode::Generic => "xdp generic",
        },
        program: program.name.clone(),
        program_id: program.id,
    }
}

fn program(attachment: &Attachment, devices: &[DeviceReport]) -> ProgramView {
    let Attachment { index, device, direction, mode, program } = attachment;
    ProgramView {
        device: device.clone(),
        kind: kind_of(*index, device, devices),
        direction: direction.as_str(),
        layer: mode.as_str(),
        program: program.name.clone(),
        program_id: program.id,
    }
}

fn socket_program(attachment: &SocketAttachment) -> SocketProgramView {
    let SocketAttachment { program, program_id, cgroup } = *attachment;
    SocketProgramView { program, program_id, cgroup }
}

fn map(MapFill { name, entries, capacity }: MapFill) -> MapView {
    MapView { name, entries, capacity }
}

fn outcomes(packets: [u64; Outcome::COUNT]) -> Vec<OutcomeView> {
    let view = |(outcome, packets): (Outcome, u64)| OutcomeView {
        outcome: outcome.as_str(),
        verdict: verdict_name(outcome.verdict()),
        packets,
    };
    Outcome::ALL.into_iter().zip(packets).map(view).collect()
}

const fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Route => "route",
        Verdict::Bounce => "bounce",
        Verdict::Drop => "drop",
        Verdict::Hold => "hold",
    }
}

#[cfg(test)]
mod tests;
