//! The members whose grants count, while nodes come and go.
//!
//! All members must agree on the set whose majority counts. Otherwise two halves of a cluster could each find a
//! majority of the members that they know. So the voters are not the nodes that a member happens to see: they are
//! written down in one place that changes by compare-and-swap (an object of the API server), with a generation. Three
//! rules make it safe to change them:
//!
//! 1. A new generation adds or removes one voter at most. So a majority before and a majority after it have a voter in
//!    common, which grants an address to one member at a time.
//! 2. A voter refuses requests of an older generation than its own.
//! 3. No member proposes the next generation before a majority of the voters has had the present generation for longer
//!    than a grant lasts ([`Leases::may_change`](super::lease::Leases::may_change)). So no member that still uses the
//!    generation before the present one can have a majority: at least one voter with the present generation refuses.
//!
//! Members learn a generation from the API server, or in [`Part`]s from a member that knows it, at different times. By
//! rule 1, two consecutive generations cannot both elect a member; by rules 2 and 3, older generations cannot elect any
//! member. A side of a partition that sees nodes disappear can change nothing unless it has a majority of the present
//! voters.
//!
//! The rules need members that never return to an older generation. An agent that starts knows no generation, so it
//! votes only after it has read one from the API server. If the object was deleted or replaced by an older one, the
//! agents that know the newest generation write its voters back in a new generation ([`Voters::restored`]).
//! [`Voters::vacated`] breaks rule 1: an administrator may use it only after the agents of the voters that are gone
//! have ended.

use std::{collections::BTreeSet, sync::Arc};

use serde::{Deserialize, Serialize};

/// The members whose grants count: a majority of them grants a right.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Voters {
    /// A number that grows with each change of the voters in the API server; 0 for voters that come from no API server
    /// and never change, and for an agent that has not read the voters yet.
    pub generation: u64,
    /// Names of the voters' nodes.
    pub names: BTreeSet<Arc<str>>,
}

/// What an announcer passes to the task that writes the voters to the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ballot {
    /// The newest voters that the announcer knows, perhaps only from other members.
    pub known: Voters,
    /// The voters that the announcer proposes to write; `None` for no change.
    pub next: Option<Voters>,
}

/// A part of the voters: as many as fit into one message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// [`Voters::generation`] of the voters.
    pub generation: u64,
    /// Number of all voters of the generation.
    pub count: usize,
    /// Names of the voters in this part.
    pub names: Vec<String>,
}

/// The parts of the newest generation of voters that a member has received so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts(Voters);

impl Parts {
    /// Adds a part; returns the voters once all parts of their generation have been added. Ignores a part whose
    /// generation is older than that of a part added before.
    pub(super) fn add(&mut self, part: &Part) -> Option<&Voters> {
        if part.generation > self.0.generation {
            self.0 = Voters { generation: part.generation, names: BTreeSet::new() };
        }
        if part.generation == self.0.generation {
            self.0.names.extend(part.names.iter().map(|name| Arc::from(name.as_str())));
        }
        (part.generation == self.0.generation && self.0.names.len() == part.count).then_some(&self.0)
    }
}

impl Voters {
    /// The highest generation that members accept. There will never be as many changes.
    pub const LAST: u64 = u64::MAX / 2;

    /// Number of voters that form a majority.
    pub fn majority(&self) -> usize {
        self.names.len() / 2 + 1
    }

    /// The next generation. Removes a voter whose node does not exist (`exists`), but never the last voter. If there is
    /// none to remove, adds one of the `alive` members that has no vote yet and whose node exists. `None` if there is
    /// nothing to change, or after [`Self::LAST`].
    pub fn next<'a>(
        &self,
        exists: impl Fn(&str) -> bool,
        alive: impl IntoIterator<Item = &'a Arc<str>>,
    ) -> Option<Self> {
        let mut names = self.names.clone();
        let gone = names.iter().find(|name| !exists(name)).cloned();
        // The last voter stays even if its node is gone: without voters no proposal could get a majority.
        match gone.filter(|_| names.len() > 1) {
            Some(gone) => names.remove(&gone),
            None => {
                let new = alive.into_iter().find(|name| exists(name) && !names.contains(*name))?;
                names.insert(new.clone())
            }
        };
        Some(Self { generation: self.next_generation()?, names })
    }

    fn next_generation(&self) -> Option<u64> {
        self.generation.checked_add(1).filter(|next| *next <= Self::LAST)
    }

    /// What an agent that knows these voters must write to the API server: these voters in a new generation, if the
    /// voters `found` there are missing (`None`), older, or different in the same generation. `None` otherwise, after
    /// [`Self::LAST`], and for an agent that knows no voters (generation 0).
    pub fn restored(&self, found: Option<&Self>) -> Option<Self> {
        let is_valid = found.is_some_and(|found| found.generation > self.generation || found == self);
        let generation = self.next_generation().filter(|_| !is_valid && self.generation > 0)?;
        Some(Self { generation, names: self.names.clone() })
    }

    /// The voters whose node does not exist, if the other voters are no majority and so cannot change the voters;
    /// otherwise none.
    pub fn lost(&self, exists: impl Fn(&str) -> bool) -> Vec<&Arc<str>> {
        let gone: Vec<&Arc<str>> = self.names.iter().filter(|name| !exists(name)).collect();
        if self.names.len() - gone.len() < self.majority() && !self.names.is_empty() {
            gone
        } else {
            Vec::new()
        }
    }

    /// The next generation, with no voters. An agent that reads it writes a further generation, with the agent's node
    /// as the only voter.
    pub fn vacated(&self) -> Option<Self> {
        Some(Self { generation: self.next_generation()?, names: BTreeSet::new() })
    }

    /// These voters, split into parts that fit into one message each.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        let names: Vec<&Arc<str>> = self.names.iter().collect();
        let chunks = chunks(&names, |name| name.len());
        chunks.into_iter().map(|names| Part {
            generation: self.generation,
            count: self.names.len(),
            names: names.iter().map(ToString::to_string).collect(),
        })
    }
}

