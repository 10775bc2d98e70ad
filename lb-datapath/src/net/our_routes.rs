//! Routes that the agent adds, as `ip route show proto 108` lists them.

use std::{collections::BTreeSet, io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};

use crate::net::netlink::Netlink;

/// Marks our routes (`rtnetlink(7)`, `rtm_protocol`).
const PROTOCOL: RouteProtocol = RouteProtocol::Other(108);
/// Metric of our routes: any route of other software for the same network takes precedence.
pub(crate) const METRIC: u32 = 1 << 30;

/// Address and prefix length of a network.
pub(crate) type Range = (IpAddr, u8);

/// The networks that have a route of type `kind` from an agent.
pub(crate) fn present(netlink: &mut Netlink, kind: RouteType) -> io::Result<BTreeSet<Range>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let range =
        |answer| if let RouteNetlinkMessage::NewRoute(route) = answer { ours(&route, kind) } else { None };
    Ok(answers.into_iter().filter_map(range).collect())
}

/// The destination network of `route`, if an agent has added it and it has type `kind`.
fn ours(route: &RouteMessage, kind: RouteType) -> Option<Range> {
    if route.header.protocol != PROTOCOL || route.header.kind != kind {
        return None;
    }
    let destination = route.attributes.iter().find_map(|attribute| {
        if let RouteAttribute::Destination(RouteAddress::Inet(ip)) = attribute {
            Some(IpAddr::from(*ip))
        } else if let RouteAttribute::Destination(RouteAddress::Inet6(ip)) = attribute {
            Some(IpAddr::from(*ip))
        } else {
            None
        }
    });
    Some((destination?, route.header.destination_prefix_length))
}

/// Adds a route unless it exists.
pub(crate) fn add(netlink: &mut Netlink, route: RouteMessage) -> io::Result<()> {
    match netlink.execute(RouteNetlinkMessage::NewRoute(route), NLM_F_CREATE | NLM_F_EXCL) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Removes a route if it exists.
pub(crate) fn remove(netlink: &mut Netlink, route: RouteMessage) -> io::Result<()> {
    match netlink.execute(RouteNetlinkMessage::DelRoute(route), 0) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        result => result,
    }
}

/// A route for this network, without next hop.
pub(crate) fn route((ip, prefix): Range, kind: RouteType, metric: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    let (family, destination) = match ip {
        IpAddr::V4(ip) => (AddressFamily::Inet, RouteAddress::Inet(ip)),
        IpAddr::V6(ip) => (AddressFamily::Inet6, RouteAddress::Inet6(ip)),
    };
    route.header = RouteHeader {
        address_family: family,
        destination_prefix_length: prefix,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: PROTOCOL,
        scope: RouteScope::Universe,
        kind,
        ..RouteHeader::default()
    };
    route.attributes = vec![RouteAttribute::Destination(destination), RouteAttribute::Priority(metric)];
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_of_agents_are_recognised() {
        let range = ("10.96.0.0".parse().unwrap(), 12);
        let unreachable = route(range, RouteType::Unreachable, METRIC);
        assert_eq!(ours(&unreachable, RouteType::Unreachable), Some(range));
        assert_eq!(ours(&unreachable, RouteType::Unicast), None);
        let mut others = unreachable;
        others.header.protocol = RouteProtocol::Static;
        assert_eq!(ours(&others, RouteType::Unreachable), None);
    }
}
