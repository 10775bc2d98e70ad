//! `announce list`: the addresses that are announced at layer 2, as the agent knows them.

use anyhow::Context as _;

use super::output::{NOTHING, print_json, print_table, table};
use crate::{
    announce::AnnouncementReport,
    cli::{AnnounceCommand, TableOrJson},
    config::KernelPaths,
    daemon::socket,
};

/// Runs `announce`.
///
/// # Errors
/// No agent runs, or its report cannot be read.
pub fn announce(paths: &KernelPaths, command: &AnnounceCommand) -> anyhow::Result<()> {
    let AnnounceCommand::List { output } = command;
    let report = socket::ask(&paths.bpffs)?;
    let report = report
        .context("no agent runs: addresses are answered until their deadlines, see `lb-agent status`")?;
    match output {
        TableOrJson::Json => print_json(&report.announcements),
        TableOrJson::Table => list(&report.announcements),
    }
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
