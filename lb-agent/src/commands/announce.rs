//! `announce`: the addresses that are announced, as the agent knows them, and the fence of the routes.

use std::time::Duration;

use anyhow::Context as _;

use super::output::{NOTHING, print, print_json, print_table, table};
use crate::{
    announce::{
        AnnouncementReport,
        bgp::{BgpReport, RouteReport, fence},
    },
    cli::{AnnounceCommand, TableOrJson},
    config::KernelPaths,
    daemon::socket,
};

/// Runs `announce`.
///
/// # Errors
/// No agent runs, or its report cannot be read.
pub fn announce(paths: &KernelPaths, command: &AnnounceCommand) -> anyhow::Result<()> {
    match command {
        AnnounceCommand::List { output } => {
            let report = socket::ask(&paths.bpffs)?;
            let report = report.context(
                "no agent runs: addresses are answered until their deadlines, see `lb-agent status`",
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
        AnnounceCommand::BirdConfig => print(&bgp(paths)?.bird_config),
        AnnounceCommand::Fence { announce_table, lifetime } => {
            fence::run(*announce_table, Duration::from_secs(*lifetime))
        }
    }
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
