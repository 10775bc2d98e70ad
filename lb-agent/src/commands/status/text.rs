//! The text that `status` prints.

use std::collections::BTreeMap;

use comfy_table::{Cell, Table};
use jiff::Timestamp;
use lb_core::listing::first_few;
use lb_output::age;
use lb_web::{Problem, Severity};

use super::{MapView, MissingView, OutcomeView, ProgramView, SocketProgramView, Status, problems};
use crate::{
    commands::output::{Mood, NOTHING, cell, render, table},
    daemon::{
        report::{DnsReport, InterceptReport, LoadBalancerReport, NodeReport, Report},
        shortage::ShortageReport,
    },
};

/// The text of `status`: first what is wrong and what to do, then the rest of the state. Without `all`, it leaves out
/// counters that are 0 and empty maps, and shortens long lists of devices.
pub(super) fn page(status: &Status, now: Timestamp, all: bool) -> String {
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

/// The table of the items to show, and a line with the number of hidden items. `others` is the noun for the hidden
/// items in that line.
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
pub(super) fn missing_line(
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
pub(super) fn serves_sockets(programs: &[SocketProgramView]) -> bool {
    programs.iter().any(|program| program.cgroup != 0)
}

/// The line of `status` about all programs on sockets.
pub(super) fn socket_line(programs: &[SocketProgramView]) -> String {
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
pub(super) fn last_sync(report: &Report, now: Timestamp) -> String {
    report.last_sync.map_or_else(|| "never".to_owned(), |last| format!("{} ago", age(last, now)))
}

pub(super) fn shortage_text(
    ShortageReport { of, since, refused, text }: &ShortageReport,
    now: Timestamp,
) -> String {
    let count = if *refused > 0 { format!(", {refused} times") } else { String::new() };
    format!("{of}, for {}{count}: {text}", age(*since, now))
}

/// Which agent assigns addresses to Services of type LoadBalancer, and how many addresses of each pool are in use.
pub(super) fn addresses_text(report: &LoadBalancerReport) -> String {
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

pub(super) fn node_lines(node: &NodeReport) -> String {
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
pub(super) fn some_of<T: ToString>(list: &[T]) -> String {
    const FEW: usize = 6;
    if list.is_empty() { "none".to_owned() } else { first_few(list.iter().map(ToString::to_string), FEW) }
}

/// One row for each program and kind of attachment; without `all`, long lists of devices end early.
pub(super) fn program_table(programs: &[ProgramView], all: bool) -> Table {
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
