//! Conflicts about addresses: two Services had an address that they cannot share.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use crate::model::ObjectName;

/// How long `lb-agent status` lists a conflict after the controller last found it. The controller resolves most
/// conflicts by its next write, so users would miss a conflict that left the list at once.
pub(super) const LISTED_FOR: Duration = Duration::from_secs(600);

/// Two Services had an address that they cannot share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Conflict {
    pub(super) ip: IpAddr,
    /// The Service that keeps the address.
    pub(super) keeper: ObjectName,
    /// The Service that loses it.
    pub(super) loser: ObjectName,
}

impl fmt::Display for Conflict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ip, keeper, loser } = self;
        let minutes = LISTED_FOR.as_secs() / 60;
        write!(
            formatter,
            "Services {keeper} and {loser} both had {ip} and cannot share it: {keeper} keeps it. Check that no other software \
             gives addresses to Services of this class; this line stays for {minutes} minutes"
        )
    }
}

/// The conflicts of the last [`LISTED_FOR`], each with the time at which a pass last found it.
#[derive(Debug, Default)]
pub(super) struct Conflicts(BTreeMap<Conflict, Duration>);

impl Conflicts {
    /// Adds conflicts that a pass has found at this time.
    pub(super) fn found(&mut self, conflicts: Vec<Conflict>, now: Duration) {
        self.0.extend(conflicts.into_iter().map(|conflict| (conflict, now)));
    }

    /// Removes the conflicts that no pass has found for [`LISTED_FOR`].
    pub(super) fn expire(&mut self, now: Duration) {
        self.0.retain(|_, found| now.saturating_sub(*found) < LISTED_FOR);
    }

    /// When the first conflict expires; `None` without conflicts.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.0.values().min().map(|found| *found + LISTED_FOR)
    }

    /// Removes the conflicts of a deleted Service.
    pub(super) fn remove(&mut self, service: &ObjectName) {
        self.0.retain(|Conflict { keeper, loser, .. }, _| keeper != service && loser != service);
    }

    /// The conflicts, as sentences for `lb-agent status`.
    pub(super) fn texts(&self) -> BTreeSet<String> {
        self.0.keys().map(ToString::to_string).collect()
    }
}
