//! Prints output as tables, JSON and YAML.

use comfy_table::{Cell, Color};
pub(super) use lb_output::{NOTHING, print, print_json, print_table, render, table};
use serde::Serialize;

/// A count in at most three digits, with a unit from 1000 on, such as `12.3k`.
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

/// How good the content of a table cell is: shown as green, yellow or red.
#[derive(Clone, Copy)]
pub(super) enum Mood {
    Good,
    Odd,
    Bad,
}

/// A table cell whose text has the colour of `mood` if the output is a terminal.
pub(super) fn cell(text: impl ToString, mood: Mood) -> Cell {
    let colour = match mood {
        Mood::Good => Color::Green,
        Mood::Odd => Color::Yellow,
        Mood::Bad => Color::Red,
    };
    Cell::new(text.to_string()).fg(colour)
}

pub(super) fn print_yaml(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_saphyr::to_string(value)?)
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
