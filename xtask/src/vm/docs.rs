//! The table in docs/kernels.md, from the results of `lb-agent check` in the guests.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use super::kernel::DEFAULTS;
use super::report::{Probe, Report};

/// The markers around the table.
const BEGIN: &str = "<!-- written by `cargo xtask vm --write-docs`: begin -->\n";
const END: &str = "<!-- end -->\n";
/// The probe that only reports the kernel's version.
const KERNEL: &str = "kernel";

/// Writes the table into the page if `write`, else fails if the page's table differs from the results. If the results
/// of a kernel of the table are missing, compares nothing, and fails if `write`.
pub(super) fn compare_or_write(reports: &[(String, Report)], write: bool) -> anyhow::Result<()> {
    let column = |name: &'static str| {
        reports.iter().find(|(kernel, _)| kernel == name).map(|(_, report)| (name, report.probes()))
    };
    let Some(columns) = DEFAULTS.map(column).into_iter().collect::<Option<Vec<_>>>() else {
        ensure!(!write, "the table needs results of the kernels {}: run all of them", DEFAULTS.join(" and "));
        return Ok(());
    };
    let path = page();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let current = with_table(&text, &table(&columns)).with_context(|| format!("in {}", path.display()))?;
    if write {
        return fs::write(&path, current).with_context(|| format!("cannot write {}", path.display()));
    }
    ensure!(
        text == current,
        "the table in {} does not match these kernels: run `cargo xtask vm --write-docs` and commit it",
        path.display()
    );
    Ok(())
}

fn page() -> PathBuf {
    ebpf_build::workspace_root().join("docs/kernels.md")
}

fn with_table(page: &str, table: &str) -> anyhow::Result<String> {
    let (before, rest) =
        page.split_once(BEGIN).with_context(|| format!("the line {} is missing", BEGIN.trim()))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("the line {} is missing", END.trim()))?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

fn table(columns: &[(&str, &[Probe])]) -> String {
    let names: Vec<String> = columns.iter().map(|(name, _)| format!("Linux {name}")).collect();
    let mut text = format!("| | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(columns.len()));
    let probes = columns.first().map_or(&[][..], |(_, probes)| *probes);
    for probe in probes.iter().filter(|probe| probe.name != KERNEL) {
        let cells: Vec<String> = columns.iter().map(|(_, probes)| cell(probes, &probe.name)).collect();
        text.push_str(&format!("| {} | {} |\n", probe.name, cells.join(" | ")));
    }
    text
}

fn cell(probes: &[Probe], name: &str) -> String {
    let Some(probe) = probes.iter().find(|probe| probe.name == name) else { return "not checked".to_owned() };
    if probe.result == "ok" {
        return "yes".to_owned();
    }
    let detail = probe.detail.lines().next().unwrap_or_default().replace('|', "\\|");
    format!("**{}**: {detail}", probe.result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(name: &str, result: &str, detail: &str) -> Probe {
        Probe { name: name.to_owned(), result: result.to_owned(), detail: detail.to_owned() }
    }

    #[test]
    fn table_names_degraded_features() {
        let old = [probe("kernel", "ok", "Linux 6.1.0"), probe("tcx", "degraded", "no tcx\nmore")];
        let new = [probe("kernel", "ok", "Linux 6.12.0"), probe("tcx", "ok", "links")];
        let expected = "| | Linux 6.1 | Linux 6.12 |\n|---|---|---|\n| tcx | **degraded**: no tcx | yes |\n";
        assert_eq!(table(&[("6.1", &old), ("6.12", &new)]), expected);
    }

    #[test]
    fn only_the_table_is_replaced() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");
        assert_eq!(with_table(&page, "new\n").unwrap(), format!("before\n{BEGIN}new\n{END}after\n"));
        assert!(with_table("nothing", "new\n").is_err());
    }

    #[test]
    fn page_has_its_markers() {
        let text = fs::read_to_string(page()).unwrap();
        assert!(with_table(&text, "").is_ok());
    }
}
