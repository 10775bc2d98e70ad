//! Routes to announced addresses, for a BGP daemon on this node: in a table of their own, which no rule refers to, so that
//! packets never use them. Their type is `blackhole`: BIRD and FRR overlook routes of type `local`.

use std::{collections::BTreeSet, io, net::IpAddr};

use lb_core::announce::bgp::PROTOCOL;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};

use crate::{
    error::DatapathError,
    net::{
        netlink::Netlink,
        our_routes::{self, Range},
    },
};

/// The table of one agent in the network namespace of this thread.
#[derive(Clone, Copy, Debug)]
pub struct AnnouncedRoutes {
    table: u32,
}

impl AnnouncedRoutes {
    /// The routes in this table.
    pub const fn new(table: u32) -> Self {
        Self { table }
    }

    /// Adds the routes that are missing, and removes our others. Asks the kernel each time, so that it notices what a fence
    /// or other software has removed. Returns how many routes it has added and removed.
    ///
    /// # Errors
    /// The kernel refuses a route. The next call tries again.
    pub fn keep(&self, wanted: &BTreeSet<(IpAddr, u8)>) -> Result<(usize, usize), DatapathError> {
        let update = || {
            let mut netlink = Netlink::open()?.filter_dumps()?;
            let present = self.present(&mut netlink)?;
            let (missing, surplus): (Vec<_>, Vec<_>) =
                (wanted.difference(&present).collect(), present.difference(wanted).collect());
            missing.iter().try_for_each(|range| our_routes::add(&mut netlink, route(**range, self.table)))?;
            surplus
                .iter()
                .try_for_each(|range| our_routes::remove(&mut netlink, route(**range, self.table)))?;
            Ok((missing.len(), surplus.len()))
        };
        update().map_err(|error| {
            DatapathError::netlink(format!("update the announced routes in table {}", self.table), error)
        })
    }

    /// Removes all announced routes outside of `table`: those of an agent with another setting.
    ///
    /// # Errors
    /// The kernel refuses to list or to remove routes.
    pub fn remove_others(table: Option<u32>) -> Result<(), DatapathError> {
        let remove = || {
            let mut netlink = Netlink::open()?.filter_dumps()?;
            for (of, range) in list(&mut netlink, None)?.into_iter().filter(|(of, _)| Some(*of) != table) {
                our_routes::remove(&mut netlink, route(range, of))?;
            }
            Ok(())
        };
        remove().map_err(|error| DatapathError::netlink("remove announced routes", error))
    }

    fn present(&self, netlink: &mut Netlink) -> io::Result<BTreeSet<Range>> {
        let routes = list(netlink, Some(self.table))?;
        Ok(routes.into_iter().filter(|(table, _)| *table == self.table).map(|(_, range)| range).collect())
    }
}

/// The announced routes with their tables.
fn list(netlink: &mut Netlink, table: Option<u32>) -> io::Result<Vec<(u32, Range)>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.protocol = RouteProtocol::from(PROTOCOL);
        request.attributes.extend(table.map(RouteAttribute::Table));
        for answer in netlink.dump(&RouteNetlinkMessage::GetRoute(request))? {
            let RouteNetlinkMessage::NewRoute(route) = answer else { continue };
            if route.header.protocol == RouteProtocol::from(PROTOCOL)
                && route.header.kind == RouteType::BlackHole
            {
                found.extend(our_routes::destination(&route).map(|range| (table_of(&route), range)));
            }
        }
    }
    Ok(found)
}

fn table_of(route: &RouteMessage) -> u32 {
    let attribute = route
        .attributes
        .iter()
        .find_map(|attribute| if let RouteAttribute::Table(table) = attribute { Some(*table) } else { None });
    attribute.unwrap_or_else(|| route.header.table.into())
}

fn route(range: Range, table: u32) -> RouteMessage {
    let mut route = our_routes::route(range, RouteType::BlackHole, 0);
    route.header.table = RouteHeader::RT_TABLE_UNSPEC;
    route.header.protocol = RouteProtocol::from(PROTOCOL);
    route.attributes.push(RouteAttribute::Table(table));
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_read_from_the_attribute() {
        let range = ("203.0.113.1".parse().unwrap(), 32);
        let route = route(range, 1080);
        assert_eq!((table_of(&route), our_routes::destination(&route)), (1080, Some(range)));
    }
}
