//! The ways that packets take from this node, as the routing table and the neighbours say now.

use std::{collections::BTreeMap, fs, net::IpAddr, sync::OnceLock};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType},
};

use crate::{
    bpf::probe,
    error::DatapathError,
    net::{netlink::Netlink, network},
};

/// The way to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Interface index of the device that leads there.
    pub device: u32,
    /// The address that the node itself would speak from; of [`Routes::look_up`] only where the kernel tells it to programs, too.
    pub source: Option<IpAddr>,
    /// Octets of the largest packet that goes this way.
    pub mtu: u32,
    /// Whether the next hop's hardware address is known.
    pub neighbour: bool,
}

/// Who is asked for them.
#[derive(Debug)]
pub struct Routes {
    netlink: Netlink,
    /// Names and MTUs of devices.
    devices: BTreeMap<u32, (String, u32)>,
}

impl Routes {
    /// Looks at the devices of the network namespace of this thread.
    ///
    /// # Errors
    /// Netlink does not answer.
    pub fn open() -> Result<Self, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let links =
            network::links(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let devices = links.into_iter().map(|link| (link.index, (link.name, link.mtu))).collect();
        Ok(Self { netlink, devices })
    }

    /// The interface index of a device.
    pub fn device(&self, name: &str) -> Option<u32> {
        self.devices.iter().find(|(_, (of, _))| of == name).map(|(index, _)| *index)
    }

    /// The name of a device.
    pub fn name(&self, index: u32) -> Option<&str> {
        self.devices.get(&index).map(|(name, _)| name.as_str())
    }

    /// The names of all devices.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.values().map(|(name, _)| name.as_str())
    }

    /// Whether the address is one of this node's own.
    ///
    /// # Errors
    /// Netlink does not answer.
    pub fn is_own(&mut self, address: IpAddr) -> Result<bool, DatapathError> {
        let addresses = network::addresses(&mut self.netlink)
            .map_err(|error| DatapathError::netlink("list addresses", error))?;
        Ok(addresses.values().flatten().any(|of| of.ip == address))
    }

    /// The way that packets which came in through `entrance` take to another machine or pod; none where there is none, where
    /// they are for this node, or where that device forwards nothing. (Rules that look at more than the destination are not
    /// asked.)
    ///
    /// # Errors
    /// Netlink does not answer.
    pub fn look_up(&mut self, entrance: u32, to: IpAddr) -> Result<Option<Route>, DatapathError> {
        if !self.forwards(entrance, to) {
            return Ok(None);
        }
        let route = self.to(to)?;
        let source = |route: Route| route.source.filter(|_| programs_are_told_sources());
        Ok(route.map(|route| Route { source: source(route), ..route }))
    }

    /// The way that packets of the node itself take.
    ///
    /// # Errors
    /// Netlink does not answer.
    pub fn to(&mut self, to: IpAddr) -> Result<Option<Route>, DatapathError> {
        let answers = match self.netlink.ask(RouteNetlinkMessage::GetRoute(question(to))) {
            Ok(answers) => answers,
            // Unreachable, prohibited, blackhole.
            Err(_) => return Ok(None),
        };
        let found = answers.into_iter().find_map(|answer| {
            if let RouteNetlinkMessage::NewRoute(message) = answer { hop(&message) } else { None }
        });
        let Some((mut route, gateway)) = found else { return Ok(None) };
        if route.mtu == 0 {
            route.mtu = self.devices.get(&route.device).map_or(0, |(_, mtu)| *mtu);
        }
        route.neighbour = self.is_known(route.device, gateway.unwrap_or(to))?;
        Ok(Some(route))
    }

    fn forwards(&self, device: u32, to: IpAddr) -> bool {
        let Some(name) = self.name(device) else { return false };
        let family = if to.is_ipv4() { "ipv4" } else { "ipv6" };
        let path = format!("/proc/sys/net/{family}/conf/{name}/forwarding");
        fs::read_to_string(path).is_ok_and(|text| text.trim() != "0")
    }

    fn is_known(&mut self, device: u32, hop: IpAddr) -> Result<bool, DatapathError> {
        let mut request = NeighbourMessage::default();
        request.header.family = family(hop);
        let answers = self
            .netlink
            .dump(&RouteNetlinkMessage::GetNeighbour(request))
            .map_err(|error| DatapathError::netlink("list neighbours", error))?;
        Ok(answers.iter().any(|answer| {
            let RouteNetlinkMessage::NewNeighbour(message) = answer else { return false };
            message.header.ifindex == device && is_valid(message.header.state) && is_of(message, hop)
        }))
    }
}

/// Whether programs are told from which address the node would speak (6.7 and newer). Where that cannot be found out it is so: most
/// kernels are newer.
fn programs_are_told_sources() -> bool {
    static TOLD: OnceLock<bool> = OnceLock::new();
    *TOLD.get_or_init(|| probe::takes_route_flags(probe::SOURCE).unwrap_or(true))
}

const fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn question(to: IpAddr) -> RouteMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = family(to);
    let (address, length) = match to {
        IpAddr::V4(v4) => (RouteAddress::Inet(v4), 32),
        IpAddr::V6(v6) => (RouteAddress::Inet6(v6), 128),
    };
    request.header.destination_prefix_length = length;
    request.attributes.push(RouteAttribute::Destination(address));
    request
}

/// The way that an answer describes, and the gateway on it; the MTU is 0 where it is the device's.
fn hop(message: &RouteMessage) -> Option<(Route, Option<IpAddr>)> {
    if message.header.kind != RouteType::Unicast {
        return None;
    }
    let mut route = Route { device: 0, source: None, mtu: 0, neighbour: false };
    let mut gateway = None;
    for attribute in &message.attributes {
        if let RouteAttribute::Oif(index) = attribute {
            route.device = *index;
        } else if let RouteAttribute::PrefSource(address) = attribute {
            route.source = ip(address);
        } else if let RouteAttribute::Gateway(address) = attribute {
            gateway = ip(address);
        } else if let RouteAttribute::Metrics(metrics) = attribute {
            let mtu =
                metrics.iter().find_map(|m| if let RouteMetric::Mtu(mtu) = m { Some(*mtu) } else { None });
            route.mtu = mtu.unwrap_or(0);
        }
    }
    (route.device != 0).then_some((route, gateway))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    if let RouteAddress::Inet(v4) = address {
        return Some((*v4).into());
    }
    if let RouteAddress::Inet6(v6) = address { Some((*v6).into()) } else { None }
}

const fn is_valid(state: NeighbourState) -> bool {
    matches!(
        state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Noarp
            | NeighbourState::Permanent
    )
}

fn is_of(message: &NeighbourMessage, hop: IpAddr) -> bool {
    message.attributes.iter().any(|attribute| match (attribute, hop) {
        (NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)), IpAddr::V4(hop)) => *v4 == hop,
        (NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)), IpAddr::V6(hop)) => *v6 == hop,
        _ => false,
    })
}
