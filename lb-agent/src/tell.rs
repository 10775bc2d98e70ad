//! What is wrong with many things at once, as a few lines of the log: a mistake in a template comes once for each object made of it.

use tracing::warn;

/// So many are told one by one.
const FEW: usize = 20;

/// Tells the first few; how many are left.
pub(crate) fn few<T>(things: impl IntoIterator<Item = T>, mut tell: impl FnMut(T)) -> usize {
    let mut things = things.into_iter();
    things.by_ref().take(FEW).for_each(&mut tell);
    things.count()
}

/// Logs the first few problems that came up together, and how many more there are.
pub(crate) fn warn_few<T: std::fmt::Display>(problems: impl IntoIterator<Item = T>) {
    say_more(few(problems, |problem| warn!("{problem}")));
}

/// Says that there are `more` problems than were told.
pub(crate) fn say_more(more: usize) {
    if more > 0 {
        warn!("and {more} more problems: `lb-agent status` lists all that are left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_told_and_the_others_counted() {
        for (count, told, more) in [(0, 0, 0), (1, 1, 0), (20, 20, 0), (21, 20, 1), (10_000, 20, 9_980)] {
            let mut seen = Vec::new();
            assert_eq!(few(0..count, |thing| seen.push(thing)), more);
            assert_eq!(seen, (0..told).collect::<Vec<_>>());
        }
    }
}
