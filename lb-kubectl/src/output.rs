//! Tables, JSON and ages.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use jiff::Timestamp;

/// The text for a value that is unknown.
pub(crate) const NOTHING: &str = "-";

/// A table without borders. On a terminal, long cells wrap to its width; otherwise each row is one line.
pub(crate) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(heads);
    if io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    } else {
        table.force_no_tty().set_content_arrangement(ContentArrangement::Disabled);
    }
    table
}

/// Renders a table as lines, without trailing blanks or a left margin.
pub(crate) fn render(table: &Table) -> String {
    let line = |line: String| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned() + "\n";
    table.lines().map(line).collect()
}

/// Prints text. A reader that has closed the pipe, such as `head`, is no error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// The time since `then`, such as `3s`, `1m02s` or `1d02h`. 0 if the node's clock is ahead.
pub(crate) fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = (now.as_second() - then.as_second()).max(0);
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
