//! Looks up routes of packets that this node sends, in the present routing and neighbour tables.

use std::{collections::BTreeMap, fs, io, net::IpAddr, sync::OnceLock};

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

/// The kernel's route to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the interface that packets leave through.
    pub device: u32,
    /// Source address that the node would use. [`Routes::look_up`] sets it only if `bpf_fib_lookup` reports it to
    /// programs (kernel 6.7 and newer).
    pub source: Option<IpAddr>,
    /// MTU of the route: size of the largest IP packet in bytes.
    pub mtu: u32,
    /// Whether the neighbour table has the hardware address of the next hop.
    pub neighbour: bool,
}

/// Looks up routes in the network namespace of the thread that opened this value.
#[derive(Debug)]
pub struct Routes {
    netlink: Netlink,
    /// Names and MTUs (in bytes) of devices, by interface index.
    devices: BTreeMap<u32, (String, u32)>,
}

impl Routes {
    /// Opens a netlink socket and lists the devices once.
    ///
    /// # Errors
    /// The kernel does not answer over netlink.
    pub fn open() -> Result<Self, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let links =
            network::links(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let devices = links.into_iter().map(|link| (link.index, (link.name, link.mtu))).collect();
        Ok(Self { netlink, devices })
    }

    /// Index of the interface with this name.
    pub fn device(&self, name: &str) -> Option<u32> {
        self.devices.iter().find(|(_, (of, _))| of == name).map(|(index, _)| *index)
    }

    /// Name of the interface with this index.
    pub fn name(&self, index: u32) -> Option<&str> {
        self.devices.get(&index).map(|(name, _)| name.as_str())
    }

    /// Names of all interfaces.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.values().map(|(name, _)| name.as_str())
    }

    /// Whether the address is one of this node's own.
    ///
    /// # Errors
    /// The kernel does not answer over netlink.
    pub fn is_own(&mut self, address: IpAddr) -> Result<bool, DatapathError> {
        let addresses = network::addresses(&mut self.netlink)
            .map_err(|error| DatapathError::netlink("list addresses", error))?;
        Ok(addresses.values().flatten().any(|of| of.ip == address))
    }

    /// Whether packets to the address end on this node: the address is one of the node's own, or there is a local route
    /// to it.
    ///
    /// # Errors
    /// The kernel does not answer over netlink.
    pub fn is_local(&mut self, address: IpAddr) -> Result<bool, DatapathError> {
        let is_local_route = |answer: &RouteNetlinkMessage| matches!(answer, RouteNetlinkMessage::NewRoute(message) if message.header.kind == RouteType::Local);
        Ok(self.is_own(address)? || self.ask(address)?.iter().any(is_local_route))
    }

    /// The route to `to`, an address of another machine or pod, for packets that entered through the device `entrance`.
    /// `None` if there is no route, if `to` is an address of this node, or if the device does not forward. Ignores
    /// policy rules that match more than the destination.
    ///
    /// # Errors
    /// The kernel does not answer over netlink.
    pub fn look_up(&mut self, entrance: u32, to: IpAddr) -> Result<Option<Route>, DatapathError> {
        if !self.forwards(entrance, to)? {
            return Ok(None);
        }
        let route = self.to(to)?;
        let source = |route: Route| route.source.filter(|_| programs_see_sources());
        Ok(route.map(|route| Route { source: source(route), ..route }))
    }

    /// The route for packets that the node itself sends to `to`; `None` if the address is unreachable or is one of the
    /// node's own.
    ///
    /// # Errors
    /// The kernel does not answer over netlink.
    pub fn to(&mut self, to: IpAddr) -> Result<Option<Route>, DatapathError> {
        let found = self.ask(to)?.into_iter().find_map(|answer| {
            if let RouteNetlinkMessage::NewRoute(message) = answer { hop(&message) } else { None }
        });
        let Some((mut route, gateway)) = found else { return Ok(None) };
        if route.mtu == 0 {
            route.mtu = self.devices.get(&route.device).map_or(0, |(_, mtu)| *mtu);
        }
        route.neighbour = self.is_known(route.device, gateway.unwrap_or(to))?;
        Ok(Some(route))
    }

    /// The kernel's messages about the route to an address; empty if the address is unreachable.
    fn ask(&mut self, to: IpAddr) -> Result<Vec<RouteNetlinkMessage>, DatapathError> {
        match self.netlink.get(RouteNetlinkMessage::GetRoute(question(to))) {
            Err(error) if is_no_route(&error) => Ok(Vec::new()),
            answers => {
                answers.map_err(|error| DatapathError::netlink(format!("look up the route to {to}"), error))
            }
        }
    }

    fn forwards(&self, device: u32, to: IpAddr) -> Result<bool, DatapathError> {
        let Some(name) = self.name(device) else { return Ok(false) };
        let family = if to.is_ipv4() { "ipv4" } else { "ipv6" };
        let path = format!("/proc/sys/net/{family}/conf/{name}/forwarding");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim() != "0"),
            // The device is gone, or the kernel does not have the address family.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(DatapathError::file("read", path, error)),
        }
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

/// Whether `bpf_fib_lookup` reports source addresses (kernel 6.7 and newer). True if the probe cannot run, for example
/// without the privilege to load programs, because most kernels report them.
fn programs_see_sources() -> bool {
    static SEEN: OnceLock<bool> = OnceLock::new();
    *SEEN.get_or_init(|| probe::takes_route_flags(probe::SOURCE).unwrap_or(true))
}

/// Whether the error means that there is no route to the address. The first five errors are those of `fib_props` and
/// `ip6_rt_type_to_error`, for no route and for routes of type `unreachable`, `prohibit`, `blackhole` and `throw`. A
/// kernel without IPv6 returns one of the last two errors.
fn is_no_route(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENETUNREACH
                | libc::EHOSTUNREACH
                | libc::EACCES
                | libc::EINVAL
                | libc::EAGAIN
                | libc::EAFNOSUPPORT
                | libc::EOPNOTSUPP
        )
    )
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

/// The route that a message describes, and its gateway. The route's MTU is 0 if the message has no MTU.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_routes_are_no_route() {
        for code in [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL] {
            assert!(is_no_route(&io::Error::from_raw_os_error(code)), "{code}");
        }
        for code in [libc::ENOBUFS, libc::EPERM, libc::ENOMEM] {
            assert!(!is_no_route(&io::Error::from_raw_os_error(code)), "{code}");
        }
    }
}
