//! The commands other than `run`. Most of them read the pinned maps and work without a running agent.

mod announce;
mod bugreport;
mod check;
mod conntrack;
mod environment;
mod event_view;
mod explain;
mod flows;
mod monitor;
mod output;
mod profile;
mod ready;
mod report_of_agent;
mod service;
mod service_view;
mod status;
mod top;
mod web;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, bail};
use clap::CommandFactory as _;

use crate::{
    cli::{Cli, ConntrackCommand, FlowFilter, MonitorArgs, ServiceCommand, TableOrJson, TopArgs},
    config::KernelPaths,
    daemon::socket,
    leftovers::{self, Findings},
};
use lb_datapath::{Conntrack, Pinned, Removed};

use self::report_of_agent::report_of_agent;
pub use self::{
    announce::announce,
    bugreport::bugreport,
    check::check,
    environment::exec,
    explain::explain,
    flows::flows,
    profile::profile,
    ready::ready,
    status::status,
    web::{pages as web_pages, web},
};

/// Runs `lb-agent service`: lists service ports, shows those of one Service, or prints environment variables.
///
/// # Errors
/// There is no data plane, it cannot be read, or it has no such Service; for environment variables, no agent answers,
/// or the agent has not read all Services yet.
pub fn service(paths: &KernelPaths, command: ServiceCommand) -> anyhow::Result<()> {
    match command {
        ServiceCommand::List { output, namespace } => {
            let (_, services) = services(paths)?;
            service::list(services, namespace.as_deref(), output)
        }
        ServiceCommand::Show { name, output } => {
            let (pinned, mut services) = services(paths)?;
            let conntrack = pinned.conntrack();
            service_view::count_flows(&mut services, &conntrack.list()?, &conntrack.sockets()?);
            // The announcing node and the results of health checks are not in the maps: the agent reports them.
            if let Some(report) =
                report_of_agent(&paths.bpffs, "announcing nodes and results of health checks")
            {
                service_view::name_announcers(&mut services, &report.announcements);
                service_view::add_health(&mut services, &report.health_checks);
            }
            service::show(services, &name, output)
        }
        ServiceCommand::Env(args) => environment::print(paths, &args),
    }
}

/// Opens the data plane, and reads the Services that it holds.
fn services(paths: &KernelPaths) -> anyhow::Result<(Pinned, Vec<service_view::ServiceView>)> {
    let pinned = Pinned::open(&paths.bpffs)?;
    let services = service_view::services(&pinned.maps().contents()?);
    Ok((pinned, services))
}

/// Runs `conntrack`.
///
/// # Errors
/// There is no data plane, or it cannot be read or written.
pub fn conntrack(paths: &KernelPaths, command: ConntrackCommand) -> anyhow::Result<()> {
    let pinned = Pinned::open(&paths.bpffs)?;
    match command {
        ConntrackCommand::List { output, filter } => list_flows(&pinned, output, &filter),
        ConntrackCommand::Flush { output } => conntrack::flushed(pinned.conntrack().flush()?, output),
    }
}

fn list_flows(pinned: &Pinned, output: TableOrJson, filter: &FlowFilter) -> anyhow::Result<()> {
    let labels = pinned.maps().contents()?.service_labels;
    let services: BTreeMap<_, _> =
        labels.into_iter().map(|(id, labels)| (id, labels.name.service.to_string())).collect();
    let connections = pinned.conntrack().list()?;
    conntrack::list(&conntrack::flows(&connections, &services, filter, Conntrack::now()), output)
}

/// Runs `monitor`.
///
/// # Errors
/// There is no data plane, it cannot be read, another monitor runs, or standard output cannot be written.
pub fn monitor(paths: &KernelPaths, args: MonitorArgs) -> anyhow::Result<()> {
    monitor::run(&Pinned::open(&paths.bpffs)?, args)
}

/// Runs `top`.
///
/// # Errors
/// There is no data plane, it cannot be read, or the terminal cannot be used.
pub fn top(paths: &KernelPaths, args: &TopArgs) -> anyhow::Result<()> {
    top::run(&Pinned::open(&paths.bpffs)?, args)
}

/// Runs `cleanup`.
///
/// # Errors
/// An agent runs, or an object cannot be removed.
pub fn cleanup(bpffs: &Path) -> anyhow::Result<()> {
    // The names of these files contain the inode of the directory of pins, so they must go before the pins. A running
    // agent needs them.
    if !Pinned::open(bpffs).is_ok_and(|pinned| pinned.agent().is_some()) {
        socket::remove_all(bpffs);
    }
    let Removed { attachments, programs, maps, ports, unmounted } = lb_datapath::cleanup(bpffs)?;
    let bpffs = bpffs.display();
    let text = match (attachments + programs + maps + ports, unmounted) {
        (0, false) => format!("Nothing to remove on {bpffs}.\n"),
        (_, unmounted) => format!(
            "Removed {attachments} programs from interfaces and sockets, {programs} pinned programs and {maps} pinned maps{}{}.\n",
            if ports > 0 { format!("; released {ports} reserved ports") } else { String::new() },
            if unmounted { format!("; unmounted {bpffs}") } else { String::new() }
        ),
    };
    output::print(&text)
}

/// Runs `cleanup --kube-proxy`.
///
/// # Errors
/// A leftover cannot be removed, or a tool cannot list leftovers.
pub fn cleanup_kube_proxy(dry_run: bool) -> anyhow::Result<()> {
    let Findings { leftovers, errors } = leftovers::find();
    for leftover in &leftovers {
        if dry_run {
            output::print(&format!("Would remove {leftover}.\n"))?;
        } else {
            leftover.remove()?;
            output::print(&format!("Removed {leftover}.\n"))?;
        }
    }
    if !errors.is_empty() {
        bail!("{}", errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
    }
    if leftovers.is_empty() {
        output::print("kube-proxy has left nothing that iptables-save, nft or ip list.\n")?;
    }
    Ok(())
}

/// Runs `completions`.
///
/// # Errors
/// Standard output cannot be written.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "lb-agent", &mut script);
    output::print(&String::from_utf8(script)?)
}

/// Runs `man-pages`.
///
/// # Errors
/// The folder cannot be written.
pub fn man_pages(folder: &Path) -> anyhow::Result<()> {
    clap_mangen::generate_to(Cli::command(), folder)
        .with_context(|| format!("cannot write man pages to {}", folder.display()))
}
