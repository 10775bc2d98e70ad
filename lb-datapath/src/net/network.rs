//! Reads the devices, addresses and default routes of a network namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    fs, io,
    net::{IpAddr, Ipv4Addr},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
};

use crate::{
    error::DatapathError,
    net::{catch, devices::Layer, netlink::Netlink, routing},
};

/// The devices of a network namespace with their addresses, and the default routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The devices, sorted by interface index.
    pub links: Vec<Link>,
    /// Default routes of every routing table; a multipath route appears once for each next hop.
    pub default_routes: Vec<DefaultRoute>,
    /// Whether the next hop of a packet depends only on its destination: there is no policy routing, and no route that
    /// is multipath or applies only to some source addresses or TOS values, see [`routing`].
    pub routes_by_destination: bool,
    /// How often addresses, except IPv6 link-local ones, were removed since the watch began; removals that the agent
    /// notices together count once. An address that comes and goes between two reads leaves no other trace here, but
    /// flows may be masqueraded with it.
    pub removals: u64,
}

/// A network device, as rtnetlink describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Index of the interface.
    pub index: u32,
    /// Name of the interface.
    pub name: String,
    /// Hardware type, an `ARPHRD_` number.
    pub hardware: u16,
    /// Whether the device is a loopback device.
    pub loopback: bool,
    /// Whether the device is administratively up. Addresses of a device that is down do not count as the node's own.
    pub up: bool,
    /// MTU of the device: size of the largest IP packet in bytes.
    pub mtu: u32,
    /// MAC address of the device; `None` if its link layer has no such addresses.
    pub mac: Option<[u8; 6]>,
    /// Whether the device is a bridge.
    pub is_bridge: bool,
    /// Whether the device is one end of a pair (veth or netkit).
    pub is_pair: bool,
    /// Whether the device is one end of a pair whose other end is in another network namespace.
    pub peer_elsewhere: bool,
    /// Whether the device is a veth whose other end has no XDP program. The frames that a native XDP program on the
    /// device sends back (`XDP_TX`) are then lost, or, if the other end uses GRO, stay in the ring of the other end.
    pub loses_xdp_tx: bool,
    /// Whether VLAN devices are stacked on the device.
    pub has_vlans: bool,
    /// Whether the device is the [catch device](crate::CatchDevice).
    pub is_catch: bool,
    /// Whether the device is a network card, real or emulated: the kernel reports no `IFLA_INFO_KIND` for it. Also true
    /// for the loopback device.
    pub is_card: bool,
    /// Whether the device is a bond, team, VLAN, macvlan or MACsec device: an Ethernet device of the node on top of
    /// others. False for the macvtap device of a virtual machine.
    pub is_stacked: bool,
    /// Whether the device is a bond or team: its driver runs a native XDP program on the ports, so that frames seem to
    /// come in through these.
    pub is_bond: bool,
    /// Index of the bridge, bond or VRF that the device belongs to.
    pub controller: Option<u32>,
    /// The device's addresses, in the kernel's order.
    pub addresses: Vec<LinkAddress>,
    /// Whether a default route leads through the device.
    pub default_route: bool,
}

/// An IP address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The address; on a point-to-point link, that of this end.
    pub ip: IpAddr,
    /// Prefix length in bits.
    pub prefix: u8,
    /// Whether the address has global scope. Private and unique local addresses also have global scope.
    pub global: bool,
    /// Whether the kernel marks the address as secondary. For IPv4: it is not the first address of its network; for
    /// IPv6: it is temporary.
    pub secondary: bool,
}

/// One next hop of a default route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// Whether the route is for IPv4; false for IPv6.
    pub ipv4: bool,
    /// Index of the interface that the route leads through.
    pub device: u32,
    /// Whether the route is in the main table. Other tables apply only to packets that policy rules select.
    pub main: bool,
    /// Metric of the route; the kernel uses the route with the lowest metric.
    pub metric: u32,
    /// The source address that the route prefers; `None` if it has none.
    pub source: Option<IpAddr>,
}

/// Addresses of devices, by interface index.
pub(crate) type Addresses = BTreeMap<u32, Vec<LinkAddress>>;

impl Network {
    /// Reads devices, addresses and routes of this thread's network namespace once.
    pub(crate) fn read() -> io::Result<Self> {
        let mut netlink = Netlink::open()?;
        let links = links(&mut netlink)?;
        let addresses = addresses(&mut netlink)?;
        let routes = routes(&mut netlink)?;
        let by_destination = routes.by_destination && routing::has_only_default_rules(&mut netlink)?;
        Ok(Self::new(links, &addresses, routes.default, by_destination))
    }

