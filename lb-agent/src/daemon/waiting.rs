//! The Services that wait for room in a map.

use std::collections::BTreeSet;

use lb_core::{model::ObjectName, plan::Condition};

/// The Services that wait for room in a map, each with the name of the map. The text of a condition does not identify a
/// waiting Service, because the text changes with the number of free entries.
#[derive(Debug, Default)]
pub(super) struct Waiting(BTreeSet<(ObjectName, &'static str)>);

impl Waiting {
    /// Replaces the set by the Services that wait according to these conditions; returns the conditions of Services
    /// that are new in the set.
    pub(super) fn update<'a>(&mut self, all: impl Iterator<Item = &'a Condition>) -> Vec<&'a Condition> {
        let mut now = BTreeSet::new();
        let mut new = Vec::new();
        for condition in all {
            let Some(map) = condition.waits_for() else { continue };
            let waiting = (condition.service().clone(), map);
            if !self.0.contains(&waiting) {
                new.push(condition);
            }
            now.insert(waiting);
        }
        self.0 = now;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(service: &str, free: usize) -> Condition {
        Condition::FrontendsFull { service: ObjectName::new("shop", service), wanted: 5, free, slots: 9 }
    }

    #[test]
    fn service_is_reported_once_as_long_as_it_waits() {
        let mut waiting = Waiting::default();
        let (a, b) = (full("a", 1), full("b", 1));
        assert_eq!(waiting.update([&a].into_iter()), [&a]);
        assert_eq!(waiting.update([&full("a", 0), &b].into_iter()), [&b]);
        assert!(waiting.update([&a, &b].into_iter()).is_empty());
        assert!(waiting.update([&b].into_iter()).is_empty());
        assert_eq!(waiting.update([&a, &b].into_iter()), [&a], "it waits again");
    }
}
