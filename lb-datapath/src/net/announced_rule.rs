//! The rule by which the kernel looks up forwarded packets in the table of announced routes, and drops packets to
//! announced addresses. Without the rule, the node would send packets that programs do not translate, for example
//! packets to a port without a Service, back to the router.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use lb_core::announce::bgp::PROTOCOL;

use crate::net::netlink::Netlink;

/// Priority of the rule: after the rule of the table `local` (0), and before the rule of the table `main` (32766),
/// which has the default route.
const PRIORITY: u32 = 32_000;
const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

/// Adds the rule that looks up forwarded packets in the table, for both families, unless it exists. The rule does not
/// match packets that local processes send (their input device is `lo`), because programs may still translate these
/// packets at tc egress.
pub(crate) fn add(netlink: &mut Netlink, table: u32) -> io::Result<()> {
    FAMILIES.into_iter().try_for_each(|family| {
        let request = RouteNetlinkMessage::NewRule(rule(family, table));
        match netlink.execute(request, NLM_F_CREATE | NLM_F_EXCL) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists || is_without(&error) => Ok(()),
            result => result,
        }
    })
}

/// Removes the rule for the table, if it exists.
pub(crate) fn remove(netlink: &mut Netlink, table: u32) -> io::Result<()> {
    FAMILIES.into_iter().try_for_each(|family| {
        match netlink.execute(RouteNetlinkMessage::DelRule(rule(family, table)), 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound || is_without(&error) => Ok(()),
            result => result,
        }
    })
}

/// Numbers of the tables for which [`add`] has added a rule.
pub(crate) fn tables(netlink: &mut Netlink) -> io::Result<Vec<u32>> {
    let mut tables = Vec::new();
    for family in FAMILIES {
        let mut request = RuleMessage::default();
        request.header.family = family;
        let answers = match netlink.dump(&RouteNetlinkMessage::GetRule(request)) {
            Err(error) if is_without(&error) => continue,
            answers => answers?,
        };
        for answer in answers {
            let RouteNetlinkMessage::NewRule(rule) = answer else { continue };
            if rule.attributes.contains(&RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL))) {
                tables.extend(rule.attributes.iter().find_map(table_of));
            }
        }
    }
    Ok(tables)
}

/// Whether the error means that the kernel has no policy rules of a family, for example because it was booted with
/// `ipv6.disable=1`.
fn is_without(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

const fn table_of(attribute: &RuleAttribute) -> Option<u32> {
    if let RuleAttribute::Table(table) = attribute { Some(*table) } else { None }
}

/// The rule `not iif lo lookup TABLE` of `ip rule`.
fn rule(family: AddressFamily, table: u32) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = RuleAction::ToTable;
    rule.header.flags = RuleFlags::Invert;
    rule.attributes = vec![
        RuleAttribute::Priority(PRIORITY),
        RuleAttribute::Table(table),
        RuleAttribute::Iifname("lo".to_owned()),
        RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL)),
    ];
    rule
}