    /// Combines lists of devices, addresses and routes that were read separately.
    pub(crate) fn new(
        mut links: Vec<Link>,
        addresses: &Addresses,
        default_routes: Vec<DefaultRoute>,
        routes_by_destination: bool,
    ) -> Self {
        for link in &mut links {
            link.addresses = addresses.get(&link.index).cloned().unwrap_or_default();
            link.default_route = default_routes.iter().any(|route| route.device == link.index);
        }
        Self { links, default_routes, routes_by_destination, removals: 0 }
    }

    /// The device with this interface index.
    pub fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }
}

impl Link {
    /// Whether the device has a default route or a global address of the node, or can carry routes without an address
    /// ([`Self::is_unnumbered`]). A /32 or /128 address on a pair to another namespace is not the node's: it is the
    /// gateway address that the ptp CNI plugin gives to each pod's device.
    pub fn leads_out(&self) -> bool {
        let is_whole = |address: &LinkAddress| address.prefix == if address.ip.is_ipv4() { 32 } else { 128 };
        let mut global = self.addresses.iter().filter(|address| address.global);
        self.default_route
            || global.any(|address| !(self.peer_elsewhere && is_whole(address)))
            || self.is_unnumbered()
    }

    /// Whether routes may lead through the device although it has no address of its own: a network card, a device that
    /// is stacked on others (bond, VLAN, …), or a tunnel (WireGuard, GRE, xfrm, …), whose packets have no Ethernet
    /// header. Never a bridge, because a bridge without an address only switches frames between its ports; nor a port
    /// of a bridge, bond or VRF, nor an end of a pair. The agent does not search the routing tables for such routes: a
    /// node may have a million.
    fn is_unnumbered(&self) -> bool {
        let is_tunnel = Layer::of(self.hardware) == Some(Layer::Ip);
        let is_lower = self.loopback || self.is_pair || self.controller.is_some();
        self.up && !is_lower && (self.is_card || self.is_stacked || is_tunnel)
    }

    /// A sentence with advice about a device that leads out but gets no programs, because the programs cannot parse the
    /// device's link layer; `None` for any other device.
    pub fn unserved(&self) -> Option<String> {
        let Self { name, hardware, .. } = self;
        let is_parsed = Layer::of(self.hardware).is_some();
        (self.up && !self.loopback && self.leads_out() && !is_parsed).then(|| {
            format!(
                "device {name} gets no programs, because they cannot parse its link layer (hardware type {hardware}): its \
                 clients reach no Service; lead them to the node through an Ethernet device or a tunnel"
            )
        })
    }
}

/// Whether this thread's network namespace has an IPv4 address that BIRD takes as router id: an address of a device
/// that is up, with global scope, and neither secondary, loopback nor link-local.
///
/// # Errors
/// The devices or the addresses cannot be listed.
pub fn has_ipv4_address() -> Result<bool, DatapathError> {
    let listed = Netlink::open().and_then(|mut netlink| Ok((links(&mut netlink)?, addresses(&mut netlink)?)));
    let (links, addresses) = listed.map_err(|error| DatapathError::netlink("list addresses", error))?;
    let is_taken = |address: &LinkAddress| {
        let is_usable = |ip: &Ipv4Addr| !ip.is_loopback() && !ip.is_link_local();
        address.global && !address.secondary && matches!(&address.ip, IpAddr::V4(ip) if is_usable(ip))
    };
    let mut up = links.iter().filter(|link| link.up).filter_map(|link| addresses.get(&link.index));
    Ok(up.any(|addresses| addresses.iter().any(is_taken)))
}

/// Names of all devices, by interface index.
pub(crate) fn names(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, String>> {
    Ok(links(netlink)?.into_iter().map(|link| (link.index, link.name)).collect())
}

/// The name of a device of this network namespace, or `device INDEX` if there is none with this index.
pub fn device_name(index: u32) -> String {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer holds the longest name.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if found.is_null() {
        return format!("device {index}");
    }
    // SAFETY: the kernel terminates names with 0.
    unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned()
}

/// All devices. Reads neither addresses nor routes: `addresses` is empty, and `default_route` is false.
pub(crate) fn links(netlink: &mut Netlink) -> io::Result<Vec<Link>> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let (mut links, mut below_vlans) = (Vec::new(), BTreeSet::new());
    for answer in answers {
        let RouteNetlinkMessage::NewLink(message) = answer else { continue };
        below_vlans.extend(below_vlan(&message));
        links.extend(link(&message));
    }
    for link in &mut links {
        link.has_vlans = below_vlans.contains(&link.index);
    }
    links.sort_by_key(|link| link.index);
    Ok(links)
}

