//! The report on each announced address, for `status` and `announce list`.

use std::{collections::BTreeSet, fmt, net::IpAddr, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use lb_common::{Announcement, Heard};
use lb_core::{
    announce::{bgp::AnnouncedAddress, coverage::Unannounced, election::Candidacy, lease::Nanos},
    model::ObjectName,
};
use serde::{Deserialize, Serialize};

use super::{devices::Wire, frames, held::Held};

/// The protocol by which an address is announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AnnouncedBy {
    /// ARP and neighbour discovery: one node answers for the address.
    #[default]
    Layer2,
    /// BGP: each node that serves the address offers a route to it.
    Bgp,
    /// No protocol: no advertisement covers the address.
    Nothing,
}

impl fmt::Display for AnnouncedBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Layer2 => "layer2",
            Self::Bgp => "bgp",
            Self::Nothing => "nothing",
        })
    }
}

/// A load balancer address that a node announces or should announce, as `announce list` shows it. An address that is
/// announced both at layer 2 and by BGP has two reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnouncementReport {
    /// The address.
    pub address: IpAddr,
    /// Name of the address pool that contains the address; empty if none does.
    pub pool: String,
    /// `namespace/name` of the Services that have the address.
    pub services: Vec<String>,
    /// The protocol by which the address is announced. Older agents report layer 2 only.
    #[serde(default)]
    pub by: AnnouncedBy,
    /// `namespace/name` of the L2Advertisements or BGPAdvertisements that cover the address. Older agents do not report
    /// them.
    #[serde(default)]
    pub advertisements: Vec<String>,
    /// Name of the node that announces the address, as far as this node knows. By BGP, several nodes may announce an
    /// address, and each knows only of itself.
    pub node: Option<String>,
    /// By BGP: whether a route to the address is in the table of the BGP daemon. At layer 2: whether this node answers
    /// ARP requests and neighbour solicitations for the address now. False during the hold-off after another machine
    /// claimed the address on any interface, although this node still answers on the other interfaces.
    pub here: bool,
    /// At layer 2: the interfaces on which this node announces the address, or would if it had the right to. Empty by
    /// BGP.
    pub interfaces: Vec<String>,
    /// When this node began to announce the address; `None` if it does not. Stays set during a hold-off (see `here`).
    pub since: Option<Timestamp>,
    /// Milliseconds until this node stops announcing the address unless it renews its right; `None` without a right, if
    /// the right never ends because there are no members, and by BGP.
    pub expires_in_ms: Option<u64>,
    /// Number of ARP requests and neighbour solicitations for the address that this node has answered; 0 by BGP.
    pub answers: u64,
    /// Number of frames in which other machines claimed the address while this node announced it; 0 by BGP.
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

/// How an address is announced, as text: the protocol, and the advertisements.
pub(crate) fn means(by: AnnouncedBy, advertisements: &[String]) -> String {
    let protocol = match by {
        AnnouncedBy::Layer2 => "at layer 2",
        AnnouncedBy::Bgp => "by BGP",
        AnnouncedBy::Nothing => "by nothing",
    };
    // Older agents do not report advertisements.
    if advertisements.is_empty() {
        protocol.to_owned()
    } else {
        format!("{protocol} ({})", advertisements.join(", "))
    }
}

impl AnnouncementReport {
    /// The report on an address that no advertisement covers.
    pub(super) fn unannounced(Unannounced { address, pool, services }: &Unannounced) -> Self {
        Self::without_announcement(
            *address,
            pool.as_deref().unwrap_or_default(),
            services,
            AnnouncedBy::Nothing,
        )
    }

    /// The report on an address that the node `this` announces by BGP, or would announce if the table of the BGP daemon
    /// had a route to it. `age` says how long the table has had such a route; `None` if it has none.
    pub(super) fn by_bgp(
        (address, pool): (IpAddr, &str),
        announced: &AnnouncedAddress,
        this: &str,
        age: Option<Duration>,
    ) -> Self {
        let AnnouncedAddress { services, advertisements, routes: _ } = announced;
        Self {
            advertisements: advertisements.iter().map(ToString::to_string).collect(),
            node: age.map(|_| this.to_owned()),
            here: age.is_some(),
            since: age.and_then(|age| Some(Timestamp::now() - SignedDuration::try_from(age).ok()?)),
            ..Self::without_announcement(address, pool, services, AnnouncedBy::Bgp)
        }
    }

    /// The report on an address that no node announces by the protocol `by`.
    fn without_announcement(
        address: IpAddr,
        pool: &str,
        services: &BTreeSet<ObjectName>,
        by: AnnouncedBy,
    ) -> Self {
        Self {
            address,
            pool: pool.to_owned(),
            services: services.iter().map(ToString::to_string).collect(),
            by,
            advertisements: Vec::new(),
            node: None,
            here: false,
            interfaces: Vec::new(),
            since: None,
            expires_in_ms: None,
            answers: 0,
            conflicts: 0,
            conflict_mac: None,
        }
    }
}

/// The data from which [`Facts::report`] makes the report on one address.
pub(super) struct Facts<'a> {
    /// Name of the node that announces the address; `None` if unknown.
    pub(super) owner: Option<&'a Arc<str>>,
    /// When the right of this node to announce the address ends; `None` without a right.
    pub(super) deadline: Option<Nanos>,
    /// The devices on which this node announces the address, or would if it had the right to.
    pub(super) places: Vec<&'a Wire>,
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
            by: AnnouncedBy::Layer2,
            advertisements: candidacy.advertisements.iter().map(ToString::to_string).collect(),
            node: self.owner.map(ToString::to_string),
            here: self.held.iter().copied().any(|held| answers(&held)),
            interfaces: self.places.iter().map(|wire| wire.name.clone()).collect(),
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

    #[test]
    fn means_are_the_protocol_and_the_advertisements() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(means(AnnouncedBy::Layer2, &names(&["m/a", "m/b"])), "at layer 2 (m/a, m/b)");
        assert_eq!(means(AnnouncedBy::Bgp, &names(&["m/c"])), "by BGP (m/c)");
        assert_eq!(means(AnnouncedBy::Layer2, &[]), "at layer 2");
    }

    #[test]
    fn report_of_an_older_agent_is_about_layer_2() {
        let announced = AnnouncedAddress {
            services: [ObjectName::new("default", "web")].into(),
            advertisements: [ObjectName::new("m", "a")].into(),
            ..AnnouncedAddress::default()
        };
        let address = "203.0.113.1".parse().unwrap();
        let report = AnnouncementReport::by_bgp((address, "pool"), &announced, "n1", Some(Duration::ZERO));
        assert_eq!((report.node.as_deref(), report.here), (Some("n1"), true));
        let without_route = AnnouncementReport::by_bgp((address, "pool"), &announced, "n1", None);
        assert_eq!((without_route.node, without_route.here, without_route.since), (None, false, None));
        let mut json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["by"], "bgp");
        assert_eq!(json["advertisements"], serde_json::json!(["m/a"]));
        assert_eq!(serde_json::from_value::<AnnouncementReport>(json.clone()).unwrap(), report);
        json.as_object_mut().unwrap().retain(|key, _| key != "by" && key != "advertisements");
        let older: AnnouncementReport = serde_json::from_value(json).unwrap();
        assert_eq!((older.by, older.advertisements), (AnnouncedBy::Layer2, vec![]));
    }
}
