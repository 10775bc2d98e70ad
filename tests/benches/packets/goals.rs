//! A table of the goals of the data plane, with a row for each hook and a column for each kind of packets.

use comfy_table::Table;
use lb_tests::bench::{Quantile, figure::mark};

use crate::{
    cases::Section,
    report::{Row, table},
};

/// The columns of the table: heading, section, and packet of the case that is shown.
const COLUMNS: [(&str, Section, &str); 6] = [
    ("no Service", Section::Untouched, "TCP/IPv4"),
    ("no Service, 65,536 flows", Section::UntouchedMany, "TCP/IPv4"),
    ("established", Section::OneFlow, "TCP/IPv4"),
    ("65,536 flows", Section::ManyFlows, "TCP/IPv4"),
    ("new flow", Section::NewFlow, "TCP/IPv4, random"),
    ("new, masqueraded", Section::NewFlow, "TCP/IPv4, random, masqueraded"),
];
const HOOKS: [(&str, &str); 3] =
    [("tc ingress", "tc_ingress"), ("tc egress", "tc_egress"), ("XDP", "xdp_native")];

/// Creates the table of goals; `None` if none of its cases was measured.
pub(crate) fn table_of(rows: &[Row]) -> Option<Table> {
    let cell = |program: &str, section: Section, packet: &str| {
        let mut rows = rows.iter();
        let row =
            rows.find(|row| row.program == program && row.section == section && row.packet == packet)?;
        let (goal, met) = (row.goal?, row.met?);
        Some(format!("{} {:.2} ≤ {goal:.1}", mark(met), row.ratio.at(Quantile::Median)))
    };
    let line = |(label, program): &(&str, &str)| {
        let mut cells = vec![(*label).to_owned()];
        cells.extend(COLUMNS.map(|(_, section, packet)| cell(program, section, packet).unwrap_or_default()));
        cells
    };
    let lines: Vec<Vec<String>> = HOOKS.iter().map(line).collect();
    let is_measured = lines.iter().any(|line| line.iter().skip(1).any(|cell| !cell.is_empty()));
    let mut header = vec![""];
    header.extend(COLUMNS.map(|(title, ..)| title));
    is_measured.then(|| table(header, lines))
}
