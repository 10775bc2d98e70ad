//! The devices on which a node can announce, as it reports them to the other members.

use std::collections::{BTreeMap, BTreeSet};

use super::lease::Nanos;

/// Nanoseconds for which a device still counts after it has disappeared, so that an address does not move to another
/// node when a cable is replugged or a driver resets a card.
const PATIENCE: Nanos = 5_000_000_000;

/// The devices of a node, including those that disappeared a moment ago, each with the last time when it was present.
#[derive(Clone, Debug, Default)]
pub struct LastingDevices(BTreeMap<String, Nanos>);

impl LastingDevices {
    /// Records the devices that the node has at `now`; returns these devices and the devices that the node had less
    /// than 5 s ago.
    pub fn update<'a>(&mut self, present: impl IntoIterator<Item = &'a str>, now: Nanos) -> BTreeSet<String> {
        self.0.extend(present.into_iter().map(|name| (name.to_owned(), now)));
        self.0.retain(|_, seen| now.saturating_sub(*seen) < PATIENCE);
        self.0.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_counts_at_once_and_for_a_moment_after_it_has_gone() {
        const SECOND: Nanos = 1_000_000_000;
        let mut devices = LastingDevices::default();
        for (second, present, expected) in [
            (0, vec!["eth0"], vec!["eth0"]),
            (1, vec!["eth0", "eth1"], vec!["eth0", "eth1"]),
            (2, vec!["eth0"], vec!["eth0", "eth1"]),
            (5, vec!["eth0"], vec!["eth0", "eth1"]),
            (6, vec!["eth0"], vec!["eth0"]),
            (7, vec!["eth0", "eth1"], vec!["eth0", "eth1"]),
        ] {
            let devices = devices.update(present, second * SECOND);
            assert_eq!(devices.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{second} s");
        }
    }
}
