//! The devices of this network namespace, now and whenever they change.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    time::Duration,
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAttribute, RouteMessage, RouteType},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::{Interest, unix::AsyncFd};
use tracing::debug;

use super::{
    devices::{Device, DevicePatterns, Link, classify},
    error::DatapathError,
    netlink::{Netlink, events},
};

/// How long further events are awaited after the first: setting up one pod's device makes a dozen.
const SETTLE: Duration = Duration::from_millis(5);

/// Watches links, addresses and default routes. What is read once is kept until an event says that it changed, so
/// that a machine with a million routes does not list them for every pod.
#[derive(Debug)]
pub struct DeviceWatcher {
    events: AsyncFd<Socket>,
    netlink: Netlink,
    patterns: DevicePatterns,
    stale: Stale,
    links: Vec<Link>,
    addresses: BTreeMap<u32, Vec<(IpAddr, u8)>>,
    default_routes: BTreeSet<u32>,
}

/// What must be read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Stale {
    links: bool,
    addresses: bool,
    routes: bool,
}

impl Stale {
    const NOTHING: Self = Self { links: false, addresses: false, routes: false };
    const EVERYTHING: Self = Self { links: true, addresses: true, routes: true };

    /// Notes the events of a datagram.
    fn note(&mut self, datagram: &[u8]) {
        for (header, payload) in events(datagram) {
            match header.kind {
                libc::RTM_NEWLINK | libc::RTM_DELLINK => self.links = true,
                libc::RTM_NEWADDR | libc::RTM_DELADDR => self.addresses = true,
                // The second byte of a route message is the length of the destination's prefix.
                libc::RTM_NEWROUTE | libc::RTM_DELROUTE if payload.get(1) == Some(&0) => self.routes = true,
                _ => {}
            }
        }
    }
}

impl DeviceWatcher {
    /// Starts to watch the network namespace of this thread. Must be called within a tokio runtime.
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
            addresses: BTreeMap::new(),
            default_routes: BTreeSet::new(),
        })
    }

    /// The devices that should have programs now.
    pub fn devices(&mut self) -> Result<Vec<Device>, DatapathError> {
        let netlink = &mut self.netlink;
        if self.stale.links {
            self.links = links(netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
            self.stale.links = false;
        }
        if self.stale.addresses {
            self.addresses =
                addresses(netlink).map_err(|error| DatapathError::netlink("list addresses", error))?;
            self.stale.addresses = false;
        }
        if self.stale.routes {
            self.default_routes =
                default_routes(netlink).map_err(|error| DatapathError::netlink("list routes", error))?;
            self.stale.routes = false;
        }
        for link in &mut self.links {
            link.addresses = self.addresses.get(&link.index).cloned().unwrap_or_default();
            link.default_route = self.default_routes.contains(&link.index);
        }
        Ok(classify(&self.links, &self.patterns))
    }

    /// Returns soon after something changed that [`Self::devices`] depends on. May be cancelled.
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

/// The devices that should have programs now, for commands that look once.
pub fn detect_devices(patterns: &DevicePatterns) -> Result<Vec<Device>, DatapathError> {
    let read = || -> io::Result<Vec<Link>> {
        let mut netlink = Netlink::open()?;
        let mut found = links(&mut netlink)?;
        let (mut addresses, routes) = (addresses(&mut netlink)?, default_routes(&mut netlink)?);
        for link in &mut found {
            link.addresses = addresses.remove(&link.index).unwrap_or_default();
            link.default_route = routes.contains(&link.index);
        }
        Ok(found)
    };
    read()
        .map(|links| classify(&links, patterns))
        .map_err(|error| DatapathError::netlink("list devices", error))
}

/// The indices and names of all devices.
pub(super) fn names(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, String>> {
    Ok(links(netlink)?.into_iter().map(|link| (link.index, link.name)).collect())
}

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
    let groups = groups.into_iter().fold(0, |all, group| all | group.cast_unsigned());
    socket.bind(&SocketAddr::new(0, groups))?;
    Ok(socket)
}

/// Reads all events there are.
fn drain(events: &Socket, stale: &mut Stale) {
    loop {
        match events.recv_from_full() {
            Ok((datagram, _)) => stale.note(&datagram),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // ENOBUFS: events were lost.
                debug!("reading everything again: {error}");
                *stale = Stale::EVERYTHING;
                return;
            }
        }
    }
}

fn links(netlink: &mut Netlink) -> io::Result<Vec<Link>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    Ok(answers
        .into_iter()
        .filter_map(
            |answer| if let RouteNetlinkMessage::NewLink(message) = answer { link(&message) } else { None },
        )
        .collect())
}

fn link(message: &LinkMessage) -> Option<Link> {
    let (mut name, mut is_pair, mut peer_namespace) = (None, false, false);
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(text) = attribute {
            name = Some(text.clone());
        } else if let LinkAttribute::LinkNetNsId(_) = attribute {
            peer_namespace = true;
        } else if let LinkAttribute::LinkInfo(infos) = attribute {
            is_pair =
                infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Veth | InfoKind::Netkit)));
        }
    }
    Some(Link {
        index: message.header.index,
        name: name?,
        hardware: message.header.link_layer_type.into(),
        loopback: message.header.flags.contains(LinkFlags::Loopback),
        peer_elsewhere: is_pair && peer_namespace,
        addresses: Vec::new(),
        default_route: false,
    })
}

/// Addresses of global scope by interface index.
fn addresses(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, Vec<(IpAddr, u8)>>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    let mut addresses: BTreeMap<u32, Vec<(IpAddr, u8)>> = BTreeMap::new();
    for answer in answers {
        let RouteNetlinkMessage::NewAddress(message) = answer else { continue };
        if message.header.scope != AddressScope::Universe {
            continue;
        }
        let (mut local, mut address) = (None, None);
        for attribute in &message.attributes {
            if let AddressAttribute::Local(ip) = attribute {
                local = Some(*ip);
            } else if let AddressAttribute::Address(ip) = attribute {
                address = Some(*ip);
            }
        }
        // Where both are there, ADDRESS is the far end of a point-to-point link.
        if let Some(address) = local.or(address) {
            let of_link = addresses.entry(message.header.index).or_default();
            of_link.push((address, message.header.prefix_len));
        }
    }
    Ok(addresses)
}

/// The devices that default routes of any table lead through.
fn default_routes(netlink: &mut Netlink) -> io::Result<BTreeSet<u32>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let mut devices = BTreeSet::new();
    for answer in answers {
        let RouteNetlinkMessage::NewRoute(message) = answer else { continue };
        let RouteMessage { header, attributes, .. } = &message;
        if header.destination_prefix_length != 0 || header.kind != RouteType::Unicast {
            continue;
        }
        for attribute in attributes {
            if let RouteAttribute::Oif(index) = attribute {
                devices.insert(*index);
            } else if let RouteAttribute::MultiPath(hops) = attribute {
                devices.extend(hops.iter().map(|hop| hop.interface_index));
            }
        }
    }
    Ok(devices)
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
    fn only_default_routes_matter() {
        let mut stale = Stale::NOTHING;
        stale.note(&event(libc::RTM_NEWROUTE, &[2, 24, 0, 0]));
        assert_eq!(stale, Stale::NOTHING);
        stale.note(&event(libc::RTM_DELROUTE, &[10, 0, 0, 0]));
        assert_eq!(stale, Stale { routes: true, ..Stale::NOTHING });
        stale.note(&[event(libc::RTM_NEWADDR, &[0; 8]), event(libc::RTM_DELLINK, &[0; 16])].concat());
        assert_eq!(stale, Stale::EVERYTHING);
    }
}
