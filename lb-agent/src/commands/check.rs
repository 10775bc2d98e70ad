//! `check`: tests whether this machine can run the data plane.

use std::path::Path;

use anyhow::bail;
use comfy_table::Table;
use serde::Serialize;
use tracing::warn;

use super::output::{Mood, cell, print_json, print_table, table};
use crate::{cli::TableOrJson, config::KernelPaths, host_rules, leftovers};
use lb_datapath::{Probe, ProbeResult};

/// Name of the probe that lists devices.
const DEVICES: &str = "devices";
/// Advice about the devices that the probe has found.
const SELECT_DEVICES: &str = "the default selection; --wire-device of `run` replaces it";

#[derive(Debug, Serialize)]
struct ProbeView<'a> {
    name: &'a str,
    result: &'a str,
    detail: &'a str,
    advice: &'a str,
}

/// The results of all probes, as the JSON that `check -o json` prints.
pub(super) fn value(bpffs: &Path) -> serde_json::Result<serde_json::Value> {
    let probes = probes(bpffs);
    serde_json::to_value(probes.iter().map(view).collect::<Vec<_>>())
}

/// Runs `check`.
///
/// # Errors
/// The machine lacks something that the data plane requires, or standard output cannot be written.
pub fn check(paths: &KernelPaths, output: TableOrJson) -> anyhow::Result<()> {
    let probes = probes(&paths.bpffs);
    match output {
        TableOrJson::Table => print_table(&probe_table(&probes))?,
        TableOrJson::Json => print_json(&probes.iter().map(view).collect::<Vec<_>>())?,
    }
    for line in leftovers::find().report().into_iter().chain(host_rules::find()) {
        warn!("{line}");
    }
    let missing: Vec<_> =
        probes.iter().filter(|probe| probe.result == ProbeResult::Missing).map(|probe| probe.name).collect();
    if !missing.is_empty() {
        bail!(
            "this machine cannot run the data plane: {} missing; see the column ADVICE",
            missing.join(", ")
        );
    }
    Ok(())
}

/// Runs all probes, of the kernel and of the host's rules, and returns their results.
fn probes(bpffs: &Path) -> Vec<Probe> {
    let mut probes: Vec<_> = lb_datapath::check(bpffs).into_iter().map(with_flag).collect();
    probes.push(host_rules::probe());
    probes
}

/// If the probe lists devices and has no advice, adds advice: the flag that selects other devices.
fn with_flag(probe: Probe) -> Probe {
    match probe {
        Probe { name: DEVICES, advice: "", .. } => Probe { advice: SELECT_DEVICES, ..probe },
        _ => probe,
    }
}

fn view(probe: &Probe) -> ProbeView<'_> {
    ProbeView { name: probe.name, result: probe.result.as_str(), detail: &probe.detail, advice: probe.advice }
}

fn probe_table(probes: &[Probe]) -> Table {
    let mut table = table(&["PROBE", "RESULT", "FOUND", "ADVICE"]);
    for probe in probes {
        let mood = match probe.result {
            ProbeResult::Ok => Mood::Good,
            ProbeResult::Degraded => Mood::Odd,
            ProbeResult::Missing => Mood::Bad,
        };
        // Shows only the first line: the detail may be a verifier log.
        let detail = probe.detail.lines().next().unwrap_or_default().to_owned();
        let advice = super::service::or_nothing(probe.advice).to_owned();
        table.add_row(vec![
            probe.name.into(),
            cell(probe.result.as_str(), mood),
            detail.into(),
            advice.into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::commands::output::render;

    #[test]
    fn probe_table_shows_first_line_and_advice() {
        let probe =
            |name, result, detail: &str, advice| Probe { name, result, detail: detail.into(), advice };
        let probes = [
            probe("tcx", ProbeResult::Ok, "there", ""),
            probe("BPF programs", ProbeResult::Missing, "refused\nlong log", "do this"),
        ];
        let expected = "\
PROBE         RESULT   FOUND    ADVICE
tcx           ok       there    -
BPF programs  missing  refused  do this
";
        assert_eq!(render(&probe_table(&probes)), expected);
    }

    #[test]
    fn devices_are_shown_with_the_flag_that_selects_others() {
        let probes = probes(Path::new("/nowhere"));
        let devices = probes.iter().find(|probe| probe.name == DEVICES).unwrap();
        assert_ne!(devices.advice, "", "the default is replaced");
        for (given, shown) in [("", SELECT_DEVICES), ("run it as root", "run it as root")] {
            let probe =
                Probe { name: DEVICES, result: ProbeResult::Ok, detail: "wires eth0".into(), advice: given };
            assert_eq!(with_flag(probe).advice, shown);
        }
    }

    /// Compares only the first column of docs/kernels.md, the probes' names. `cargo xtask vm` compares the results, or
    /// writes them if called with `--write-docs`.
    #[test]
    fn kernels_page_has_a_row_for_each_probe() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels.md");
        let page = fs::read_to_string(page).unwrap();
        let rows: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split_once(" | "))
            .map(|(name, _)| name)
            .filter(|name| !name.starts_with('|'))
            .collect();
        let probes = probes(Path::new("/nowhere"));
        let names: Vec<&str> =
            probes.iter().map(|probe| probe.name).filter(|name| *name != "kernel").collect();
        assert_eq!(rows, names, "write it by `cargo xtask vm --write-docs`");
    }
}