/// Maximum size in bytes of the names or addresses in one message, as JSON. With the rest of the message, they fit into
/// the 1,280 bytes that each IPv6 link carries, if the two nodes that the message names have names of at most 63 bytes.
/// With longer names (up to 253 bytes), IP may fragment the message.
const LIST: usize = 600;
/// Number of bytes that JSON adds to the text of each element of a list: two quotation marks and a comma.
const AROUND: usize = 3;

/// Splits a list into parts that fit into one message each. `length` returns the length of an element's text in bytes.
pub(super) fn chunks<T: Clone>(list: &[T], length: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut chunks: Vec<Vec<T>> = Vec::new();
    let mut left = 0;
    for element in list {
        let size = length(element) + AROUND;
        match chunks.last_mut().filter(|_| size <= left) {
            Some(chunk) => chunk.push(element.clone()),
            None => {
                chunks.push(vec![element.clone()]);
                left = LIST;
            }
        }
        left = left.saturating_sub(size);
    }
    chunks
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

    #[test]
    fn last_generation_is_followed_by_none() {
        for generation in [Voters::LAST, u64::MAX] {
            let last = Voters { generation, names: names(&["a"]) };
            assert_eq!(last.next(|_| true, &[Arc::from("b")]), None);
            assert_eq!(last.restored(None), None);
        }
    }

    #[test]
    fn voters_that_were_deleted_or_replaced_by_older_ones_are_restored() {
        let known = Voters { generation: 7, names: names(&["a", "b"]) };
        let of = |generation, list: &[&str]| Voters { generation, names: names(list) };
        let restored = Some(of(8, &["a", "b"]));
        assert_eq!(known.restored(None), restored);
        assert_eq!(known.restored(Some(&of(6, &["a"]))), restored);
        assert_eq!(known.restored(Some(&of(7, &["a"]))), restored, "an edit without a new generation");
        assert_eq!(known.restored(Some(&known)), None);
        assert_eq!(known.restored(Some(&of(8, &["c"]))), None, "newer ones are adopted");
        assert_eq!(Voters::default().restored(None), None, "an agent that knows none restores none");
    }

    #[test]
    fn voters_are_lost_once_a_majority_has_no_node() {
        let voters = Voters { generation: 1, names: names(&["a", "b", "c"]) };
        let lost = |existing: &[&str]| {
            voters.lost(|name| existing.contains(&name)).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(lost(&["a", "b"]), Vec::<String>::new());
        assert_eq!(lost(&["b"]), ["a", "c"]);
        assert_eq!(lost(&[]), ["a", "b", "c"]);
        assert_eq!(Voters::default().lost(|_| true), Vec::<&Arc<str>>::new());
        let vacated = voters.vacated().unwrap();
        assert_eq!(vacated, Voters { generation: 2, names: BTreeSet::new() });
        assert_eq!(voters.restored(Some(&vacated)), None, "agents adopt it");
    }

    #[test]
    fn parts_of_a_generation_make_it_whole_in_any_order() {
        let of = |generation| Voters {
            generation,
            names: (0..100).map(|index| format!("node-{index}-{}", "n".repeat(40)).into()).collect(),
        };
        let (old, new) = (of(4), of(5));
        let sent: Vec<Part> = new.parts().collect();
        assert!(sent.len() > 5 && sent.iter().all(|part| part.names.join("\",\"").len() < LIST));
        let mut parts = Parts::default();
        let (last, rest) = sent.split_first().unwrap();
        for part in rest.iter().rev().chain(rest) {
            assert_eq!(parts.add(part), None);
            assert_eq!(parts.add(&old.parts().next().unwrap()), None);
        }
        assert_eq!(parts.add(last), Some(&new));
        let one = Part { generation: 9, count: 2, names: vec!["a".into()] };
        assert_eq!(parts.add(&one), None);
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
