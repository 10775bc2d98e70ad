//! Decides which devices get programs.

use glob::Pattern;

use crate::net::network::Link;

/// The role of a device in the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// A device that leads to other machines (wire).
    Wire,
    /// The host side of a pod's device.
    Workload,
    /// The device to which the node routes untranslated packets, [`crate::CatchDevice`].
    Catch,
}

impl DeviceKind {
    /// The kind's name in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Wire => "wire",
            Self::Workload => "workload",
            Self::Catch => "catch",
        }
    }
}

/// The header that packets of a device begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// An Ethernet header, of 14 bytes.
    Ethernet,
    /// No link-layer header: the IP header of tun, WireGuard, IPIP and other tunnels.
    Ip,
}

impl Layer {
    /// The header of packets on devices of this hardware type, an `ARPHRD_` number (include/uapi/linux/if_arp.h).
    /// `None` if the programs cannot parse this header, such as the header of InfiniBand.
    pub(crate) fn of(hardware: u16) -> Option<Self> {
        const ETHER: u16 = 1;
        /// Hardware types without link-layer header: PPP, IPIP and GRE (both families), SIT, RAWIP, and NONE (tun,
        /// WireGuard, xfrm).
        const WITHOUT_LINK_LAYER: [u16; 8] = [512, 768, 769, 776, 778, 823, 519, 65534];
        match hardware {
            ETHER => Some(Self::Ethernet),
            hardware if WITHOUT_LINK_LAYER.contains(&hardware) => Some(Self::Ip),
            _ => None,
        }
    }
}

/// A device that gets programs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    /// Index of the interface, unique in its network namespace.
    pub index: u32,
    /// Name of the interface when it was listed.
    pub name: String,
    /// What the device is to the data plane.
    pub kind: DeviceKind,
    /// The header that the device's packets begin with.
    pub layer: Layer,
    /// MTU of the device: size of the largest IP packet in bytes.
    pub mtu: u32,
    /// Destination MAC address of frames for the node: that of the device, or of the bridge that the device is a port
    /// of. `None` without a link-layer header.
    pub mac: Option<[u8; 6]>,
    /// Index of the bridge, bond or VRF that the device belongs to.
    pub controller: Option<u32>,
    /// Whether the device is one end of a pair (veth or netkit): packets sent through it arrive at the other end.
    pub is_pair: bool,
    /// Whether the device is one end of a pair whose other end is in another network namespace.
    pub peer_elsewhere: bool,
    /// Whether the device is a veth whose other end has no XDP program. The frames that a native XDP program on the
    /// device sends back (`XDP_TX`) are then lost, or, if the other end uses GRO, stay in the ring of the other end.
    pub loses_xdp_tx: bool,
    /// Whether VLAN devices are stacked on the device.
    pub has_vlans: bool,
    /// Whether the device is a bond or team: its driver runs a native XDP program on the ports, so that frames seem to
    /// come in through these.
    pub is_bond: bool,
}

/// Names or globs (`*`, `?`, `[…]`) by which the user selects devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicePatterns {
    /// If not empty, the wire devices are exactly the devices that one of these patterns matches.
    pub wire: Vec<Pattern>,
    /// If not empty, the workload devices are exactly the devices that one of these patterns matches and no pattern in
    /// `wire` matches.
    pub workload: Vec<Pattern>,
}

/// The devices that get programs, sorted by index. Patterns take precedence over detection, and patterns for wire
/// devices over patterns for workload devices; no pattern applies to the catch device. The loopback device, and devices
/// whose link layer the programs cannot parse, never get programs.
pub fn classify(links: &[Link], patterns: &DevicePatterns) -> Vec<Device> {
    let device = |link: &Link| {
        let kind = kind_of(link, patterns)?;
        let layer = Layer::of(link.hardware)?;
        let bridge = links.iter().find(|other| other.is_bridge && link.controller == Some(other.index));
        let mac = bridge.unwrap_or(link).mac.filter(|_| layer == Layer::Ethernet);
        let Link {
            index, mtu, controller, is_pair, peer_elsewhere, loses_xdp_tx, has_vlans, is_bond, ..
        } = *link;
        Some(Device {
            index,
            name: link.name.clone(),
            kind,
            layer,
            mtu,
            mac,
            controller,
            is_pair,
            peer_elsewhere,
            loses_xdp_tx,
            has_vlans,
            is_bond,
        })
    };
    let mut devices: Vec<Device> = links.iter().filter_map(device).collect();
    devices.sort_unstable();
    devices
}

