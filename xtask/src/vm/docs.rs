//! The table of kernels and features in docs/kernels.md, made of what `lb-agent check` found in the guests.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use super::kernel::DEFAULTS;
use super::report::{Probe, Report};

/// What is around the table.
const BEGIN: &str = "<!-- written by `cargo xtask vm --write-docs`: begin -->\n";
const END: &str = "<!-- end -->\n";
/// The one probe that only says what kernel it is.
const KERNEL: &str = "kernel";

/// Compares the page with what was found, or writes it. Only a run on all kernels of the table can say anything.
pub(super) fn compare_or_write(reports: &[(String, Report)], write: bool) -> anyhow::Result<()> {
    let of = |name: &'static str| {
        reports.iter().find(|(of, _)| of == name).map(|(_, report)| (name, report.probes()))
    };
    let Some(columns) = DEFAULTS.map(of).into_iter().collect::<Option<Vec<_>>>() else {
        ensure!(!write, "the table has the kernels {}: run them all", DEFAULTS.join(" and "));
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
        "the table in {} is not what these kernels have: run `cargo xtask vm --write-docs` and commit it",
        path.display()
    );
    Ok(())
}

fn page() -> PathBuf {
    ebpf_build::workspace_root().join("docs/kernels.md")
}

fn with_table(page: &str, table: &str) -> anyhow::Result<String> {
    let (before, rest) =
        page.split_once(BEGIN).with_context(|| format!("there is no line {}", BEGIN.trim()))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("there is no line {}", END.trim()))?;
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
    let Some(probe) = probes.iter().find(|probe| probe.name == name) else { return "not asked".to_owned() };
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
    fn the_table_names_what_is_degraded() {
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
    fn the_page_has_its_marks() {
        let text = fs::read_to_string(page()).unwrap();
        assert!(with_table(&text, "").is_ok());
    }
}
