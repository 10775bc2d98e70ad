//! Watches the devices, addresses, routes and policy rules of this network namespace.

use std::{io, time::Duration};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::{Interest, unix::AsyncFd};
use tracing::debug;

use crate::{
    error::DatapathError,
    net::{
        devices::{Device, DevicePatterns, classify},
        netlink::{Netlink, events, read_pending},
        network::{self, Addresses, Link, Network, Routes},
        routing,
    },
};

/// How long to wait for further events after the first one: the setup of one pod's device causes a dozen events.
const SETTLE: Duration = Duration::from_millis(5);

/// Watches devices, addresses, routes and policy rules. Each list is read again only after an event that may change it,
/// so that a node with a million routes does not list them for every pod.
#[derive(Debug)]
pub struct DeviceWatcher {
    events: AsyncFd<Socket>,
    netlink: Netlink,
    patterns: DevicePatterns,
    stale: Stale,
    links: Vec<Link>,
    addresses: Addresses,
    /// See [`Network::removals`].
    removals: u64,
    routes: Routes,
    has_only_default_rules: bool,
}

/// Which of the lists must be read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Stale {
    links: bool,
    addresses: bool,
    /// Whether an address that is not an IPv6 link-local one was removed since the list of addresses was read.
    removed: bool,
    routes: bool,
    rules: bool,
}

impl Stale {
    const NOTHING: Self =
        Self { links: false, addresses: false, removed: false, routes: false, rules: false };
    const EVERYTHING: Self = Self { links: true, addresses: true, removed: true, routes: true, rules: true };

    /// Marks a list as stale if an event in the datagram may change it. Ignores a route that
    /// is no default route and whose next hop depends only on the destination.
    fn note(&mut self, datagram: &[u8]) {
        for (header, payload) in events(datagram) {
            match header.kind {
                libc::RTM_NEWLINK | libc::RTM_DELLINK => self.links = true,
                libc::RTM_NEWADDR => self.addresses = true,
                libc::RTM_DELADDR => {
                    // No flow is masqueraded with an IPv6 link-local address, and the kernel removes such an address
                    // with the device of each pod. (Byte 0 of an address message is the family, byte 3 the scope.)
                    let is_ipv6 = payload.first().copied().map(i32::from) == Some(libc::AF_INET6);
                    let is_link_local = is_ipv6 && payload.get(3) == Some(&libc::RT_SCOPE_LINK);
                    (self.addresses, self.removed) = (true, self.removed || !is_link_local);
                }
                libc::RTM_NEWRULE | libc::RTM_DELRULE => self.rules = true,
                libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
                    // The second byte of a route message is the prefix length of the destination.
                    let is_default = payload.get(1) == Some(&0);
                    self.routes |= is_default || !routing::event_is_by_destination(payload);
                }
                _ => {}
            }
        }
    }
}

impl DeviceWatcher {
    /// Starts to watch the network namespace of this thread. Must be called within a Tokio runtime.
    pub fn open(patterns: DevicePatterns) -> Result<Self, DatapathError> {
        let failed = |error| DatapathError::netlink("watch devices", error);
        let events = subscribe().map_err(failed)?;
        // SAFETY: the socket keeps its descriptor until it is dropped, and nothing else closes it.
        let events = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) };
        Ok(Self {
            events: events.map_err(|error| failed(error.into()))?,
            netlink: Netlink::open().map_err(failed)?,
            patterns,
            stale: Stale::EVERYTHING,
            links: Vec::new(),
            addresses: Addresses::new(),
            removals: 0,
            routes: Routes::default(),
            has_only_default_rules: false,
        })
    }

    /// The present devices, addresses and default routes, and whether next hops depend only on destinations.
    pub fn network(&mut self) -> Result<Network, DatapathError> {
        let netlink = &mut self.netlink;
        if self.stale.links {
            self.links =
                network::links(netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
            self.stale.links = false;
        }
        if self.stale.addresses {
            self.addresses = network::addresses(netlink)
                .map_err(|error| DatapathError::netlink("list addresses", error))?;
            self.removals += u64::from(self.stale.removed);
            (self.stale.addresses, self.stale.removed) = (false, false);
        }
        if self.stale.routes {
            self.routes =
                network::routes(netlink).map_err(|error| DatapathError::netlink("list routes", error))?;
            self.stale.routes = false;
        }
        if self.stale.rules {
            self.has_only_default_rules = routing::has_only_default_rules(netlink)
                .map_err(|error| DatapathError::netlink("list policy rules", error))?;
            self.stale.rules = false;
        }
        let by_destination = self.has_only_default_rules && self.routes.by_destination;
        let network =
            Network::new(self.links.clone(), &self.addresses, self.routes.default.clone(), by_destination);
        Ok(Network { removals: self.removals, ..network })
    }

    /// The devices that should have programs.
    pub fn devices(&mut self) -> Result<Vec<Device>, DatapathError> {
        Ok(classify(&self.network()?.links, &self.patterns))
    }

    /// Returns shortly after an event that may change the result of [`Self::network`]. Does not wait for an event if
    /// that function was not called yet, or if its last call failed. Cancel-safe.
    pub async fn changed(&mut self) -> Result<(), DatapathError> {
        while self.stale == Stale::NOTHING {
            let ready = self.events.readable().await;
            let mut ready = ready.map_err(|error| DatapathError::netlink("watch devices", error))?;
            drain(ready.get_inner(), &mut self.stale);
            ready.clear_ready();
        }
        tokio::time::sleep(SETTLE).await;
        drain(self.events.get_ref(), &mut self.stale);
        Ok(())
    }
}

