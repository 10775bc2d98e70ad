//! `announce`: the agent's report of announced addresses and routes, its configuration of BIRD, and the fence of the
//! routes.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use lb_datapath::AnnouncedRoutes;

use super::output::{NOTHING, print, print_json, print_table, table};
use crate::{
    announce::{
        AnnouncementReport,
        bgp::{BgpReport, RouteReport, fence},
    },
    cli::{AnnounceCommand, TableOrJson},
    config::KernelPaths,
    daemon::socket,
    kubernetes::{ApiServer, announce::WrittenVoters},
};

/// Runs `announce`.
///
/// # Errors
/// No agent runs, its report cannot be read or has no routes, standard output cannot be written, the fence fails, or
/// the kernel refuses to remove a route. For the voters: the API server cannot be asked, or refuses or does not need
/// the change.
pub fn announce(paths: &KernelPaths, command: &AnnounceCommand) -> anyhow::Result<()> {
    match command {
        AnnounceCommand::List { output } => {
            let report = socket::ask(&paths.bpffs)?;
            let report = report.context(
                "no agent runs: the programs answer for addresses until their deadlines; see `lb-agent status`",
            )?;
            match output {
                TableOrJson::Json => print_json(&report.announcements),
                TableOrJson::Table => list(&report.announcements),
            }
        }
        AnnounceCommand::Routes { output } => {
            let BgpReport { routes: all, .. } = bgp(paths)?;
            match output {
                TableOrJson::Json => print_json(&all),
                TableOrJson::Table => routes(&all),
            }
        }
        AnnounceCommand::Voters { replace, kubeconfig } => voters(*replace, kubeconfig.clone()),
        AnnounceCommand::BirdConfig => print(&bgp(paths)?.bird_config),
        AnnounceCommand::Fence { announce_table, lifetime } => {
            fence::run(*announce_table, Duration::from_secs(*lifetime))
        }
        AnnounceCommand::Withdraw { announce_table } => {
            let removed = AnnouncedRoutes::new(*announce_table).release()?;
            print(&format!("removed {removed} routes from table {announce_table}\n"))
        }
    }
}

fn voters(replace: bool, kubeconfig: Option<PathBuf>) -> anyhow::Result<()> {
    let server = kubeconfig.map_or(ApiServer::InCluster, ApiServer::Kubeconfig);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(WrittenVoters::read(server))?;
    if replace {
        runtime.block_on(found.replace())?;
        return print("The agents of the Nodes that exist choose new voters now.\n");
    }
    let mut table = table(&["VOTER", "NODE"]);
    for name in &found.voters.names {
        table.add_row([&**name, if found.nodes.contains(&**name) { "exists" } else { "is gone" }]);
    }
    print_table(&table)
}

fn bgp(paths: &KernelPaths) -> anyhow::Result<BgpReport> {
    let report = socket::ask(&paths.bpffs)?;
    let report = report.context("no agent runs: `ip route show proto 109 table NUMBER` shows the routes")?;
    report.bgp.context("the agent announces nothing by BGP: start it with --announce-table")
}

fn routes(routes: &[RouteReport]) -> anyhow::Result<()> {
    let mut table = table(&["ROUTE", "SERVICES", "ADVERTISEMENTS"]);
    for RouteReport { route, services, advertisements } in routes {
        table.add_row([route.clone(), services.join(" "), advertisements.join(" ")]);
    }
    print_table(&table)
}

fn list(announcements: &[AnnouncementReport]) -> anyhow::Result<()> {
    let mut table = table(&[
        "ADDRESS",
        "POOL",
        "SERVICES",
        "NODE",
        "HERE",
        "INTERFACES",
        "SINCE",
        "EXPIRES",
        "ANSWERS",
        "CONFLICTS",
    ]);
    let or_nothing = |text: Option<String>| text.unwrap_or_else(|| NOTHING.to_owned());
    for it in announcements {
        let conflicts = match &it.conflict_mac {
            Some(mac) => format!("{} (last: {mac})", it.conflicts),
            None => it.conflicts.to_string(),
        };
        table.add_row([
            it.address.to_string(),
            it.pool.clone(),
            it.services.join(" "),
            or_nothing(it.node.clone()),
            if it.here { "yes" } else { "no" }.to_owned(),
            it.interfaces.join(" "),
            or_nothing(it.since.map(|since| since.strftime("%FT%TZ").to_string())),
            or_nothing(it.expires_in_ms.map(|left| format!("{left} ms"))),
            it.answers.to_string(),
            conflicts,
        ]);
    }
    print_table(&table)
}
