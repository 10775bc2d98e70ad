//! Adds and removes the agent's routes: for cluster IPs, as `ip route show proto 108` lists them, and for announced
//! addresses, with another protocol number.

use std::{collections::BTreeSet, fmt, io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};

use crate::net::netlink::Netlink;

/// Protocol number by which the agent recognises its routes for cluster IPs (`rtnetlink(7)`, `rtm_protocol`).
const PROTOCOL: RouteProtocol = RouteProtocol::Other(108);
/// Metric of the agent's routes for cluster IPs. A route of other software for the same network usually has a lower
/// metric, and so takes precedence.
pub(crate) const METRIC: u32 = 1 << 30;

/// A network: address and prefix length.
pub type Range = (IpAddr, u8);

/// The routes of one type that agents have added in the network namespace of this thread.
#[derive(Debug)]
pub(crate) struct OurRoutes {
    kind: RouteType,
    /// Networks that have a route of this type; `None` at first and after an error, until the routes are read from the
    /// kernel.
    present: Option<Networks>,
}

impl OurRoutes {
    pub(crate) const fn new(kind: RouteType) -> Self {
        Self { kind, present: None }
    }

    /// For each of the `wanted` networks, adds the route that `route` returns. Removes our routes to all other
    /// networks. Each call adds all routes, so a route that other software has removed comes back. Returns whether the
    /// networks have changed.
    pub(crate) fn replace(
        &mut self,
        netlink: &mut Netlink,
        wanted: &Networks,
        route: impl Fn(Range) -> RouteMessage,
    ) -> io::Result<bool> {
        let present = self.take(netlink)?;
        wanted.0.iter().try_for_each(|range| add(netlink, route(*range)).map(drop))?;
        present.0.difference(&wanted.0).try_for_each(|range| remove(netlink, route(*range)))?;
        self.present = Some(wanted.clone());
        Ok(present != *wanted)
    }

    /// Calls `remove`, which must remove all our routes of this type. Returns whether there was such a route.
    pub(crate) fn clear(
        &mut self,
        netlink: &mut Netlink,
        remove: impl FnOnce(&mut Netlink) -> io::Result<()>,
    ) -> io::Result<bool> {
        let present = self.take(netlink)?;
        remove(netlink)?;
        self.present = Some(Networks::default());
        Ok(present != Networks::default())
    }

    fn take(&mut self, netlink: &mut Netlink) -> io::Result<Networks> {
        self.present.take().map_or_else(|| present(netlink, self.kind), Ok)
    }
}

/// The networks that routes lead to; never 0.0.0.0/0 or ::/0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Networks(BTreeSet<Range>);

impl Networks {
    pub(crate) fn new(ranges: &[Range]) -> Self {
        Self(ranges.iter().copied().filter(|(_, prefix)| *prefix > 0).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let networks: Vec<_> = self.0.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
        f.write_str(&networks.join(", "))
    }
}

/// Networks to which an agent has added a route of type `kind`.
fn present(netlink: &mut Netlink, kind: RouteType) -> io::Result<Networks> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let range =
        |answer| if let RouteNetlinkMessage::NewRoute(route) = answer { ours(&route, kind) } else { None };
    Ok(Networks(answers.into_iter().filter_map(range).collect()))
}

/// The destination of `route` if an agent has added this route and the route is of type `kind`, else `None`.
fn ours(route: &RouteMessage, kind: RouteType) -> Option<Range> {
    (route.header.protocol == PROTOCOL && route.header.kind == kind).then(|| destination(route))?
}

/// The network that a route leads to; `None` for a default route.
pub(crate) fn destination(route: &RouteMessage) -> Option<Range> {
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

/// Adds a route. Returns false if the table already has a route to the same network with the same metric, of whatever
/// origin.
pub(crate) fn add(netlink: &mut Netlink, route: RouteMessage) -> io::Result<bool> {
    match netlink.execute(RouteNetlinkMessage::NewRoute(route), NLM_F_CREATE | NLM_F_EXCL) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        result => result.map(|()| true),
    }
}

/// Removes a route if it exists.
pub(crate) fn remove(netlink: &mut Netlink, route: RouteMessage) -> io::Result<()> {
    match netlink.execute(RouteNetlinkMessage::DelRoute(route), 0) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        result => result,
    }
}

/// A route to this network, without a next hop.
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
