//! How the commands of `lb-agent` and of the plugin `kubectl lb` print: tables, JSON, ages and archives ([`archive`]).

pub mod archive;

use std::io::{self, IsTerminal as _, Write as _};

use clap::ValueEnum;
use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use jiff::Timestamp;
use serde::Serialize;

/// Output formats of most commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TableOrJson {
    /// Text for people
    Table,
    /// JSON for programs
    Json,
}

/// The text for a value that is unknown or does not exist.
pub const NOTHING: &str = "-";

/// Tables are wrapped only for terminals with at least this many columns.
const NARROWEST: u16 = 40;

/// A table without borders, as `kubectl` prints them. On a terminal of at least [`NARROWEST`] columns, long cells wrap
/// so that the table fits the terminal; otherwise each row is one line.
pub fn table(heads: &[&str]) -> Table {
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

/// Renders a table as lines, without trailing blanks or a left margin.
pub fn render(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.strip_prefix(' ').unwrap_or(&line).trim_end());
        text.push('\n');
    }
    text
}

/// Prints a table.
///
/// # Errors
/// As [`print`].
pub fn print_table(table: &Table) -> anyhow::Result<()> {
    print(&render(table))
}

/// Prints a value as indented JSON.
///
/// # Errors
/// The value has no JSON form; or as [`print`].
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Prints text. A closed pipe, as with `head`, is no error.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// The time since `then`, such as `3s`, `1m02s` or `1d02h`; `0s` if `then` is later.
pub fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes:02}m"),
        (days, hours, ..) => format!("{days}d{hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_two_units_at_most() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let ages: Vec<_> = [0, 59, 62, 3_720, 93_600].map(|second| age(at(0), at(second))).into();
        assert_eq!(ages, ["0s", "59s", "1m02s", "1h02m", "1d02h"]);
        assert_eq!(age(at(9), at(0)), "0s");
    }
}
