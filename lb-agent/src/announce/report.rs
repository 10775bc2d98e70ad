//! The report on each announced address, for `status` and `announce list`.

use std::{net::IpAddr, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use lb_common::{Announcement, Heard};
use lb_core::announce::{election::Candidacy, lease::Nanos};
use serde::{Deserialize, Serialize};

use super::{devices::Place, frames, held::Held};

/// An address of a load balancer that a member announces or should announce, as `announce list` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnouncementReport {
    /// The address.
    pub address: IpAddr,
    /// Name of the address pool that contains the address.
    pub pool: String,
    /// `namespace/name` of the Services that have the address.
    pub services: Vec<String>,
    /// Name of the node that announces the address, as far as this node knows.
    pub node: Option<String>,
    /// Whether this node answers ARP requests and neighbour solicitations for the address now. False during the
    /// hold-off after another machine claimed the address on any interface, although this node still answers on the
    /// others.
    pub here: bool,
    /// The interfaces on which this node announces the address, or would if it had the right to.
    pub interfaces: Vec<String>,
    /// When this node began to announce the address; `None` if it does not.
    pub since: Option<Timestamp>,
    /// Milliseconds until this node stops announcing the address unless it renews its right; `None` without a right, or
    /// if no members are configured.
    pub expires_in_ms: Option<u64>,
    /// ARP requests and neighbour solicitations for the address that this node has answered.
    pub answers: u64,
    /// Frames in which other machines claimed the address while this node announced it.
    pub conflicts: u64,
    /// MAC address of the machine that claimed the address last.
    pub conflict_mac: Option<String>,
}

/// The node that announces an address, as text; for this node, with the time at which the announcement began.
pub(crate) fn announcer(node: Option<&str>, here: bool, since: Option<Timestamp>) -> String {
    let since = since.filter(|_| here).map(|since| since.strftime(", since %FT%TZ").to_string());
    match node {
        Some(node) if here => format!("{node} (this node{})", since.unwrap_or_default()),
        Some(node) => node.to_owned(),
        None => "no node".to_owned(),
    }
}

/// What the report on an address is made of.
pub(super) struct Facts<'a> {
    /// Name of the node that announces the address; `None` if unknown.
    pub(super) owner: Option<&'a Arc<str>>,
    /// When the right of this node to announce the address ends; `None` without a right.
    pub(super) deadline: Option<Nanos>,
    /// The devices on which this node announces the address, or would if it had the right to.
    pub(super) places: Vec<&'a Place>,
    /// This node's announcements of the address, one per device.
    pub(super) held: Vec<&'a Held>,
    /// The programs' counters of answers and conflicts for the address, one per device.
    pub(super) heard: Vec<&'a Heard>,
}

impl Facts<'_> {
    pub(super) fn report(&self, candidacy: &Candidacy, now: Nanos) -> AnnouncementReport {
        let claims = self.heard.iter().filter(|heard| heard.conflicts > 0);
        let last_claim = claims.max_by_key(|heard| heard.conflict_at);
        let answers = |held: &&Held| last_claim.is_none_or(|claim| claim.conflict_at < held.since);
        let ago =
            |since: Nanos| SignedDuration::try_from(Duration::from_nanos(now.saturating_sub(since))).ok();
        let deadline = self.deadline.filter(|end| *end != Announcement::NEVER);
        AnnouncementReport {
            address: candidacy.address,
            pool: candidacy.pool.to_string(),
            services: candidacy.services.iter().map(ToString::to_string).collect(),
            node: self.owner.map(ToString::to_string),
            here: self.held.iter().copied().any(|held| answers(&held)),
            interfaces: self.places.iter().map(|place| place.name.clone()).collect(),
            since: self
                .held
                .iter()
                .map(|held| held.since)
                .min()
                .and_then(ago)
                .map(|ago| Timestamp::now() - ago),
            expires_in_ms: deadline.map(|deadline| deadline.saturating_sub(now) / 1_000_000),
            answers: self.heard.iter().map(|heard| heard.answers).sum(),
            conflicts: self.heard.iter().map(|heard| heard.conflicts).sum(),
            conflict_mac: last_claim.map(|claim| frames::text(claim.conflict_mac)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcer_is_named_with_the_time_if_it_is_this_node() {
        let since = Some(Timestamp::UNIX_EPOCH);
        assert_eq!(announcer(Some("a"), true, since), "a (this node, since 1970-01-01T00:00:00Z)");
        assert_eq!(announcer(Some("b"), false, since), "b");
        assert_eq!(announcer(None, false, None), "no node");
    }
}
