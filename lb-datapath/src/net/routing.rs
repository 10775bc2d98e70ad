//! Whether next hops depend on more than the destination of packets, because of policy routing, multipath routes, or
//! routes that apply only to some source addresses or TOS values.
//!
//! If next hops depend only on the destination, programs share a next hop among all flows to a destination.

use std::io;

use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use crate::net::netlink::Netlink;

/// Routing tables that the kernel's own policy rules use.
const DEFAULT_TABLES: [u8; 3] = [libc::RT_TABLE_LOCAL, libc::RT_TABLE_MAIN, libc::RT_TABLE_DEFAULT];

/// Whether all policy rules are like those that the kernel creates in every network namespace: each rule sends all
/// packets to one of the tables that the kernel's own rules use ([`is_default`]).
pub(crate) fn has_only_default_rules(netlink: &mut Netlink) -> io::Result<bool> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRule(RuleMessage::default()))?;
    Ok(answers
        .iter()
        .all(|answer| if let RouteNetlinkMessage::NewRule(rule) = answer { is_default(rule) } else { true }))
}

/// Whether a policy rule sends all packets to one of the tables that the kernel's own rules use. An attribute that this
/// function does not know counts as a condition.
fn is_default(rule: &RuleMessage) -> bool {
    let header = &rule.header;
    let is_all = header.src_len == 0 && header.dst_len == 0 && header.tos == 0;
    let mut table = u32::from(header.table);
    let mut unconditional = true;
    for attribute in &rule.attributes {
        if let RuleAttribute::Table(number) = attribute {
            table = *number;
        } else if let RuleAttribute::SuppressPrefixLen(length) = attribute {
            unconditional &= *length == u32::MAX;
        } else {
            unconditional &= matches!(attribute, RuleAttribute::Priority(_) | RuleAttribute::Protocol(_));
        }
    }
    let is_default_table = DEFAULT_TABLES.iter().any(|known| u32::from(*known) == table);
    is_all && unconditional && is_default_table && header.action == RuleAction::ToTable
}

/// Whether the next hop of a route depends only on the destination: the route is not multipath, and applies to every
/// source address and TOS.
pub(super) fn is_by_destination(route: &RouteMessage) -> bool {
    let header = &route.header;
    let is_multipath = header.kind == RouteType::Unicast
        && !route.attributes.iter().any(|attribute| matches!(attribute, RouteAttribute::Oif(_)));
    !is_multipath && header.source_prefix_length == 0 && header.tos == 0
}

/// [`is_by_destination`] for the payload of a netlink event, without parsing it as a whole: a node may have a million
/// routes.
pub(super) fn event_is_by_destination(payload: &[u8]) -> bool {
    /// Size of `struct rtmsg` in bytes.
    const HEADER: usize = 12;
    /// The route type `RTN_UNICAST`.
    const UNICAST: u8 = 1;
    let &[_, _, source_length, tos, _, _, _, kind, ..] = payload else { return false };
    let mut rest = payload.get(HEADER..).unwrap_or_default();
    let mut has_device = false;
    while let [a, b, c, d, ..] = *rest {
        let (length, attribute) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        has_device |= attribute == libc::RTA_OIF;
        // The length of an attribute includes its header of 4 bytes. A length below 4 is malformed and
        // counts as 4, so that the walk always ends.
        rest = rest.get(usize::from(length).max(4).next_multiple_of(4)..).unwrap_or_default();
    }
    (kind != UNICAST || has_device) && source_length == 0 && tos == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(table: u8, attributes: Vec<RuleAttribute>) -> RuleMessage {
        let mut rule = RuleMessage::default();
        (rule.header.table, rule.header.action) = (table, RuleAction::ToTable);
        rule.attributes = attributes;
        rule
    }

    #[test]
    fn rules_of_the_kernel_are_no_policy_routing() {
        use RuleAttribute::{FwMark, Iifname, Other, Priority, SuppressPrefixLen, Table};
        let unknown = || Other(netlink_packet_core::DefaultNla::new(99, vec![1]));
        for (table, attributes, expected) in [
            (255, vec![Table(255), SuppressPrefixLen(u32::MAX)], true),
            (254, vec![Priority(32_766), Table(254)], true),
            (254, vec![Table(254), SuppressPrefixLen(0)], false),
            (254, vec![Table(254), FwMark(1)], false),
            (254, vec![Table(254), Iifname("eth0".to_owned())], false),
            (252, vec![Table(1000)], false),
            (254, vec![unknown()], false),
        ] {
            assert_eq!(is_default(&rule(table, attributes.clone())), expected, "{attributes:?}");
        }
        let mut from = rule(254, Vec::new());
        assert!(is_default(&from));
        from.header.src_len = 32;
        assert!(!is_default(&from));
    }

    #[test]
    fn events_of_multipath_and_source_routes_are_recognised() {
        let event = |source: u8, kind: u8, attribute: u16| {
            let mut bytes = vec![2, 24, source, 0, 254, 0, 0, kind, 0, 0, 0, 0];
            bytes.extend([8_u16.to_ne_bytes(), libc::RTA_DST.to_ne_bytes()].concat());
            bytes.extend([10, 0, 0, 0]);
            bytes.extend([8_u16.to_ne_bytes(), attribute.to_ne_bytes()].concat());
            bytes.extend([2, 0, 0, 0]);
            bytes
        };
        assert!(event_is_by_destination(&event(0, 1, libc::RTA_OIF)));
        assert!(!event_is_by_destination(&event(0, 1, libc::RTA_MULTIPATH)));
        assert!(event_is_by_destination(&event(0, 7, libc::RTA_PRIORITY)), "an unreachable route");
        assert!(!event_is_by_destination(&event(64, 1, libc::RTA_OIF)));
        assert!(!event_is_by_destination(&[2, 24]));
        let mut malformed = event(0, 1, libc::RTA_OIF);
        malformed[12] = 0;
        assert!(!event_is_by_destination(&malformed), "an attribute without length");
    }
}
