//! Routes that keep packets to cluster IPs from leaving the node untranslated, for example by its default route.
//!
//! The programs translate such packets before they are routed. Those of a pod whose device has no programs yet, because
//! no agent runs, meet these routes: the pod gets an ICMP error at once, and its packets do not leak.

use std::{collections::BTreeSet, io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use tracing::info;

use crate::{error::DatapathError, net::netlink::Netlink};

/// Marks our routes, as `ip route` shows it: `proto 108` (`rtnetlink(7)`, `rtm_protocol`).
const PROTOCOL: RouteProtocol = RouteProtocol::Other(108);
/// Any other route for the same network takes precedence.
const METRIC: u32 = 1 << 30;

/// Address and prefix length of a network.
type Range = (IpAddr, u8);

/// The routes of one data plane in the network namespace of this thread.
#[derive(Debug, Default)]
pub struct UnreachableRoutes {
    /// The networks with a route of ours; `None` before the first look.
    present: Option<BTreeSet<Range>>,
}

impl UnreachableRoutes {
    /// Makes these networks unreachable, and removes the routes of earlier ones. Each call adds all routes, so a route
    /// that other software has removed comes back.
    ///
    /// # Errors
    /// The kernel refuses a route. The next call tries again.
    pub fn keep(&mut self, ranges: &[Range]) -> Result<(), DatapathError> {
        let failed = |error| DatapathError::netlink("make cluster IPs unreachable", error);
        let mut netlink = Netlink::open().map_err(failed)?;
        let present = match self.present.take() {
            Some(present) => present,
            None => ours(&mut netlink).map_err(failed)?,
        };
        let wanted: BTreeSet<Range> = ranges.iter().copied().filter(|(_, prefix)| *prefix > 0).collect();
        for range in &wanted {
            add(&mut netlink, *range).map_err(failed)?;
        }
        for range in present.difference(&wanted) {
            remove(&mut netlink, *range).map_err(failed)?;
        }
        if wanted != present {
            let networks: Vec<_> = wanted.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
            info!(networks = networks.join(", "), "untranslated packets to these networks are unreachable");
        }
        self.present = Some(wanted);
        Ok(())
    }

    /// Removes all routes that agents have added.
    pub(crate) fn release() -> Result<(), DatapathError> {
        Self::default().keep(&[])
    }
}

/// The networks with a route of an agent.
fn ours(netlink: &mut Netlink) -> io::Result<BTreeSet<Range>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let range =
        |answer| if let RouteNetlinkMessage::NewRoute(route) = answer { ours_of(&route) } else { None };
    Ok(answers.into_iter().filter_map(range).collect())
}

/// The network of a route of an agent.
fn ours_of(route: &RouteMessage) -> Option<Range> {
    if route.header.protocol != PROTOCOL || route.header.kind != RouteType::Unreachable {
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

fn add(netlink: &mut Netlink, range: Range) -> io::Result<()> {
    let request = RouteNetlinkMessage::NewRoute(route(range));
    match netlink.execute(request, NLM_F_CREATE | NLM_F_EXCL) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

fn remove(netlink: &mut Netlink, range: Range) -> io::Result<()> {
    match netlink.execute(RouteNetlinkMessage::DelRoute(route(range)), 0) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        result => result,
    }
}

fn route((ip, prefix): Range) -> RouteMessage {
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
        kind: RouteType::Unreachable,
        ..RouteHeader::default()
    };
    route.attributes = vec![RouteAttribute::Destination(destination), RouteAttribute::Priority(METRIC)];
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_of_agents_are_recognised() {
        let range = ("10.96.0.0".parse().unwrap(), 12);
        assert_eq!(ours_of(&route(range)), Some(range));
        let mut others = route(range);
        others.header.protocol = RouteProtocol::Static;
        assert_eq!(ours_of(&others), None);
        let mut reachable = route(range);
        reachable.header.kind = RouteType::Unicast;
        assert_eq!(ours_of(&reachable), None);
    }
}
