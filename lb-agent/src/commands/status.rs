//! The command `status`: shows the state of the kernel, read from the pins, and the state of the agent, read from its
//! status socket.

use std::collections::BTreeMap;

use comfy_table::{Cell, Table};
use jiff::Timestamp;
use lb_common::{Outcome, Verdict};
use lb_web::{Problem, Severity};
use serde::Serialize;

use lb_output::age;

use super::output::{Mood, NOTHING, cell, print, print_json, render, table};
use crate::{
    cli::{StatusArgs, TableOrJson},
    config::KernelPaths,
    daemon::{
        shortage::ShortageReport,
        socket,
        state::{DeviceReport, DnsReport, InterceptReport, LoadBalancerReport, NodeReport, Report},
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
    /// Errors of the tools that search for objects of kube-proxy: it may have left more than `kube_proxy` lists.
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

/// The text of `status`: first what is wrong and what to do, then the rest of the state. Without `all`, it leaves out
/// counters that are 0 and empty maps, and shortens long lists of devices.
fn page(status: &Status, now: Timestamp, all: bool) -> String {
    let (notes, wrong): (Vec<Problem>, Vec<Problem>) =
        problems(status, now).into_iter().partition(|problem| problem.severity == Severity::Note);
    let problems = if wrong.is_empty() { line("Problems", "none") } else { lines(&wrong) };
    let programs = if status.programs.is_empty() {
        "No programs on the devices of this network namespace.\n".to_owned()
    } else {
        render(&program_table(&status.programs, all))
    };
    let maps = shortened(&status.maps, all, |map| map.entries > 0, map_table, "maps without entries");
    let has_packets = |outcome: &OutcomeView| outcome.packets > 0;
    let outcomes = shortened(&status.outcomes, all, has_packets, outcome_table, "outcomes with 0 packets");
    [problems, summary(status, &notes, now), programs, maps, outcomes].join("\n")
}

/// A line of `status`: a label and its value.
fn line(label: &str, value: &str) -> String {
    format!("{label:<10} {value}\n")
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|Problem { topic, text, .. }| line(topic, text)).collect()
}

/// The table of the items to show, and how many others there are; `others` names these.
fn shortened<T>(
    items: &[T],
    all: bool,
    is_shown: impl Fn(&T) -> bool,
    table: impl Fn(&[&T]) -> Table,
    others: &str,
) -> String {
    let shown: Vec<&T> = items.iter().filter(|item| all || is_shown(item)).collect();
    let mut text = if shown.is_empty() { String::new() } else { render(&table(&shown)) };
    match (shown.len(), items.len() - shown.len()) {
        (_, 0) => {}
        (0, hidden) => text.push_str(&format!("{hidden} {others}: --all\n")),
        (_, hidden) => text.push_str(&format!("{hidden} more {others}: --all\n")),
    }
    text
}

/// The line of `status` about missing pins and programs, with advice; `None` if nothing is missing.
fn missing_line(
    MissingView { maps, programs, hooks, sockets }: &MissingView,
    running: bool,
) -> Option<String> {
    let listed = |what: &str, names: String| (!names.is_empty()).then(|| format!("{what} {names}"));
    let lists = [
        listed("pins of maps", maps.join(", ")),
        listed("pins of programs", programs.join(", ")),
        listed("programs on", hooks.join(", ")),
        listed("programs on sockets:", sockets.join(", ")),
    ];
    let lists: Vec<String> = lists.into_iter().flatten().collect();
    let advice = if running {
        "the agent restores that within 30 seconds, or its log says why it cannot"
    } else {
        "start the agent, which restores that; a map without a pin begins empty then"
    };
    (!lists.is_empty()).then(|| format!("{}: {advice}", lists.join("; ")))
}

/// Whether some program translates Service addresses in system calls. A program whose cgroup was removed is attached to
/// nothing.
fn serves_sockets(programs: &[SocketProgramView]) -> bool {
    programs.iter().any(|program| program.cgroup != 0)
}

/// The line of `status` about all programs on sockets.
fn socket_line(programs: &[SocketProgramView]) -> String {
    // The programs of a cgroup that was removed have the inode 0.
    let cgroups: Vec<u64> =
        programs.iter().map(|program| program.cgroup).filter(|inode| *inode != 0).collect();
    match *cgroups {
        [] => "not served: processes of the node do not reach Services".to_owned(),
        [cgroup, ..] => {
            format!("served by {} programs on the cgroup with inode {cgroup}", cgroups.len())
        }
    }
}

/// The lines about the agent, the node and the sockets, without what is wrong; `notes` are the problems that only
/// inform.
fn summary(status: &Status, notes: &[Problem], now: Timestamp) -> String {
    let Status { agent, socket_programs, folder, .. } = status;
    let mut text = match (&agent.report, &agent.process) {
        (Some(report), _) => report_lines(report, now),
        (None, Some(process)) => line("Agent", process),
        (None, None) => String::new(),
    };
    if serves_sockets(socket_programs) {
        text.push_str(&line("Sockets", &socket_line(socket_programs)));
    }
    text + &lines(notes) + &line("Pins", folder)
}

/// The lines of what the agent reports, without problems.
fn report_lines(report: &Report, now: Timestamp) -> String {
    let Report { pid, version, node_name, services, endpoints, pending, .. } = report;
    let up = age(report.started, now);
    let mut text =
        line("Agent", &format!("running, pid {pid}, version {version}, node {node_name}, up {up}"));
    if report.healthy {
        text.push_str(&line("Sync", &format!("healthy, last change written {}", last_sync(report, now))));
    }
    text.push_str(&line("Services", &format!("{services} service ports, {endpoints} backends")));
    text.push_str(&node_lines(&report.node));
    if let Some(report) = &report.load_balancers {
        text.push_str(&line("Addresses", &addresses_text(report)));
    }
    if let Some(report) = &report.dns {
        text.push_str(&line("DNS", &dns_text(report)));
    }
    if *pending > 0 || report.pending_since.is_some() {
        let since = report.pending_since.map(|since| format!(", since {}", age(since, now)));
        text.push_str(&line("Pending", &format!("{pending} steps{}", since.unwrap_or_default())));
    }
    text
}

/// How long ago the agent last wrote a change.
fn last_sync(report: &Report, now: Timestamp) -> String {
    report.last_sync.map_or_else(|| "never".to_owned(), |last| format!("{} ago", age(last, now)))
}

fn shortage_text(ShortageReport { of, since, refused, text }: &ShortageReport, now: Timestamp) -> String {
    let count = if *refused > 0 { format!(", {refused} times") } else { String::new() };
    format!("{of}, for {}{count}: {text}", age(*since, now))
}

/// Which agent assigns addresses to load balancers, with the use of the pools.
fn addresses_text(report: &LoadBalancerReport) -> String {
    let pools: Vec<String> = report
        .pools
        .iter()
        .map(|pool| format!("pool {}: {} of {} in use", pool.name, pool.used, pool.total))
        .collect();
    match (&report.leader, report.is_here) {
        (_, true) if pools.is_empty() => "given by this agent; there is no pool".to_owned(),
        (_, true) => format!("given by this agent; {}", pools.join(", ")),
        (Some(leader), false) => format!("given by the agent of node {leader}"),
        (None, false) => "given by no agent yet: the agents are electing one".to_owned(),
    }
}

/// Text about the DNS server: its domain, its addresses, the upstream servers, and errors.
fn dns_text(report: &DnsReport) -> String {
    let DnsReport { addresses, unserved, domain, upstreams, loops, intercept } = report;
    let served: Vec<_> = addresses.iter().filter(|address| !unserved.contains_key(address)).collect();
    let (served, upstreams) = (some_of(&served), some_of(upstreams));
    let errors: String = unserved.values().map(|error| format!("; {error}")).collect();
    let loops = match &**loops {
        [] => String::new(),
        loops => format!("; not asked, because they lead back here: {}", some_of(loops)),
    };
    let intercept = intercept.as_ref().map(intercept_text).unwrap_or_default();
    format!("{domain} at {served}, other names from {upstreams}{loops}{errors}{intercept}")
}

/// Text about what answers the queries that pods of this node send to the DNS Service: the agent or the endpoints.
fn intercept_text(report: &InterceptReport) -> String {
    let InterceptReport { service, servers, problem, .. } = report;
    match (&**servers, problem) {
        ([], None) => format!("; pods that ask {service} are answered by its endpoints"),
        ([], Some(problem)) => format!("; pods that ask {service} are answered by its endpoints: {problem}"),
        (servers, _) => format!("; pods that ask {service} are answered at {}", some_of(servers)),
    }
}

fn node_lines(node: &NodeReport) -> String {
    let internal = match (node.internal_networks.is_empty(), node.internal_devices.is_empty()) {
        (false, _) => some_of(&node.internal_networks),
        (true, false) => format!("devices {}", some_of(&node.internal_devices)),
        (true, true) => "none".to_owned(),
    };
    let NodeReport { addresses, nodeport_addresses, primary, detect_local, .. } = node;
    let (mode, tunnel) = (&node.north_south_mode, &node.dsr_encapsulation);
    let (first, last) = (node.masquerade_first_port, node.masquerade_last_port);
    let peers = some_of(&node.dsr_peers);
    let mut lines = vec![
        line("Node", &some_of(addresses)),
        line("NodePorts", &some_of(nodeport_addresses)),
        line("Internal", &format!("{internal} (detect-local-mode {detect_local})")),
        line("Masquerade", &format!("from {}, ports {first}-{last}", some_of(primary))),
        line("External", &format!("{mode} (north-south-mode), tunnels {tunnel}, from peers {peers}")),
    ];
    let denied = &node.denied_sources;
    if !denied.is_empty() {
        lines.push(line("Denied", &format!("external clients from {}", some_of(denied))));
    }
    lines.concat()
}

/// The first items of a list as text, and how many more there are.
fn some_of<T: ToString>(list: &[T]) -> String {
    const FEW: usize = 6;
    let texts: Vec<String> = list.iter().take(FEW).map(ToString::to_string).collect();
    match (texts.is_empty(), list.len().saturating_sub(FEW)) {
        (true, _) => "none".to_owned(),
        (false, 0) => texts.join(", "),
        (false, more) => format!("{} and {more} more", texts.join(", ")),
    }
}

/// One row for each program and kind of attachment; without `all`, long lists of devices end early.
fn program_table(programs: &[ProgramView], all: bool) -> Table {
    let mut rows: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    for ProgramView { device, kind, direction, layer, program, program_id } in programs {
        let kind = kind.as_deref().unwrap_or(NOTHING);
        rows.entry((kind, direction, layer, program, program_id)).or_default().push(device);
    }
    let mut table = table(&["KIND", "DIRECTION", "LAYER", "PROGRAM", "ID", "DEVICES"]);
    for ((kind, direction, layer, program, program_id), devices) in rows {
        let devices = if all { devices.join(", ") } else { some_of(&devices) };
        table.add_row([kind, direction, layer, program, &program_id.to_string(), &devices]);
    }
    table
}

fn map_table(maps: &[&MapView]) -> Table {
    let mut table = table(&["MAP", "ENTRIES", "CAPACITY", "FILL"]);
    for MapView { name, entries, capacity } in maps {
        let percent = *entries as u64 * 100 / u64::from(*capacity).max(1);
        let mood = match percent {
            0..75 => Mood::Good,
            75..95 => Mood::Odd,
            _ => Mood::Bad,
        };
        table.add_row(vec![
            Cell::new(name),
            Cell::new(entries),
            Cell::new(capacity),
            cell(format!("{percent}%"), mood),
        ]);
    }
    table
}

fn outcome_table(outcomes: &[&OutcomeView]) -> Table {
    let mut table = table(&["OUTCOME", "VERDICT", "PACKETS"]);
    for OutcomeView { outcome, verdict, packets } in outcomes {
        let mood = if *verdict == "drop" && *packets > 0 { Mood::Odd } else { Mood::Good };
        table.add_row(vec![Cell::new(outcome), Cell::new(verdict), cell(packets, mood)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::state::PoolReport;

    #[test]
    fn line_names_who_gives_addresses() {
        let pools = vec![PoolReport { name: "a".into(), used: 3, total: 16 }];
        let mut report = LoadBalancerReport { leader: Some("b".into()), is_here: false, pools };
        assert_eq!(addresses_text(&report), "given by the agent of node b");
        report.is_here = true;
        assert_eq!(addresses_text(&report), "given by this agent; pool a: 3 of 16 in use");
    }

    const NOW: &str = "2026-11-21T03:00:00Z";

    fn report() -> Report {
        Report {
            announcements: Vec::new(),
            bgp: None,
            pid: 17,
            version: "0.1.0".into(),
            node_name: "a".into(),
            started: "2026-11-20T01:00:00Z".parse().unwrap(),
            synchronised: true,
            healthy: true,
            alive: true,
            healthz: None,
            node_eligible: true,
            last_sync: Some("2026-11-21T02:59:57Z".parse().unwrap()),
            services: 2,
            endpoints: 3,
            pending: 0,
            pending_since: None,
            failures: Vec::new(),
            problems: vec!["a.yaml, document 2 (line 9): bad".into(), "b: no effect".into()],
            advice: vec!["b: no effect".into()],
            devices: vec![DeviceReport { index: 4, name: "eth0".into(), kind: "wire".into(), xdp: None }],
            node: node_report(),
            shortages: vec![ShortageReport {
                of: "CONNTRACK".into(),
                since: "2026-11-21T02:58:58Z".parse().unwrap(),
                refused: 7,
                text: "full: raise it".into(),
            }],
            load_balancers: None,
            dns: None,
            health_checks: Vec::new(),
        }
    }

    fn node_report() -> NodeReport {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        NodeReport {
            addresses: ips(&["10.244.0.1", "192.0.2.1", "2001:db8::1"]),
            nodeport_addresses: ips(&["127.0.0.1", "192.0.2.1"]),
            primary: ips(&["192.0.2.1", "2001:db8::1"]),
            detect_local: "ClusterCIDR".into(),
            internal_networks: vec!["10.244.0.0/16".into()],
            internal_devices: Vec::new(),
            service_ranges: vec!["10.96.0.0/12".into()],
            drops_unknown_vips: true,
            north_south_mode: "hybrid".into(),
            dsr_encapsulation: "gue".into(),
            dsr_peers: vec!["192.0.2.0/24".into()],
            denied_sources: vec!["203.0.113.0/24".into(), "2001:db8:bad::/48".into()],
            masquerade_first_port: 10_000,
            masquerade_last_port: 29_999,
        }
    }

    fn status(agent: Agent) -> Status {
        let program = ProgramView {
            device: "eth0".into(),
            kind: Some("wire".into()),
            direction: "ingress",
            layer: "tcx",
            program: "tc_ingress".into(),
            program_id: 70,
        };
        let mut packets = [0; Outcome::COUNT];
        packets[Outcome::Forward as usize] = 12;
        let mut outcomes = outcomes(packets);
        outcomes.retain(|outcome| ["forward", "no_backend"].contains(&outcome.outcome));
        Status {
            agent,
            missing: MissingView { maps: vec![], programs: vec![], hooks: vec![], sockets: vec![] },
            kube_proxy: Vec::new(),
            kube_proxy_errors: vec!["cannot tell: `nft` fails".into()],
            degraded: vec![DegradedView { name: "tcx", detail: "filters instead".into() }],
            folder: "/sys/fs/bpf/lb/v1".into(),
            programs: vec![program],
            socket_programs: vec![SocketProgramView {
                program: "sock_connect4",
                program_id: 71,
                cgroup: 1234,
            }],
            maps: vec![MapView { name: "SERVICES", entries: 3, capacity: 4 }],
            outcomes,
        }
    }

    fn page_of(status: &Status) -> String {
        page(status, NOW.parse().unwrap(), false)
    }

    #[test]
    fn page_shows_problems_agent_node_programs_maps_and_outcomes() {
        let agent = Agent { running: true, process: None, silent: None, report: Some(report()) };
        let expected = "\
Shortage   CONNTRACK, for 1m02s, 7 times: full: raise it
Problem    a.yaml, document 2 (line 9): bad
Leftovers  cannot tell: `nft` fails

Agent      running, pid 17, version 0.1.0, node a, up 1d02h
Sync       healthy, last change written 3s ago
Services   2 service ports, 3 backends
Node       10.244.0.1, 192.0.2.1, 2001:db8::1
NodePorts  127.0.0.1, 192.0.2.1
Internal   10.244.0.0/16 (detect-local-mode ClusterCIDR)
Masquerade from 192.0.2.1, 2001:db8::1, ports 10000-29999
External   hybrid (north-south-mode), tunnels gue, from peers 192.0.2.0/24
Denied     external clients from 203.0.113.0/24, 2001:db8:bad::/48
Sockets    served by 1 programs on the cgroup with inode 1234
Advice     b: no effect
Degraded   tcx: filters instead
Pins       /sys/fs/bpf/lb/v1

KIND  DIRECTION  LAYER  PROGRAM     ID  DEVICES
wire  ingress    tcx    tc_ingress  70  eth0

MAP       ENTRIES  CAPACITY  FILL
SERVICES  3        4         75%

OUTCOME  VERDICT  PACKETS
forward  pass     12
1 more outcomes with 0 packets: --all
";
        assert_eq!(page_of(&status(agent)), expected);
    }

    #[test]
    fn page_without_problems_says_so_first() {
        let report = Report { problems: Vec::new(), shortages: Vec::new(), ..report() };
        let agent = Agent { running: true, process: None, silent: None, report: Some(report) };
        let text = page_of(&Status { kube_proxy_errors: Vec::new(), ..status(agent) });
        assert!(text.starts_with("Problems   none\n\nAgent      running, pid 17"), "{text}");
        assert!(text.contains("\nDegraded   tcx: filters instead\n"), "a note is no problem: {text}");
    }

    #[test]
    fn page_never_repeats_a_problem() {
        let ill = Report { healthy: false, failures: vec!["refused".into()], ..report() };
        let agents = [
            Agent { running: true, process: None, silent: None, report: Some(ill) },
            Agent {
                running: true,
                process: Some("pid 17".into()),
                silent: Some("mute".into()),
                report: None,
            },
            Agent { running: false, process: None, silent: None, report: None },
        ];
        for status in agents.map(status) {
            let text = page_of(&status);
            for Problem { topic, text: problem, .. } in problems(&status, NOW.parse().unwrap()) {
                assert_eq!(text.matches(&problem).count(), 1, "{problem} in {text}");
                let lines = text.lines().filter(|line| line.split_whitespace().next() == Some(topic));
                let is_process = |line: &&str| *line == "Agent      pid 17";
                assert_eq!(lines.filter(|line| !is_process(line)).count(), 1, "{topic} in {text}");
            }
        }
    }

    #[test]
    fn zero_counters_and_empty_maps_are_shown_only_with_all() {
        let agent = Agent { running: false, process: None, silent: None, report: None };
        let mut status = status(agent);
        status.outcomes = outcomes([0; Outcome::COUNT]);
        status.maps.push(MapView { name: "LIMITS", entries: 0, capacity: 4 });
        let text = page_of(&status);
        let hidden = format!("\n\n{} outcomes with 0 packets: --all\n", Outcome::COUNT);
        assert!(text.ends_with(&hidden), "{text}");
        assert!(text.contains("75%\n1 more maps without entries: --all\n"), "{text}");
        let text = page(&status, NOW.parse().unwrap(), true);
        assert!(!text.contains("--all") && text.contains("\nLIMITS "), "{text}");
        assert_eq!(text.lines().filter(|line| line.ends_with(" 0")).count(), Outcome::COUNT, "{text}");
    }

    #[test]
    fn devices_with_the_same_program_share_a_line() {
        let program = |device: &str, direction| ProgramView {
            device: device.to_owned(),
            kind: Some("workload".into()),
            direction,
            layer: "tcx",
            program: "tc".into(),
            program_id: 7,
        };
        let names: Vec<String> = (0..9).map(|number| format!("veth{number}")).collect();
        let mut programs: Vec<ProgramView> = names.iter().map(|name| program(name, "ingress")).collect();
        programs.push(program("veth0", "egress"));
        let expected = "\
KIND      DIRECTION  LAYER  PROGRAM  ID  DEVICES
workload  egress     tcx    tc       7   veth0
workload  ingress    tcx    tc       7   veth0, veth1, veth2, veth3, veth4, veth5 and 3 more
";
        assert_eq!(render(&program_table(&programs, false)), expected);
        assert!(render(&program_table(&programs, true)).contains(&names.join(", ")));
    }

    #[test]
    fn problems_are_sorted_and_say_what_to_do() {
        let status = |report: Option<Report>| {
            status(Agent { running: report.is_some(), process: None, silent: None, report })
        };
        let topics = |status: &Status| -> Vec<&'static str> {
            problems(status, NOW.parse().unwrap()).iter().map(|problem| problem.topic).collect()
        };
        let with_agent = status(Some(report()));
        assert_eq!(topics(&with_agent), ["Shortage", "Problem", "Leftovers", "Advice", "Degraded"]);
        let shortage = &problems(&with_agent, NOW.parse().unwrap())[0];
        assert_eq!(shortage.text, "CONNTRACK, for 1m02s, 7 times: full: raise it");
        assert_eq!(topics(&status(None)), ["Agent", "Leftovers", "Degraded"]);
        let mut lost = status(None);
        lost.missing.maps = vec!["EVENTS"];
        lost.socket_programs.clear();
        assert_eq!(topics(&lost), ["Missing", "Agent", "Leftovers", "Sockets", "Degraded"]);
        let ill = Report { healthy: false, failures: vec!["no".into()], ..report() };
        assert_eq!(topics(&status(Some(ill)))[..3], ["Sync", "Failure", "Shortage"]);
    }

    #[test]
    fn page_shows_why_a_healthy_agent_answers_503() {
        let going = Report { node_eligible: false, ..report() };
        let agent = Agent { running: true, process: None, silent: None, report: Some(going) };
        let text = page_of(&status(agent));
        assert!(text.contains("\nSync       healthy, "), "{text}");
        assert!(text.contains("\nHealthz    the node is being deleted, "), "{text}");
        assert!(text.contains("/healthz answers 503\n"), "{text}");
    }

    #[test]
    fn node_lines_show_addresses_and_settings() {
        let none = NodeReport { detect_local: "none".into(), internal_networks: Vec::new(), ..node_report() };
        assert!(node_lines(&none).contains("\nInternal   none (detect-local-mode none)\n"));
        let devices = NodeReport { internal_devices: vec!["cni0".into(), "veth1".into()], ..none };
        let line = "\nInternal   devices cni0, veth1 (detect-local-mode none)\n";
        assert!(node_lines(&devices).contains(line), "{}", node_lines(&devices));
        let admitting = NodeReport { denied_sources: Vec::new(), ..node_report() };
        assert!(!node_lines(&admitting).contains("Denied"));
        assert_eq!(some_of(&[1, 2, 3, 4, 5, 6, 7, 8]), "1, 2, 3, 4, 5, 6 and 2 more");
        assert_eq!(some_of::<u8>(&[]), "none");
    }

    #[test]
    fn page_without_an_agent_shows_the_kernel() {
        let agent = Agent { running: false, process: None, silent: None, report: None };
        let text = page_of(&status(agent));
        let first =
            "Agent      not running: the data plane works without it, but follows no changes. Start it\n";
        assert!(text.starts_with(first), "{text}");
        assert!(text.contains("\n\nSockets    served by 1 "), "{text}");
        assert!(text.contains("SERVICES  3 "), "{text}");
    }

    #[test]
    fn page_begins_with_what_is_missing_and_what_to_do() {
        for (running, advice) in [(true, "the agent restores that within 30 s"), (false, "start the agent")] {
            let agent = Agent { running, process: None, silent: None, report: None };
            let missing = MissingView {
                maps: vec!["EVENTS"],
                programs: vec!["tc_egress".into()],
                hooks: vec!["eth0 ingress".into(), "eth0 egress".into()],
                sockets: vec!["sock_connect4"],
            };
            let text = page_of(&Status { missing, ..status(agent) });
            let expected = format!(
                "Missing    pins of maps EVENTS; pins of programs tc_egress; programs on eth0 ingress, eth0 egress; programs on \
                 sockets: sock_connect4: {advice}"
            );
            assert!(text.starts_with(&expected), "{text}");
        }
    }

    #[test]
    fn programs_of_a_removed_cgroup_serve_no_sockets() {
        let program = |cgroup| SocketProgramView { program: "connect4", program_id: 1, cgroup };
        assert!(socket_line(&[program(0)]).starts_with("not served"));
        assert_eq!(
            socket_line(&[program(0), program(1234), program(1234)]),
            "served by 2 programs on the cgroup with inode 1234"
        );
    }

    #[test]
    fn json_has_agent_programs_and_outcomes() {
        let agent = Agent {
            running: true,
            process: Some("pid 17 lb-agent".into()),
            silent: None,
            report: Some(report()),
        };
        let json = serde_json::to_value(status(agent)).unwrap();
        assert_eq!(json["agent"]["running"], true);
        assert_eq!(json["agent"]["lastSync"], "2026-11-21T02:59:57Z");
        assert_eq!(json["agent"]["node"]["primary"], serde_json::json!(["192.0.2.1", "2001:db8::1"]));
        assert_eq!(json["agent"]["node"]["internalNetworks"], serde_json::json!(["10.244.0.0/16"]));
        assert_eq!(json["agent"]["node"]["deniedSources"][0], "203.0.113.0/24");
        assert_eq!(json["programs"][0]["layer"], "tcx");
        assert_eq!(
            json["outcomes"][0],
            serde_json::json!({"outcome": "forward", "verdict": "pass", "packets": 12})
        );
    }
}
