//! Values of annotations: durations and booleans.

use std::{fmt, ops::RangeInclusive, time::Duration};

/// Parses a number of seconds, or a number with the unit `ms`, `s` or `m`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let milliseconds = match &text[number.len()..] {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        _ => return None,
    };
    number.parse::<u32>().ok().map(|number| Duration::from_millis(u64::from(number) * milliseconds))
}

/// The value that was read from `text`, if it is in the range.
pub(super) fn within<T: PartialOrd + fmt::Debug>(
    text: &str,
    value: Option<T>,
    range: &RangeInclusive<T>,
) -> Result<T, String> {
    let why = || format!("{text:?} is not from {:?} to {:?}", range.start(), range.end());
    value.filter(|value| range.contains(value)).ok_or_else(why)
}

/// Parses a boolean as Go's `strconv.ParseBool` does, by which clouds read their annotations.
pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(r#"give "true" or "false""#.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boolean_has_the_forms_of_go() {
        for (texts, expected) in [
            ("1 t T true TRUE True", Some(true)),
            ("0 f F false FALSE False", Some(false)),
            (" yes on tRUE FALSe 2 true!", None),
        ] {
            for text in texts.split(' ') {
                assert_eq!(boolean(text).ok(), expected, "{text:?}");
            }
        }
    }
}
