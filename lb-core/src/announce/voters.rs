//! The members whose promises count, while nodes come and go.
//!
//! A majority must be one of members that all agree on, or two halves of a cluster could each find a majority of those
//! that they know. So the voters are not the nodes that a member happens to see: they are written down in one place
//! that changes by compare-and-swap (an object of the API server), with a generation. Three rules make it safe to
//! change them:
//!
//! 1. A new generation adds or removes one voter. So a majority before and a majority after it have a voter in common,
//!    who promises an address to one member only.
//! 2. A voter refuses questions of an older generation than its own.
//! 3. Nobody writes the next generation before a majority of the voters has had the present one for longer than a
//!    promise lasts ([`Leases::may_change`](super::lease::Leases::may_change)). So no member that still uses the
//!    generation before it can have a majority: one of those voters refuses.
//!
//! Members see generations at different times, some perhaps never. By 1, two generations in a row cannot both elect; by
//! 2 and 3 all older ones cannot elect at all. A side of a partition that sees nodes disappear can change nothing
//! unless it has a majority of the voters from before.

use std::{collections::BTreeSet, sync::Arc};

/// The members whose promises count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Voters {
    /// Grows by one with each change.
    pub generation: u64,
    /// Their names.
    pub names: BTreeSet<Arc<str>>,
}

impl Voters {
    /// How many of them must agree.
    pub fn majority(&self) -> usize {
        self.names.len() / 2 + 1
    }

    /// The next generation: without a voter whose node is gone, else with a member that lives and has no vote yet;
    /// `None` if there is nothing to change. `exists` says whether a node exists; `alive` are the members that are
    /// heard.
    pub fn next<'a>(
        &self,
        exists: impl Fn(&str) -> bool,
        alive: impl IntoIterator<Item = &'a Arc<str>>,
    ) -> Option<Self> {
        let mut names = self.names.clone();
        let gone = names.iter().find(|name| !exists(name)).cloned();
        // The last one stays: nobody could add another.
        match gone.filter(|_| names.len() > 1) {
            Some(gone) => names.remove(&gone),
            None => {
                let new = alive.into_iter().find(|name| exists(name) && !names.contains(*name))?;
                names.insert(new.clone())
            }
        };
        Some(Self { generation: self.generation + 1, names })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    #[test]
    fn one_voter_comes_or_goes_at_a_time() {
        let voters = Voters { generation: 7, names: names(&["a", "b"]) };
        let alive = [Arc::from("a"), Arc::from("c"), Arc::from("d")];
        let next = |exists: &[&str]| voters.next(|name| exists.contains(&name), &alive);
        assert_eq!(next(&["a", "b"]), None);
        assert_eq!(
            next(&["a", "b", "c", "d"]),
            Some(Voters { generation: 8, names: names(&["a", "b", "c"]) })
        );
        assert_eq!(next(&["a", "c"]), Some(Voters { generation: 8, names: names(&["a"]) }));
        assert_eq!(next(&["a", "b", "e"]), None, "e is not heard");
        let last = Voters { generation: 9, names: names(&["a"]) };
        assert_eq!(last.next(|_| false, &alive), None, "the last one stays");
        assert_eq!(
            last.next(|name| name == "c", &alive),
            Some(Voters { generation: 10, names: names(&["a", "c"]) }),
            "it goes once there is another"
        );
    }

    proptest! {
        #[test]
        fn majorities_of_two_generations_have_a_voter_in_common(count in 1usize..40, remove: bool) {
            let all: BTreeSet<Arc<str>> = (0..count).map(|index| format!("n{index}").into()).collect();
            let voters = Voters { generation: 1, names: all };
            let new: Arc<str> = "new".into();
            let next = voters.next(|name| !remove || name != "n0", [&new]).unwrap();
            prop_assert_eq!(next.names.symmetric_difference(&voters.names).count(), 1);
            let together = voters.names.union(&next.names).count();
            prop_assert!(voters.majority() + next.majority() > together);
        }
    }
}