/// The devices that should have programs, for commands that do not watch.
pub fn detect_devices(patterns: &DevicePatterns) -> Result<Vec<Device>, DatapathError> {
    Network::read()
        .map(|network| classify(&network.links, patterns))
        .map_err(|error| DatapathError::netlink("list devices", error))
}

/// Multicast groups `RTNLGRP_IPV4_RULE` (8) and `RTNLGRP_IPV6_RULE` (19), as bits of `sockaddr_nl`.
const RULES: u32 = 1 << (8 - 1) | 1 << (19 - 1);

fn subscribe() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.set_non_blocking(true)?;
    let groups = [
        libc::RTMGRP_LINK,
        libc::RTMGRP_IPV4_IFADDR,
        libc::RTMGRP_IPV6_IFADDR,
        libc::RTMGRP_IPV4_ROUTE,
        libc::RTMGRP_IPV6_ROUTE,
    ];
    let groups = groups.into_iter().fold(RULES, |all, group| all | group.cast_unsigned());
    socket.bind(&SocketAddr::new(0, groups))?;
    Ok(socket)
}

/// Reads all pending events. Marks as stale each list that one of the events may change.
fn drain(events: &Socket, stale: &mut Stale) {
    match read_pending(events, |datagram| stale.note(datagram)) {
        Ok(false) => return,
        Ok(true) => debug!("reading everything again: the kernel has dropped events"),
        Err(error) => debug!("reading everything again: {error}"),
    }
    *stale = Stale::EVERYTHING;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        bytes[..4].copy_from_slice(&u32::try_from(16 + payload.len()).unwrap().to_ne_bytes());
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn events_of_other_routes_are_ignored() {
        let mut stale = Stale::NOTHING;
        let route = |prefix| [&[2, prefix, 0, 0, 254, 0, 0, 7, 0, 0, 0, 0][..], &[0; 4]].concat();
        stale.note(&event(libc::RTM_NEWROUTE, &route(24)));
        assert_eq!(stale, Stale::NOTHING);
        stale.note(&event(libc::RTM_DELROUTE, &route(0)));
        assert_eq!(stale, Stale { routes: true, ..Stale::NOTHING });
        stale.note(&[event(libc::RTM_NEWADDR, &[0; 8]), event(libc::RTM_DELLINK, &[0; 16])].concat());
        stale.note(&event(libc::RTM_DELRULE, &[0; 12]));
        assert_eq!(stale, Stale { removed: false, ..Stale::EVERYTHING });
        let address = |scope| [10, 64, 0, scope, 0, 0, 0, 7];
        stale.note(&event(libc::RTM_DELADDR, &address(libc::RT_SCOPE_LINK)));
        assert_eq!(stale, Stale { removed: false, ..Stale::EVERYTHING }, "link-local");
        stale.note(&event(libc::RTM_DELADDR, &address(libc::RT_SCOPE_UNIVERSE)));
        assert_eq!(stale, Stale::EVERYTHING);
    }
}
