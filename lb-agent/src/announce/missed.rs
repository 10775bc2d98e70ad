//! The condition that too many voters are missing: this node cannot get a majority for any address.

use std::{sync::Arc, time::Duration};

use lb_core::announce::lease::Nanos;

/// How long too many voters must be missing before the agent reports this condition. A start, and a change of the
/// voters, take less time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Since when too many voters have been missing; `None` while enough voters answer.
#[derive(Debug, Default)]
pub(super) struct Missed(Option<Nanos>);

impl Missed {
    /// The condition at the time `now`, as a sentence. `missed`: the missing voters; empty if the other voters are a
    /// majority. `voters`: the number of all voters. `of_cluster`: the voters are Nodes, so an administrator can
    /// replace them.
    pub(super) fn update(
        &mut self,
        (missed, voters): (&[&Arc<str>], usize),
        of_cluster: bool,
        now: Nanos,
    ) -> Option<String> {
        self.0 = self.0.or(Some(now)).filter(|_| !missed.is_empty());
        let missed_for = Duration::from_nanos(now.saturating_sub(self.0?));
        let replace = "; if these nodes run no agent any more, run `lb-agent announce voters --replace --without-agent`";
        (missed_for >= PATIENCE).then(|| {
            format!(
                "{} of the {voters} voters on announcements do not answer this node ({}), so it cannot announce an address at \
                 layer 2: check their agents, and UDP between the nodes{}",
                missed.len(),
                missed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                if of_cluster { replace } else { "" }
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missed_voters_are_a_condition_after_ten_seconds() {
        const SECOND: Nanos = 1_000_000_000;
        let names: [Arc<str>; 2] = ["b".into(), "c".into()];
        let names: Vec<&Arc<str>> = names.iter().collect();
        let mut missed = Missed::default();
        let mut at = |seconds, names: &[_]| missed.update((names, 3), false, seconds * SECOND);
        assert_eq!((at(1, &names), at(10, &names)), (None, None));
        let condition = at(11, &names).unwrap();
        assert!(condition.contains("2 of the 3 voters") && condition.contains("(b, c)"), "{condition}");
        assert!(!condition.contains("--replace"), "configured members cannot be replaced");
        assert_eq!((at(12, &[]), at(13, &names)), (None, None), "the ten seconds begin again");
        let condition = missed.update((&names, 3), true, 23 * SECOND).unwrap();
        assert!(condition.contains("--replace --without-agent"), "{condition}");
    }
}
