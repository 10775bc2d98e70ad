//! The devices on which a node announces an address.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use lb_core::announce::election::Interfaces;
use lb_datapath::{Device, DeviceKind, DevicePatterns, Layer, Link, LinkAddress, Network, classify};

/// A device on which an address is announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wire {
    /// Interface index.
    pub(super) index: u32,
    /// Interface name.
    pub(super) name: String,
    /// MAC address of the interface, which the node announces.
    pub(super) mac: [u8; 6],
}

/// The wire devices of the node that are Ethernet, up, and have a MAC address.
pub(super) struct Wires<'a>(Vec<(Wire, &'a Link)>);

impl<'a> Wires<'a> {
    pub(super) fn new(network: &'a Network, patterns: &DevicePatterns) -> Self {
        let link = |device: &Device| network.links.iter().find(|link| link.index == device.index && link.up);
        let wires = classify(&network.links, patterns)
            .into_iter()
            .filter(|device| device.kind == DeviceKind::Wire && device.layer == Layer::Ethernet)
            .filter_map(|device| {
                let link = link(&device)?;
                Some((Wire { index: device.index, mac: device.mac?, name: device.name }, link))
            });
        Self(wires.collect())
    }

    /// The device with this interface index.
    pub(super) fn get(&self, index: u32) -> Option<&Wire> {
        self.0.iter().map(|(wire, _)| wire).find(|wire| wire.index == index)
    }

    /// The interface names of the devices.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(wire, _)| wire.name.as_str())
    }

    /// The devices on which to announce an address: those that `interfaces` names. With [`Interfaces::All`], those with
    /// a network that contains the address; if no network contains it, all network cards, and all other devices that
    /// have an address. (A bond or VLAN without an address is left out, because it may only carry other devices.)
    pub(super) fn places(&self, address: IpAddr, interfaces: &Interfaces) -> impl Iterator<Item = &Wire> {
        let in_network = move |link: &Link| {
            let networks =
                link.addresses.iter().filter_map(|address| IpNet::new(address.ip, address.prefix).ok());
            networks.into_iter().any(|network| network.contains(&address))
        };
        let some_network = self.0.iter().any(|(_, link)| in_network(link));
        let suits = move |(wire, link): &&(Wire, &Link)| match interfaces {
            Interfaces::Named(names) => names.contains(&wire.name),
            Interfaces::All if some_network => in_network(link),
            Interfaces::All => link.is_card || !link.addresses.is_empty(),
        };
        self.0.iter().filter(suits).map(|(wire, _)| wire)
    }
}

