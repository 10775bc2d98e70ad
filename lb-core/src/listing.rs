//! Long lists as short texts.

/// The first `most` of `texts`, separated by commas, and the number of the others.
pub fn first_few<I: ExactSizeIterator<Item = String>>(texts: I, most: usize) -> String {
    let others = texts.len().saturating_sub(most);
    let first = texts.take(most).collect::<Vec<_>>().join(", ");
    if others == 0 { first } else { format!("{first} and {others} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_after_the_first_few_are_counted() {
        let of = |count: usize| {
            first_few((1..=count).map(|number| number.to_string()).collect::<Vec<_>>().into_iter(), 2)
        };
        assert_eq!(
            [of(0), of(1), of(2), of(3), of(9)],
            ["", "1", "1, 2", "1, 2 and 1 more", "1, 2 and 7 more"]
        );
    }
}
