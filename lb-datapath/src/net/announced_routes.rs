//! Routes to announced addresses, for a BGP daemon on this node, in a table of their own. Their type is `blackhole` for
//! two reasons: BIRD and FRR ignore routes of type `local`, and the kernel must drop packets that no program translates
//! (see [`announced_rule`]).

use std::{collections::BTreeSet, io};

use lb_core::announce::bgp::PROTOCOL;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};

use crate::{
    error::DatapathError,
    net::{
        announced_rule,
        netlink::Netlink,
        our_routes::{self, Range},
    },
};

/// The routes that one agent has written to a routing table, in the network namespace of this thread.
#[derive(Clone, Copy, Debug)]
pub struct AnnouncedRoutes {
    table: u32,
}

impl AnnouncedRoutes {
    /// Manages the routes in the routing table with this number.
    pub const fn new(table: u32) -> Self {
        Self { table }
    }

    /// The announced routes in the table.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    pub fn present(&self) -> Result<BTreeSet<Range>, DatapathError> {
        let list = || self.list(&mut Netlink::open()?.filter_dumps()?);
        list().map_err(|error| DatapathError::netlink(self.what("list"), error))
    }

    /// Removes our routes that are not `kept`, and then adds those that are `wanted` and missing. Each call lists the
    /// present routes, so it also restores routes that the fence process or other software has removed. If the kernel
    /// refuses to add or remove a route, the call still changes the other routes.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    pub fn update(
        &self,
        wanted: &BTreeSet<Range>,
        kept: impl Fn(&Range) -> bool,
    ) -> Result<RouteUpdate, DatapathError> {
        let mut netlink = Netlink::open()
            .and_then(Netlink::filter_dumps)
            .map_err(|error| DatapathError::netlink(self.what("update"), error))?;
        let present =
            self.list(&mut netlink).map_err(|error| DatapathError::netlink(self.what("list"), error))?;
        let mut done = RouteUpdate { present: present.clone(), ..RouteUpdate::default() };
        for range in present.iter().filter(|range| !kept(range)) {
            match our_routes::remove(&mut netlink, route(*range, self.table)) {
                Ok(()) => {
                    done.removed += 1;
                    done.present.remove(range);
                }
                Err(error) => done.refused.push((*range, format!("cannot remove the route: {error}"))),
            }
        }
        for range in wanted.difference(&present) {
            match our_routes::add(&mut netlink, route(*range, self.table)) {
                Ok(true) => {
                    done.added += 1;
                    done.present.insert(*range);
                }
                Ok(false) => {
                    let why =
                        format!("table {} has a route of other software for it; remove that", self.table);
                    done.refused.push((*range, why));
                }
                Err(error) => done.refused.push((*range, format!("cannot add the route: {error}"))),
            }
        }
        Ok(done)
    }

    /// Adds the rule by which the kernel looks up forwarded packets in the table, unless it exists. The kernel drops
    /// packets for which the table has a route, because all routes of the table are of type `blackhole`; for other
    /// packets the kernel goes on to the next rule.
    ///
    /// # Errors
    /// The kernel refuses the rule.
    pub fn guard(&self) -> Result<(), DatapathError> {
        let add = || announced_rule::add(&mut Netlink::open()?, self.table);
        add().map_err(|error| DatapathError::netlink(format!("add a rule for table {}", self.table), error))
    }

    /// Removes all announced routes of the table, and the rule for the table. Returns the number of removed routes.
    ///
    /// # Errors
    /// The kernel refuses to list or to remove a route, or to remove the rule.
    pub fn release(&self) -> Result<usize, DatapathError> {
        let removed = self.clear()?;
        let remove = || announced_rule::remove(&mut Netlink::open()?, self.table);
        remove().map_err(|error| {
            DatapathError::netlink(format!("remove the rule for table {}", self.table), error)
        })?;
        Ok(removed)
    }

    /// Removes all announced routes of the table. Returns the number of removed routes.
    ///
    /// # Errors
    /// The kernel refuses to list or to remove a route.
    pub fn clear(&self) -> Result<usize, DatapathError> {
        let RouteUpdate { removed, refused, .. } = self.update(&BTreeSet::new(), |_| false)?;
        match refused.into_iter().next() {
            Some((_, why)) => Err(DatapathError::netlink(self.what("remove"), io::Error::other(why))),
            None => Ok(removed),
        }
    }

    /// Removes the announced routes and rules of all tables.
    ///
    /// # Errors
    /// The kernel refuses to list or to remove routes or rules.
    pub fn release_all() -> Result<(), DatapathError> {
        let list = || {
            let mut netlink = Netlink::open()?.filter_dumps()?;
            let with_routes = list(&mut netlink, None)?.into_iter().map(|(table, _)| table);
            let with_rules = announced_rule::tables(&mut Netlink::open()?)?;
            Ok(with_routes.chain(with_rules).collect::<BTreeSet<u32>>())
        };
        let tables = list().map_err(|error| DatapathError::netlink("list announced routes", error))?;
        tables.into_iter().try_for_each(|table| Self::new(table).release().map(drop))
    }

    fn what(&self, action: &str) -> String {
        format!("{action} the announced routes in table {}", self.table)
    }

    fn list(&self, netlink: &mut Netlink) -> io::Result<BTreeSet<Range>> {
        let routes = list(netlink, Some(self.table))?;
        Ok(routes.into_iter().filter(|(table, _)| *table == self.table).map(|(_, range)| range).collect())
    }
}

/// What [`AnnouncedRoutes::update`] has done.
#[derive(Debug, Default)]
pub struct RouteUpdate {
    /// Number of routes that were added.
    pub added: usize,
    /// Number of routes that were removed.
    pub removed: usize,
    /// The announced routes that are in the table now.
    pub present: BTreeSet<Range>,
    /// Routes that the kernel refused to add or remove, each with the reason.
    pub refused: Vec<(Range, String)>,
}

/// The announced routes of `table`, or of all tables if it is `None`; each route comes with its table.
fn list(netlink: &mut Netlink, table: Option<u32>) -> io::Result<Vec<(u32, Range)>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.protocol = RouteProtocol::from(PROTOCOL);
        request.attributes.extend(table.map(RouteAttribute::Table));
        let answers = match netlink.dump(&RouteNetlinkMessage::GetRoute(request)) {
            // The kernel creates a table with its first route.
            Err(error) if table.is_some() && error.kind() == io::ErrorKind::NotFound => continue,
            answers => answers?,
        };
        for answer in answers {
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
