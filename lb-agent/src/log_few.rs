//! Keeps the log short: logs only the first few of many similar errors (for example, if every generated object repeats
//! a mistake in a template), and logs a lasting condition only when it begins.

use tracing::warn;

/// Maximum number of errors that are logged one by one; further ones are only counted.
const FEW: usize = 20;

/// Calls `log` for the first [`FEW`] things; returns how many more there are.
pub(crate) fn few<T>(things: impl IntoIterator<Item = T>, mut log: impl FnMut(T)) -> usize {
    let mut things = things.into_iter();
    things.by_ref().take(FEW).for_each(&mut log);
    things.count()
}

/// Logs the first [`FEW`] problems as warnings, and the number of the others.
pub(crate) fn warn_few<T: std::fmt::Display>(problems: impl IntoIterator<Item = T>) {
    warn_of_more(few(problems, |problem| warn!("{problem}")));
}

/// Logs the number of problems that were not logged one by one; nothing if that is 0.
pub(crate) fn warn_of_more(more: usize) {
    if more > 0 {
        warn!("and {more} more problems: `lb-agent status` lists them");
    }
}

/// Logs as warnings the conditions in `now` that are not in `known`; then replaces `known` by `now`.
pub(crate) fn warn_new(known: &mut Vec<String>, now: &[String]) {
    for condition in now.iter().filter(|condition| !known.contains(condition)) {
        warn!("{condition}");
    }
    now.clone_into(known);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_items_are_logged_and_the_others_counted() {
        for (count, told, more) in [(0, 0, 0), (1, 1, 0), (20, 20, 0), (21, 20, 1), (10_000, 20, 9_980)] {
            let mut seen = Vec::new();
            assert_eq!(few(0..count, |thing| seen.push(thing)), more);
            assert_eq!(seen, (0..told).collect::<Vec<_>>());
        }
    }
}