/// Index of the interface that a VLAN device is stacked on. `None` if the device is no VLAN device, or if the interface
/// is in another network namespace: in this namespace, the index means another device.
fn below_vlan(message: &LinkMessage) -> Option<u32> {
    let is_vlan = |info: &LinkInfo| matches!(info, LinkInfo::Kind(InfoKind::Vlan));
    let (mut vlan, mut elsewhere, mut below) = (false, false, None);
    for attribute in &message.attributes {
        if let LinkAttribute::LinkInfo(infos) = attribute {
            vlan = infos.iter().any(is_vlan);
        } else if let LinkAttribute::Link(index) = attribute {
            below = Some(*index);
        } else if let LinkAttribute::LinkNetNsId(_) = attribute {
            elsewhere = true;
        }
    }
    below.filter(|_| vlan && !elsewhere)
}

/// Maximum MTU of a veth whose other end has no XDP program: `ETH_MAX_MTU` of include/uapi/linux/if_ether.h. If the
/// other end has an XDP program, the kernel sets the maximum to what the program supports.
const ANY_MTU: u32 = 65_535;

/// The sysctl `arp_ignore` that applies to a device: the greater of the values for `all` and for the device. From 1 on,
/// the kernel answers ARP requests on the device only for addresses of that device. 0, the default, if neither value
/// can be read.
pub fn arp_ignore(device: &str) -> u8 {
    let of = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/arp_ignore")).ok()?;
        text.trim().parse().ok()
    };
    of("all").max(of(device)).unwrap_or(0)
}

/// Whether a device of this kind is stacked on other Ethernet devices and takes packets for the node itself.
const fn is_stacked(kind: &InfoKind) -> bool {
    use InfoKind::{Bond, MacSec, MacVlan, Team, Vlan};
    matches!(kind, Bond | Team | Vlan | MacVlan | MacSec)
}

fn link(message: &LinkMessage) -> Option<Link> {
    let (mut name, mut peer_namespace, mut controller) = (None, false, None);
    let (mut mtu, mut max_mtu, mut mac, mut kind) = (0, 0, None, None);
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(text) = attribute {
            name = Some(text.clone());
        } else if let LinkAttribute::LinkNetNsId(_) = attribute {
            peer_namespace = true;
        } else if let LinkAttribute::Controller(index) = attribute {
            controller = Some(*index);
        } else if let LinkAttribute::Mtu(bytes) = attribute {
            mtu = *bytes;
        } else if let LinkAttribute::MaxMtu(bytes) = attribute {
            max_mtu = *bytes;
        } else if let LinkAttribute::Address(address) = attribute {
            mac = address.as_slice().try_into().ok();
        } else if let LinkAttribute::LinkInfo(infos) = attribute {
            kind =
                infos.iter().find_map(|info| if let LinkInfo::Kind(kind) = info { Some(kind) } else { None });
        }
    }
    let flags = message.header.flags;
    let name = name?;
    let is_bridge = matches!(kind, Some(InfoKind::Bridge));
    let is_pair = matches!(kind, Some(InfoKind::Veth | InfoKind::Netkit));
    Some(Link {
        index: message.header.index,
        is_catch: is_bridge && name == catch::CATCH_DEVICE,
        name,
        hardware: message.header.link_layer_type.into(),
        loopback: flags.contains(LinkFlags::Loopback),
        up: flags.contains(LinkFlags::Up),
        mtu,
        mac,
        is_bridge,
        is_pair,
        peer_elsewhere: is_pair && peer_namespace,
        loses_xdp_tx: matches!(kind, Some(InfoKind::Veth)) && max_mtu == ANY_MTU,
        has_vlans: false,
        is_card: kind.is_none(),
        is_bond: matches!(kind, Some(InfoKind::Bond | InfoKind::Team)),
        is_stacked: kind.is_some_and(is_stacked),
        controller,
        addresses: Vec::new(),
        default_route: false,
    })
}

/// The addresses of all devices, except those that have failed duplicate address detection.
pub(crate) fn addresses(netlink: &mut Netlink) -> io::Result<Addresses> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    let mut addresses = Addresses::new();
    for answer in answers {
        let RouteNetlinkMessage::NewAddress(message) = answer else { continue };
        if let Some(address) = address(&message) {
            addresses.entry(message.header.index).or_default().push(address);
        }
    }
    Ok(addresses)
}

