//! The command `announce`: lists announced addresses, routes and voters, replaces the voters, prints a BIRD
//! configuration, removes the announced routes, and runs the fence that removes them if the agent hangs or dies.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use comfy_table::Table;
use lb_datapath::AnnouncedRoutes;

use super::output::{NOTHING, print, print_json, print_table, table};
use crate::{
    announce::{
        AnnouncedBy, AnnouncementReport,
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
/// No agent runs, its report cannot be read, the agent announces nothing by BGP, standard output cannot be written, the
/// fence fails, or the kernel refuses to remove a route. For `announce voters`: the API server cannot be reached or
/// refuses the change, or the voters need no replacement or cannot be replaced.
pub fn announce(paths: &KernelPaths, command: &AnnounceCommand) -> anyhow::Result<()> {
    match command {
        AnnounceCommand::List { output } => {
            let report = socket::ask(&paths.bpffs)?;
            let report = report.context(
                "no agent runs: the programs answer for addresses until their deadlines; see `lb-agent status`",
            )?;
            let mut all = [report.announcements, report.unannounced].concat();
            all.sort_by_key(|it| (it.address, it.by));
            match output {
                TableOrJson::Json => print_json(&all),
                TableOrJson::Table => print_table(&list(&all)),
            }
        }
        AnnounceCommand::Routes { output } => {
            let BgpReport { routes: all, .. } = bgp(paths)?;
            match output {
                TableOrJson::Json => print_json(&all),
                TableOrJson::Table => routes(&all),
            }
        }
        AnnounceCommand::Voters { replace, without_agent, kubeconfig } => {
            voters(replace.then_some(without_agent.as_slice()), kubeconfig.clone())
        }
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

/// Lists the voters. With `without_agent`, replaces the voters instead: `without_agent` names voters whose Nodes exist,
/// but run no agent any more.
fn voters(without_agent: Option<&[String]>, kubeconfig: Option<PathBuf>) -> anyhow::Result<()> {
    let server = kubeconfig.map_or(ApiServer::InCluster, ApiServer::Kubeconfig);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(WrittenVoters::read(server))?;
    if let Some(without_agent) = without_agent {
        runtime.block_on(found.replace(without_agent))?;
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

/// The table of `announce list`. Without layer 2, the columns that apply only to layer 2 show [`NOTHING`].
fn list(announcements: &[AnnouncementReport]) -> Table {
    let mut table = table(&[
        "ADDRESS",
        "POOL",
        "SERVICES",
        "BY",
        "ADVERTISEMENTS",
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
        let at_layer_2 = it.by == AnnouncedBy::Layer2;
        let conflicts = match &it.conflict_mac {
            Some(mac) => format!("{} (last: {mac})", it.conflicts),
            None => it.conflicts.to_string(),
        };
        table.add_row([
            it.address.to_string(),
            or_nothing(Some(it.pool.clone()).filter(|pool| !pool.is_empty())),
            it.services.join(" "),
            it.by.to_string(),
            or_nothing(Some(it.advertisements.join(" ")).filter(|names| !names.is_empty())),
            or_nothing(it.node.clone()),
            if it.here { "yes" } else { "no" }.to_owned(),
            or_nothing(at_layer_2.then(|| it.interfaces.join(" "))),
            or_nothing(it.since.map(|since| since.strftime("%FT%TZ").to_string())),
            or_nothing(it.expires_in_ms.map(|left| format!("{left} ms"))),
            or_nothing(at_layer_2.then(|| it.answers.to_string())),
            or_nothing(at_layer_2.then_some(conflicts)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn list_says_by_what_each_address_is_announced() {
        let layer_2 = AnnouncementReport {
            address: "203.0.113.1".parse().unwrap(),
            pool: "production".to_owned(),
            services: vec!["default/web".to_owned()],
            by: AnnouncedBy::Layer2,
            advertisements: vec!["m/all".to_owned(), "m/one".to_owned()],
            node: Some("n2".to_owned()),
            here: false,
            interfaces: vec!["eth0".to_owned()],
            since: None,
            expires_in_ms: None,
            answers: 3,
            conflicts: 0,
            conflict_mac: None,
        };
        let bgp = AnnouncementReport {
            by: AnnouncedBy::Bgp,
            advertisements: vec!["m/routes".to_owned()],
            node: Some("n1".to_owned()),
            here: true,
            interfaces: Vec::new(),
            since: Some(Timestamp::UNIX_EPOCH),
            answers: 0,
            ..layer_2.clone()
        };
        let nothing = AnnouncementReport {
            address: "203.0.113.9".parse().unwrap(),
            pool: String::new(),
            by: AnnouncedBy::Nothing,
            advertisements: Vec::new(),
            node: None,
            interfaces: Vec::new(),
            answers: 0,
            ..layer_2.clone()
        };
        let expected = "
ADDRESS      POOL        SERVICES     BY       ADVERTISEMENTS  NODE  HERE  INTERFACES  SINCE                 EXPIRES  ANSWERS  CONFLICTS
203.0.113.1  production  default/web  layer2   m/all m/one     n2    no    eth0        -                     -        3        0
203.0.113.1  production  default/web  bgp      m/routes        n1    yes   -           1970-01-01T00:00:00Z  -        -        -
203.0.113.9  -           default/web  nothing  -               -     no    -           -                     -        -        -
";
        assert_eq!(super::super::output::render(&list(&[layer_2, bgp, nothing])), expected.trim_start());
    }
}
