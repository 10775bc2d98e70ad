//! Output as tables, JSON and YAML.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use serde::Serialize;

/// The text for a value that is unknown or does not exist.
pub(super) const NOTHING: &str = "-";

/// Tables are wrapped only for terminals with at least this many columns.
const NARROWEST: u16 = 40;

/// A table without borders, as `kubectl` prints them. On a terminal of at least [`NARROWEST`] columns, long cells wrap
/// to its width; otherwise each row is one line.
pub(super) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(heads.iter().map(|head| Cell::new(head).add_attribute(Attribute::Bold)));
    if io::stdout().is_terminal() {
        // A terminal may report no width, for example under `script`.
        if table.width().is_some_and(|width| width >= NARROWEST) {
            table.set_content_arrangement(ContentArrangement::Dynamic);
        }
        if std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            table.style_text_only();
        }
    } else {
        table.force_no_tty().set_content_arrangement(ContentArrangement::Disabled);
    }
    table
}

/// A number in at most three digits, with a unit from 1000 on, such as `12.3k`.
pub(super) fn scaled(value: u64) -> String {
    if value < 1000 {
        return value.to_string();
    }
    // Rounds down to tenths of the unit: rounding up would show 999,999 as `1000.0k`.
    let (mut tenths, mut unit) = (value / 100, "k");
    for larger in ["M", "G", "T", "P", "E"] {
        if tenths >= 10_000 {
            (tenths, unit) = (tenths / 1000, larger);
        }
    }
    if tenths >= 1000 {
        format!("{}{unit}", tenths / 10)
    } else {
        format!("{}.{}{unit}", tenths / 10, tenths % 10)
    }
}

/// The meaning of the colour of a cell.
#[derive(Clone, Copy)]
pub(super) enum Mood {
    Good,
    Odd,
    Bad,
}

/// A cell, coloured on a terminal.
pub(super) fn cell(text: impl ToString, mood: Mood) -> Cell {
    let colour = match mood {
        Mood::Good => Color::Green,
        Mood::Odd => Color::Yellow,
        Mood::Bad => Color::Red,
    };
    Cell::new(text.to_string()).fg(colour)
}

/// Renders a table as lines, without trailing blanks or a left margin.
pub(super) fn render(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.strip_prefix(' ').unwrap_or(&line).trim_end());
        text.push('\n');
    }
    text
}

pub(super) fn print_table(table: &Table) -> anyhow::Result<()> {
    print(&render(table))
}

/// Prints a value as indented JSON.
pub(super) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

pub(super) fn print_yaml(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_saphyr::to_string(value)?)
}

/// Prints text. A closed pipe, as with `head`, is no error.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_are_abbreviated() {
        let numbers = [0, 999, 1000, 12_345, 123_456, 999_999, 1_000_000, 2_500_000_000, u64::MAX];
        let expected = ["0", "999", "1.0k", "12.3k", "123k", "999k", "1.0M", "2.5G", "18.4E"];
        assert_eq!(numbers.map(scaled), expected);
    }
}
