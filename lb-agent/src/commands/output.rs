//! How results are printed: tables that fit the terminal, JSON, YAML.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use serde::Serialize;

/// What is printed where a value is unknown or does not exist.
pub(super) const NOTHING: &str = "-";

/// Columns of the narrowest terminal that tables are wrapped for.
const NARROWEST: u16 = 40;

/// A table with these column heads, without borders, as `kubectl` prints them. On a terminal long cells are
/// wrapped to its width; elsewhere a row is one line whatever its length.
pub(super) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(heads.iter().map(|head| Cell::new(head).add_attribute(Attribute::Bold)));
    if io::stdout().is_terminal() {
        // A terminal that nobody looks at, such as one of `script`, may have no width.
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

/// Whether something is as it should be: what the colour of a cell says.
#[derive(Clone, Copy)]
pub(super) enum Mood {
    Good,
    Odd,
    Bad,
}

/// A cell that is coloured on a terminal.
pub(super) fn cell(text: impl ToString, mood: Mood) -> Cell {
    let colour = match mood {
        Mood::Good => Color::Green,
        Mood::Odd => Color::Yellow,
        Mood::Bad => Color::Red,
    };
    Cell::new(text.to_string()).fg(colour)
}

/// The lines of a table without the blanks that fill up the last column and the margin of the first.
pub(super) fn render(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.strip_prefix(' ').unwrap_or(&line).trim_end());
        text.push('\n');
    }
    text
}

/// Prints a table.
pub(super) fn print_table(table: &Table) -> anyhow::Result<()> {
    print(&render(table))
}

/// Prints a value as indented JSON.
pub(super) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Prints a value as YAML.
pub(super) fn print_yaml(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_saphyr::to_string(value)?)
}

/// Prints text. A reader that went away, such as `head`, is no error.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}