fn address(message: &AddressMessage) -> Option<LinkAddress> {
    let header = &message.header;
    let (mut local, mut address) = (None, None);
    for attribute in &message.attributes {
        if let AddressAttribute::Local(ip) = attribute {
            local = Some(*ip);
        } else if let AddressAttribute::Address(ip) = attribute {
            address = Some(*ip);
        }
    }
    if header.flags.contains(AddressHeaderFlags::Dadfailed) {
        return None;
    }
    Some(LinkAddress {
        // On a point-to-point link, `Local` is the address of this end, and `Address` that of the remote end.
        ip: local.or(address)?,
        prefix: header.prefix_len,
        global: header.scope == AddressScope::Universe,
        secondary: header.flags.contains(AddressHeaderFlags::Secondary),
    })
}

/// What the agent needs to know about the routes of all tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routes {
    pub(crate) default: Vec<DefaultRoute>,
    /// Whether the next hop of every route depends only on the destination, see `routing::is_by_destination`.
    pub(crate) by_destination: bool,
}

/// Reads the routes of all tables, as far as the agent needs them.
pub(crate) fn routes(netlink: &mut Netlink) -> io::Result<Routes> {
    let answers = netlink.dump(&RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let mut routes = Routes { default: Vec::new(), by_destination: true };
    for answer in answers {
        let RouteNetlinkMessage::NewRoute(message) = answer else { continue };
        routes.by_destination &= routing::is_by_destination(&message);
        if message.header.destination_prefix_length == 0 && message.header.kind == RouteType::Unicast {
            routes.default.extend(hops(&message));
        }
    }
    Ok(routes)
}

fn hops(message: &RouteMessage) -> Vec<DefaultRoute> {
    let ipv4 = i32::from(u8::from(message.header.address_family)) == libc::AF_INET;
    let mut hop = DefaultRoute { ipv4, device: 0, main: false, metric: 0, source: None };
    let mut table = u32::from(message.header.table);
    let mut devices = Vec::new();
    for attribute in &message.attributes {
        if let RouteAttribute::Oif(index) = attribute {
            devices.push(*index);
        } else if let RouteAttribute::MultiPath(hops) = attribute {
            devices.extend(hops.iter().map(|hop| hop.interface_index));
        } else if let RouteAttribute::Priority(metric) = attribute {
            hop.metric = *metric;
        } else if let RouteAttribute::Table(number) = attribute {
            table = *number;
        } else if let RouteAttribute::PrefSource(RouteAddress::Inet(ip)) = attribute {
            hop.source = Some((*ip).into());
        } else if let RouteAttribute::PrefSource(RouteAddress::Inet6(ip)) = attribute {
            hop.source = Some((*ip).into());
        }
    }
    hop.main = table == u32::from(RouteHeader::RT_TABLE_MAIN);
    devices.into_iter().map(|device| DefaultRoute { device, ..hop }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_tells_cards_stacked_devices_and_bridges() {
        let of = |kind: Option<InfoKind>| {
            let mut message = LinkMessage::default();
            message.attributes = vec![LinkAttribute::IfName("x".to_owned())];
            message.attributes.extend(kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])));
            let Link { is_card, is_stacked, is_bridge, is_pair, .. } = link(&message).unwrap();
            [is_card, is_stacked, is_bridge, is_pair]
        };
        assert_eq!(of(None), [true, false, false, false]);
        use InfoKind::{Bond, Bridge, Dummy, MacSec, MacVlan, MacVtap, Netkit, Team, Veth, Vlan};
        for kind in [Bond, Team, Vlan, MacVlan, MacSec] {
            assert_eq!(of(Some(kind.clone())), [false, true, false, false], "{kind}");
        }
        assert_eq!(of(Some(Bridge)), [false, false, true, false]);
        for kind in [Veth, Netkit] {
            assert_eq!(of(Some(kind.clone())), [false, false, false, true], "{kind}");
        }
        for kind in [MacVtap, Dummy] {
            assert_eq!(of(Some(kind.clone())), [false; 4], "{kind}");
        }
    }

    #[test]
    fn vlan_device_is_stacked_on_a_device_of_its_own_namespace_only() {
        let of_kind = |kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]);
        for (attributes, expected) in [
            (vec![LinkAttribute::Link(3), of_kind(InfoKind::Vlan)], Some(3)),
            (vec![LinkAttribute::Link(3), of_kind(InfoKind::Vlan), LinkAttribute::LinkNetNsId(0)], None),
            (vec![LinkAttribute::Link(3), of_kind(InfoKind::Veth)], None),
        ] {
            let mut message = LinkMessage::default();
            message.attributes = attributes;
            assert_eq!(below_vlan(&message), expected, "{message:?}");
        }
    }
}