/// Sentences about announced addresses that a device of this node has: the kernel answers for these addresses, whether
/// or not the node has the right to announce them. `announced` maps the addresses to the names of their pools; `wires`
/// are the names of the devices on which other machines may ask for addresses; `arp_ignore` returns the sysctl setting
/// `arp_ignore` of a wire.
pub(super) fn bound(
    network: &Network,
    wires: &[String],
    announced: &BTreeMap<IpAddr, Arc<str>>,
    arp_ignore: impl Fn(&str) -> u8,
) -> Vec<String> {
    // With `arp_ignore` 0 on a wire, the kernel answers ARP requests on that wire for the addresses of all devices,
    // even of those that are down, as `kube-ipvs0` is. The kernel answers neighbour solicitations only on the device
    // that has the address.
    let for_all_devices = wires.iter().any(|wire| arp_ignore(wire) == 0);
    let mut found = Vec::new();
    for Link { name, addresses, .. } in &network.links {
        let answers = |ip: IpAddr| wires.contains(name) || ip.is_ipv4() && for_all_devices;
        for LinkAddress { ip, prefix, .. } in addresses.iter().filter(|address| answers(address.ip)) {
            let Some(pool) = announced.get(ip) else { continue };
            found.push(format!(
                "device {name} of this node has {ip}, an address of pool \"{pool}\" that is announced at layer 2, so the \
                 kernel answers for it even while another node announces it: remove it with `ip address del {ip}/{prefix} dev \
                 {name}`, or take it out of the pool if the node needs it"
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str, addresses: &[(&str, u8)]) -> Link {
        let address = |(ip, prefix): &(&str, u8)| LinkAddress {
            ip: ip.parse().unwrap(),
            prefix: *prefix,
            global: true,
            secondary: false,
        };
        Link {
            index,
            name: name.to_owned(),
            hardware: 1,
            up: true,
            mac: Some([2, 0, 0, 0, 0, u8::try_from(index).unwrap()]),
            is_card: true,
            addresses: addresses.iter().map(address).collect(),
            ..Link::default()
        }
    }

    #[test]
    fn address_is_announced_where_its_network_is() {
        let mut down = link(4, "eth3", &[("192.0.2.3", 24)]);
        down.up = false;
        let without_mac = Link { hardware: 65534, mac: None, ..link(5, "wg0", &[("192.0.2.4", 24)]) };
        let links = vec![
            link(1, "eth0", &[("192.0.2.1", 24), ("2001:db8::1", 64)]),
            link(2, "eth1", &[("198.51.100.1", 24)]),
            link(3, "eth2", &[]),
            down,
            without_mac,
        ];
        let network = Network { links, ..Network::default() };
        let named = |names: &[&str]| Interfaces::Named(names.iter().map(|name| (*name).to_owned()).collect());
        for (address, interfaces, expected) in [
            ("192.0.2.10", Interfaces::All, vec!["eth0"]),
            ("2001:db8::10", Interfaces::All, vec!["eth0"]),
            ("198.51.100.7", Interfaces::All, vec!["eth1"]),
            ("203.0.113.1", Interfaces::All, vec!["eth0", "eth1", "eth2"]),
            ("192.0.2.10", named(&["eth2", "gone"]), vec!["eth2"]),
            ("192.0.2.10", named(&["eth3"]), vec![]),
            ("192.0.2.10", named(&["wg0"]), vec![]),
            ("192.0.2.10", named(&[]), vec![]),
        ] {
            let wires = Wires::new(&network, &DevicePatterns::default());
            let places = wires.places(address.parse().unwrap(), &interfaces);
            let names: Vec<&str> = places.map(|wire| wire.name.as_str()).collect();
            assert_eq!(names, expected, "{address} {interfaces:?}");
        }
    }

    #[test]
    fn announced_address_that_a_device_has_is_named_if_the_kernel_answers_for_it() {
        let ipvs = Link { up: false, ..link(3, "kube-ipvs0", &[("192.0.2.11", 32), ("2001:db8::11", 128)]) };
        let lo = link(1, "lo", &[("127.0.0.1", 8), ("2001:db8::10", 128)]);
        let eth0 = link(
            2,
            "eth0",
            &[("192.0.2.1", 24), ("192.0.2.10", 32), ("2001:db8::1", 64), ("2001:db8::12", 64)],
        );
        let network = Network { links: vec![lo, eth0, ipvs], ..Network::default() };
        let of = |addresses: &[&str]| {
            let announced =
                addresses.iter().map(|address| (address.parse().unwrap(), Arc::from("production"))).collect();
            bound(&network, &["eth0".to_owned()], &announced, |_| 0)
        };
        let ignoring = [
            ("192.0.2.10".parse().unwrap(), Arc::from("p")),
            ("192.0.2.11".parse().unwrap(), Arc::from("p")),
        ];
        let of_eth0 = bound(&network, &["eth0".to_owned()], &ignoring.into(), |_| 1);
        assert!(matches!(&of_eth0[..], [one] if one.starts_with("device eth0 ")), "{of_eth0:?}");
        let unanswered = ["192.0.2.77", "2001:db8::77", "2001:db8::10", "2001:db8::11"];
        assert_eq!(of(&unanswered), [""; 0], "unknown, or for IPv6 not on a device where others ask");
        let found = of(&["192.0.2.10", "192.0.2.11", "2001:db8::12"]);
        let parts = [
            (
                "device eth0 of this node has 192.0.2.10, an address of pool \"production\"",
                "192.0.2.10/32 dev eth0",
            ),
            ("device eth0 of this node has 2001:db8::12,", "2001:db8::12/64 dev eth0"),
            ("device kube-ipvs0 of this node has 192.0.2.11,", "192.0.2.11/32 dev kube-ipvs0"),
        ];
        assert_eq!(found.len(), parts.len(), "{found:?}");
        for (text, (start, command)) in found.iter().zip(parts) {
            let advice = format!("`ip address del {command}`");
            assert!(text.starts_with(start) && text.contains(&advice), "{text}");
        }
    }
}
