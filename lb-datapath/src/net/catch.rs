//! The catch device, to which the node routes packets to cluster IPs that no program has translated.
//!
//! Normally, programs translate packets to cluster IPs before the node routes them. But if a client's device has no
//! programs (for example, because its pod started while no agent ran), the node routes the client's packets to the
//! catch device, whose programs translate them. The catch device is a bridge without ports, which drops every other
//! packet, so nothing leaks if the programs of the catch device are missing. The agent adds routes to the device only
//! once its programs are attached.
//!
//! All packets of an address family get one next hop, so pods that scan a range of cluster IPs fill no neighbour table.
//! The device has no address resolution (`IFF_NOARP`), so the kernel sends frames with the device's own MAC address as
//! destination, and the device accepts these frames.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteType},
};
use tracing::info;

use crate::{
    error::DatapathError,
    net::{
        netlink::Netlink,
        network::{self, Link},
        our_routes::{self, METRIC, Networks, OurRoutes, Range},
    },
};

/// Name of the catch device. It must not change, because users exclude the device by this name from their network
/// managers.
pub const CATCH_DEVICE: &str = "lb-catch";
/// MTU of the catch device: as large as any packet that another device delivers.
const MTU: u32 = 65_535;
const FLAGS: LinkFlags = LinkFlags::Up.union(LinkFlags::Noarp);
/// Next hops of the routes to the catch device, one per family; no machine has these addresses.
const NEXT_HOP_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 108);
const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x6c);

/// Manages the catch device of one data plane, and the routes to it, in the network namespace of this thread.
#[derive(Debug)]
pub struct CatchDevice {
    routes: OurRoutes,
}

impl Default for CatchDevice {
    fn default() -> Self {
        Self { routes: OurRoutes::new(RouteType::Unicast) }
    }
}

impl CatchDevice {
    /// Adds routes that lead untranslated packets for `ranges` to the device, and removes all other routes to the
    /// device. Creates the device if there is none, and removes it if `ranges` is empty. Every call checks the device
    /// and adds all routes again, so they come back if other software has removed them.
    ///
    /// `served` is the interface index of the catch device to which programs are attached; `None` if there is none. If
    /// the present catch device has another index, this call adds and removes no routes: a device without programs
    /// drops every packet, and would still drop all packets if the agent died.
    ///
    /// # Errors
    /// The kernel refuses the device or a route, or a device of another type has the name [`CATCH_DEVICE`]. The next
    /// call tries again.
    pub fn keep(&mut self, ranges: &[Range], served: Option<u32>) -> Result<(), DatapathError> {
        let networks = Networks::new(ranges);
        let changed = self.update(&networks, served).map_err(|error| {
            DatapathError::netlink(format!("lead cluster IPs to device {CATCH_DEVICE}"), error)
        })?;
        if changed {
            info!(%networks, "device {CATCH_DEVICE} gets untranslated packets");
        }
        Ok(())
    }

    /// Creates or removes the catch device and its routes; returns whether the routed networks have changed.
    fn update(&mut self, networks: &Networks, served: Option<u32>) -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        if networks.is_empty() {
            // The kernel removes the routes together with the device.
            return self.routes.clear(&mut netlink, remove_device);
        }
        let device = device(&mut netlink)?;
        if served != Some(device) {
            return Ok(false);
        }
        self.routes.replace(&mut netlink, networks, |range| route(range, device))
    }

    /// Removes the catch device, and with it the routes to it.
    pub(crate) fn release() -> Result<(), DatapathError> {
        Self::default().keep(&[], None)
    }
}

/// Interface index of the catch device. Creates the device if there is none; repairs one that is down or has another
/// MTU.
fn device(netlink: &mut Netlink) -> io::Result<u32> {
    let found = find(netlink)?;
    if !found.as_ref().is_some_and(|link| link.up && link.mtu == MTU) {
        let flags = if found.is_none() { NLM_F_CREATE | NLM_F_EXCL } else { 0 };
        netlink.execute(RouteNetlinkMessage::NewLink(wanted_link()), flags)?;
    }
    match found {
        Some(link) => Ok(link.index),
        None => Ok(find(netlink)?.ok_or(io::ErrorKind::NotFound)?.index),
    }
}

/// The catch device, if it exists.
///
/// # Errors
/// A device of another type has the name [`CATCH_DEVICE`].
fn find(netlink: &mut Netlink) -> io::Result<Option<Link>> {
    match network::links(netlink)?.into_iter().find(|link| link.name == CATCH_DEVICE) {
        Some(link) if !link.is_catch => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("another device has the name {CATCH_DEVICE}; rename or remove that device"),
        )),
        link => Ok(link),
    }
}

fn remove_device(netlink: &mut Netlink) -> io::Result<()> {
    let Ok(Some(link)) = find(netlink) else { return Ok(()) };
    let mut message = LinkMessage::default();
    message.header.index = link.index;
    match netlink.execute(RouteNetlinkMessage::DelLink(message), 0) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        result => result,
    }
}

fn wanted_link() -> LinkMessage {
    let mut message = LinkMessage::default();
    (message.header.flags, message.header.change_mask) = (FLAGS, FLAGS);
    message.attributes = vec![
        LinkAttribute::IfName(CATCH_DEVICE.to_owned()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
        LinkAttribute::Mtu(MTU),
        LinkAttribute::IfAlias(
            "lb-agent: gets packets to cluster IPs that no program has translated".to_owned(),
        ),
    ];
    message
}

/// The route to the catch device for a network. The network's unreachable route has a higher metric, so the kernel uses
/// the unreachable route only if the catch device is gone.
fn route(range: Range, device: u32) -> RouteMessage {
    let mut route = our_routes::route(range, RouteType::Unicast, METRIC - 1);
    let next_hop = match range.0 {
        IpAddr::V4(_) => RouteAddress::Inet(NEXT_HOP_V4),
        IpAddr::V6(_) => RouteAddress::Inet6(NEXT_HOP_V6),
    };
    route.header.flags = RouteFlags::Onlink;
    route.attributes.extend([RouteAttribute::Gateway(next_hop), RouteAttribute::Oif(device)]);
    route
}