fn kind_of(link: &Link, patterns: &DevicePatterns) -> Option<DeviceKind> {
    let DevicePatterns { wire, workload } = patterns;
    let matches = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(&link.name));
    if link.loopback {
        None
    } else if link.is_catch {
        Some(DeviceKind::Catch)
    } else if matches(wire) {
        Some(DeviceKind::Wire)
    } else if matches(workload) {
        Some(DeviceKind::Workload)
    } else if wire.is_empty() && link.leads_out() {
        Some(DeviceKind::Wire)
    } else if workload.is_empty() && link.peer_elsewhere {
        Some(DeviceKind::Workload)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LinkAddress;

    fn link(index: u32, name: &str) -> Link {
        Link { index, name: name.to_owned(), hardware: 1, up: true, ..Link::default() }
    }

    fn address(text: &str, prefix: u8) -> Vec<LinkAddress> {
        vec![LinkAddress { ip: text.parse().unwrap(), prefix, global: true, secondary: false }]
    }

    fn node() -> Vec<Link> {
        vec![
            Link { loopback: true, hardware: 772, addresses: address("192.0.2.9", 32), ..link(1, "lo") },
            Link { addresses: address("192.0.2.1", 24), ..link(2, "eth0") },
            link(3, "eth1"),
            Link { peer_elsewhere: true, ..link(4, "veth1a") },
            Link { peer_elsewhere: true, addresses: address("10.244.0.1", 32), ..link(5, "veth1b") },
            Link {
                peer_elsewhere: true,
                default_route: true,
                addresses: address("2001:db8::1", 64),
                ..link(6, "up0")
            },
            Link { hardware: 65534, addresses: address("10.9.0.1", 24), ..link(7, "wg0") },
            Link {
                addresses: vec![LinkAddress { global: false, ..address("169.254.9.1", 16)[0] }],
                ..link(8, "usb0")
            },
        ]
    }

    fn found(patterns: &DevicePatterns) -> Vec<(String, DeviceKind)> {
        classify(&node(), patterns).into_iter().map(|device| (device.name, device.kind)).collect()
    }

    fn globs(globs: &[&str]) -> Vec<Pattern> {
        globs.iter().map(|glob| Pattern::new(glob).unwrap()).collect()
    }

    fn named(names: &[(&str, DeviceKind)]) -> Vec<(String, DeviceKind)> {
        names.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect()
    }

    use DeviceKind::{Wire, Workload};

    #[test]
    fn devices_are_classified_by_route_and_peer() {
        let expected =
            [("eth0", Wire), ("veth1a", Workload), ("veth1b", Workload), ("up0", Wire), ("wg0", Wire)];
        assert_eq!(found(&DevicePatterns::default()), named(&expected));
    }

    #[test]
    fn patterns_replace_detection_of_their_kind() {
        let wire = DevicePatterns { wire: globs(&["eth?"]), workload: Vec::new() };
        let expected =
            [("eth0", Wire), ("eth1", Wire), ("veth1a", Workload), ("veth1b", Workload), ("up0", Workload)];
        assert_eq!(found(&wire), named(&expected));
        let workload = DevicePatterns { wire: Vec::new(), workload: globs(&["*1b", "eth0"]) };
        assert_eq!(
            found(&workload),
            named(&[("eth0", Workload), ("veth1b", Workload), ("up0", Wire), ("wg0", Wire)])
        );
    }

    #[test]
    fn frames_for_the_node_have_the_mac_address_of_the_bridge_at_its_ports() {
        let mac = |last| Some([2, 0, 0, 0, 0, last]);
        let links = [
            Link { mac: mac(1), is_bridge: true, addresses: address("10.244.0.1", 24), ..link(1, "cni0") },
            Link { mac: mac(2), controller: Some(1), peer_elsewhere: true, ..link(2, "port") },
            Link { mac: mac(3), peer_elsewhere: true, ..link(3, "alone") },
            Link {
                mac: mac(4),
                addresses: address("192.0.2.1", 24),
                controller: Some(9),
                ..link(4, "bond0")
            },
        ];
        let devices = classify(&links, &DevicePatterns::default());
        let found: Vec<_> = devices.iter().map(|device| (device.name.as_str(), device.mac)).collect();
        assert_eq!(found, [("cni0", mac(1)), ("port", mac(1)), ("alone", mac(3)), ("bond0", mac(4))]);
    }

    #[test]
    fn loopback_never_gets_programs() {
        let everything = DevicePatterns { wire: globs(&["*"]), workload: globs(&["*"]) };
        assert!(found(&everything).iter().all(|(name, _)| name != "lo"));
    }

    #[test]
    fn patterns_do_not_match_the_catch_device() {
        let everything = DevicePatterns { wire: globs(&["*"]), workload: globs(&["*"]) };
        let links = [Link { is_catch: true, ..link(1, "lb-catch") }];
        assert_eq!(classify(&links, &everything)[0].kind, DeviceKind::Catch);
    }

    /// Routes may lead through devices without an address, with source addresses of other devices: BGP unnumbered,
    /// WireGuard, xfrm.
    #[test]
    fn cards_and_tunnels_without_address_are_wires() {
        const NONE: u16 = 65534;
        let (is_card, is_stacked) = (true, true);
        let links = [
            Link { is_card, ..link(1, "eth1") },
            Link { is_card, up: false, ..link(2, "down") },
            Link { is_card, controller: Some(9), ..link(3, "port-of-bond") },
            Link { hardware: NONE, ..link(4, "wg0") },
            Link { hardware: 778, ..link(5, "gre1") },
            Link { hardware: NONE, is_pair: true, peer_elsewhere: true, ..link(6, "netkit-of-pod") },
            link(7, "virbr0"),
            Link { is_bridge: true, ..link(8, "bridge-of-pods") },
            Link { is_stacked, ..link(10, "bond0") },
            Link { is_stacked, up: false, ..link(11, "bond-that-is-down") },
            Link { is_stacked, ..link(12, "bond0.100") },
            Link { is_stacked, controller: Some(8), ..link(13, "vlan-that-is-port-of-bridge") },
            link(14, "macvtap-of-vm"),
        ];
        let devices = classify(&links, &DevicePatterns::default());
        let found: Vec<_> =
            devices.iter().map(|device| (device.name.as_str(), device.kind, device.layer)).collect();
        assert_eq!(
            found,
            [
                ("eth1", Wire, Layer::Ethernet),
                ("wg0", Wire, Layer::Ip),
                ("gre1", Wire, Layer::Ip),
                ("netkit-of-pod", Workload, Layer::Ip),
                ("bond0", Wire, Layer::Ethernet),
                ("bond0.100", Wire, Layer::Ethernet),
            ]
        );
    }

    #[test]
    fn device_with_an_unknown_link_layer_is_unserved() {
        const INFINIBAND: u16 = 32;
        let infiniband = Link { hardware: INFINIBAND, addresses: address("192.0.2.1", 24), ..link(1, "ib0") };
        let text = infiniband.unserved().unwrap();
        assert!(text.contains("device ib0 gets no programs") && text.contains("type 32"), "{text}");
        assert_eq!(
            classify(&[infiniband], &DevicePatterns { wire: globs(&["ib0"]), workload: Vec::new() }),
            []
        );
        assert!(node().iter().all(|link| link.unserved().is_none()));
    }

    #[test]
    fn only_ethernet_devices_have_an_ethernet_header() {
        let devices = classify(&node(), &DevicePatterns::default());
        assert!(devices.iter().all(|device| (device.layer == Layer::Ip) == (device.name == "wg0")));
    }
}
