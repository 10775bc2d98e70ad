use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use lb_core::model::NodeAddresses;

use lb_datapath::{DefaultRoute, Link, LinkAddress, Network};

/// Interfaces to which kube-proxy (in mode ipvs) and kube-router add every cluster IP. They stay on the node after that
/// software has stopped.
const LEFT_BY_IPVS: [&str; 2] = ["kube-ipvs0", "kube-dummy-if"];

const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// Which addresses of the node serve node ports, from `--nodeport-addresses`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// All addresses of the node, including loopback.
    #[default]
    All,
    /// Only the primary address of each family.
    Primary,
    /// The addresses in these networks; in a family without a network, all addresses, as in kube-proxy.
    Networks(Vec<IpNet>),
}

impl NodePortAddresses {
    /// Listen addresses for a server that is reachable wherever node ports are. For each family: `0.0.0.0` or `::` if
    /// all addresses of the family serve node ports, else each address that does.
    pub fn listen(&self, node: &NodeAddresses) -> BTreeSet<IpAddr> {
        let anywhere = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        let all = anywhere.into_iter().filter(|ip| self.contains_all(ip.is_ipv4()));
        let some = node.node_ports.iter().copied().filter(|ip| !self.contains_all(ip.is_ipv4()));
        all.chain(some).collect()
    }

    fn contains_all(&self, ipv4: bool) -> bool {
        match self {
            Self::All => true,
            Self::Primary => false,
            Self::Networks(networks) => {
                let mut of_family = networks.iter().filter(|net| net.addr().is_ipv4() == ipv4);
                of_family.clone().next().is_none() || of_family.any(|net| net.prefix_len() == 0)
            }
        }
    }

    fn contain(&self, ip: IpAddr, primary: &Primary) -> bool {
        match self {
            Self::All => true,
            Self::Primary => primary.contains(ip),
            Self::Networks(networks) => {
                let mut of_family = networks.iter().filter(|net| net.addr().is_ipv4() == ip.is_ipv4());
                of_family.clone().next().is_none() || of_family.any(|net| net.contains(&ip))
            }
        }
    }
}

/// The primary address of the node in each family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Primary {
    /// The primary IPv4 address; `None` if the node has no suitable one.
    pub v4: Option<IpAddr>,
    /// The primary IPv6 address; `None` if the node has no suitable one.
    pub v6: Option<IpAddr>,
}

impl Primary {
    /// The primary addresses as an iterator, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.v4.into_iter().chain(self.v6)
    }

    /// Whether `ip` is a primary address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.iter().any(|primary| primary == ip)
    }
}

/// The addresses of this node and their uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Addresses that the plan uses. If the node has no address of a family, `node_ports` has none either, not even
    /// loopback.
    pub node: NodeAddresses,
    /// Sources of masqueraded packets whose routes name no source. With `--nodeport-addresses primary`, only these
    /// addresses serve node ports.
    pub primary: Primary,
}

impl Addresses {
    /// Derives the addresses from the interfaces. The first address of each family in `preferred` that the node has
    /// becomes primary.
    pub fn new(network: &Network, serving: &NodePortAddresses, preferred: &[IpAddr]) -> Self {
        let own = own(network);
        let primary = Primary {
            v4: primary(network, &own, preferred, IpAddr::is_ipv4),
            v6: primary(network, &own, preferred, IpAddr::is_ipv6),
        };
        let of_loopback = LOOPBACK.into_iter().filter(|loopback| has_family(&own, *loopback));
        let mut node_ports: BTreeSet<IpAddr> = own.iter().copied().chain(of_loopback).collect();
        node_ports.retain(|ip| serving.contain(*ip, &primary));
        let node = NodeAddresses {
            own: own.into_iter().collect(),
            primary: primary.iter().collect(),
            node_ports: node_ports.into_iter().collect(),
        };
        Self { node, primary }
    }
}

fn has_family(own: &BTreeSet<IpAddr>, like: IpAddr) -> bool {
    own.iter().any(|ip| ip.is_ipv4() == like.is_ipv4())
}

/// The addresses of all devices, except those that [`addresses_of`] leaves out.
fn own(network: &Network) -> BTreeSet<IpAddr> {
    network.links.iter().flat_map(addresses_of).map(|address| address.ip).collect()
}

/// Addresses of a device that is up, without loopback and IPv6 link-local ones, in the kernel's order. Leaves out all
/// addresses of an interface on which IPVS software left cluster IPs.
pub(super) fn addresses_of(link: &Link) -> impl Iterator<Item = &LinkAddress> {
    let counts = link.up && !LEFT_BY_IPVS.contains(&&*link.name);
    link.addresses.iter().filter(move |address| counts && is_of_node(address.ip))
}

fn is_of_node(ip: IpAddr) -> bool {
    let link_local = if let IpAddr::V6(ip) = ip { ip.is_unicast_link_local() } else { false };
    !(link_local || ip.is_loopback() || ip.is_unspecified())
}

/// Chooses the primary address of a family: a preferred one; else the source address that the default route names, or
/// the first global address of the route's device; else the first global address of a wire device, or of any device.
fn primary(
    network: &Network,
    own: &BTreeSet<IpAddr>,
    preferred: &[IpAddr],
    family: impl Fn(&IpAddr) -> bool,
) -> Option<IpAddr> {
    let first = |link: &Link| first_global(link, &family);
    let leads_out = |link: &&Link| !link.loopback && link.leads_out();
    let mut preferred = preferred.iter().copied().filter(|ip| family(ip) && own.contains(ip));
    let links = || network.links.iter();
    preferred
        .next()
        .or_else(|| source_of_default_route(network, own, &family))
        .or_else(|| links().filter(leads_out).find_map(first))
        .or_else(|| links().find_map(first))
}

fn source_of_default_route(
    network: &Network,
    own: &BTreeSet<IpAddr>,
    family: impl Fn(&IpAddr) -> bool,
) -> Option<IpAddr> {
    let ipv4 = family(&LOOPBACK[0]);
    let mut routes: Vec<&DefaultRoute> =
        network.default_routes.iter().filter(|route| route.main && route.ipv4 == ipv4).collect();
    routes.sort_by_key(|route| (route.metric, route.device));
    routes.into_iter().find_map(|route| {
        let asked_for = route.source.filter(|source| own.contains(source));
        asked_for.or_else(|| first_global(network.link(route.device)?, &family))
    })
}

/// The first address of global scope; a secondary one only if there is no other.
fn first_global(link: &Link, family: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    let global = || addresses_of(link).filter(|address| address.global && family(&address.ip));
    let first = global().find(|address| !address.secondary).or_else(|| global().next());
    first.map(|address| address.ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Parses an address as for `ip address add`. The prefix `~` marks one that is not of global scope, `+` a secondary
    /// one.
    fn address(text: &str) -> LinkAddress {
        let (text, global) = text.strip_prefix('~').map_or((text, true), |text| (text, false));
        let (text, secondary) = text.strip_prefix('+').map_or((text, false), |text| (text, true));
        let network: IpNet = text.parse().unwrap();
        LinkAddress { ip: network.addr(), prefix: network.prefix_len(), global, secondary }
    }

    fn link(index: u32, name: &str, addresses: &[&str]) -> Link {
        Link {
            index,
            name: name.to_owned(),
            loopback: name == "lo",
            up: true,
            addresses: addresses.iter().map(|text| address(text)).collect(),
            ..Link::default()
        }
    }

    fn route(device: u32, metric: u32, of: &str) -> DefaultRoute {
        DefaultRoute { ipv4: of == "v4", device, main: true, metric, source: None }
    }

    fn network(links: Vec<Link>, default_routes: Vec<DefaultRoute>) -> Network {
        Network { links, default_routes, ..Network::default() }
    }

    /// A node without default routes. It has loopback, an interface that is down, the device of a pod, two Ethernet
    /// interfaces, and an interface that kube-proxy has left behind.
    fn node() -> Network {
        let links = vec![
            link(1, "lo", &["~127.0.0.1/8", "~::1/128", "192.0.2.77/32"]),
            Link { up: false, ..link(2, "eth9", &["203.0.113.9/24", "2001:db8:9::9/64"]) },
            Link {
                peer_elsewhere: true,
                ..link(3, "veth1", &["10.244.0.1/32", "fd00:10:244::1/128", "~fe80::1/64"])
            },
            link(4, "eth0", &["+192.0.2.3/24", "192.0.2.1/24", "+2001:db8::3/64", "2001:db8::1/64"]),
            link(5, "eth1", &["172.18.0.1/24", "fd00:172::1/64", "~169.254.9.1/16"]),
            link(6, "kube-ipvs0", &["10.96.0.1/32", "fd00:10:96::1/128"]),
        ];
        network(links, Vec::new())
    }

    fn with_routes(routes: Vec<DefaultRoute>) -> Network {
        Network { default_routes: routes, ..node() }
    }

    fn texts(ips: impl IntoIterator<Item = IpAddr>) -> Vec<String> {
        ips.into_iter().map(|ip| ip.to_string()).collect()
    }

    fn primary_of(network: &Network, preferred: &[&str]) -> Vec<String> {
        let preferred: Vec<IpAddr> = preferred.iter().map(|text| ip(text)).collect();
        let addresses = Addresses::new(network, &NodePortAddresses::All, &preferred);
        assert!(addresses.primary.iter().eq(addresses.node.primary), "the plan knows the same");
        texts(addresses.primary.iter())
    }

    const OWN: [&str; 11] = [
        "10.244.0.1",
        "169.254.9.1",
        "172.18.0.1",
        "192.0.2.1",
        "192.0.2.3",
        "192.0.2.77",
        "2001:db8::1",
        "2001:db8::3",
        "fd00:10:244::1",
        "fd00:172::1",
        "",
    ];

    #[test]
    fn every_local_address_is_a_node_address() {
        let addresses = Addresses::new(&node(), &NodePortAddresses::All, &[]);
        assert_eq!(texts(addresses.node.own), OWN[..10]);
    }

    #[test]
    fn node_ports_are_served_on_the_addresses_that_kube_proxy_chooses() {
        let networks = |texts: &[&str]| {
            NodePortAddresses::Networks(texts.iter().map(|text| text.parse().unwrap()).collect())
        };
        let all_v4 =
            ["10.244.0.1", "127.0.0.1", "169.254.9.1", "172.18.0.1", "192.0.2.1", "192.0.2.3", "192.0.2.77"];
        let all_v6 = ["::1", "2001:db8::1", "2001:db8::3", "fd00:10:244::1", "fd00:172::1"];
        let cases: [(&str, NodePortAddresses, &[&str], &[&str]); 8] = [
            ("all", NodePortAddresses::All, &all_v4, &all_v6),
            ("primary", NodePortAddresses::Primary, &["192.0.2.1"], &["2001:db8::1"]),
            ("a network of each family", networks(&["192.0.2.0/24", "fd00::/8"]), &OWN[3..6], &OWN[8..10]),
            ("one family: all of the other", networks(&["172.18.0.0/16"]), &["172.18.0.1"], &all_v6),
            ("the loopback network", networks(&["127.0.0.0/8", "::1/128"]), &["127.0.0.1"], &["::1"]),
            ("everything by network", networks(&["0.0.0.0/0", "::/0"]), &all_v4, &all_v6),
            ("no address in there", networks(&["198.51.100.0/24", "2001:db8:5::/48"]), &[], &[]),
            (
                "several",
                networks(&["10.0.0.0/8", "172.16.0.0/12", "::1/128"]),
                &["10.244.0.1", "172.18.0.1"],
                &["::1"],
            ),
        ];
        for (what, serving, v4, v6) in cases {
            let addresses =
                Addresses::new(&with_routes(vec![route(4, 0, "v4"), route(4, 0, "v6")]), &serving, &[]);
            assert_eq!(texts(addresses.node.node_ports), [v4, v6].concat(), "{what}");
        }
    }

    #[test]
    fn family_without_a_node_address_is_not_served() {
        let v4_only = network(
            vec![
                link(1, "lo", &["~127.0.0.1/8", "~::1/128"]),
                link(2, "eth0", &["192.0.2.1/24", "~fe80::1/64"]),
            ],
            vec![],
        );
        let addresses = Addresses::new(&v4_only, &NodePortAddresses::All, &[]);
        assert_eq!(texts(addresses.node.node_ports), ["127.0.0.1", "192.0.2.1"]);
        assert_eq!(addresses.primary, Primary { v4: Some(ip("192.0.2.1")), v6: None });
        let nothing = network(vec![link(1, "lo", &["~127.0.0.1/8", "~::1/128"])], vec![]);
        assert_eq!(Addresses::new(&nothing, &NodePortAddresses::All, &[]), Addresses::default());
    }

    #[test]
    fn primary_addresses_come_from_the_default_routes() {
        let other_table = DefaultRoute { main: false, ..route(5, 0, "v4") };
        let with_source = |source| DefaultRoute { source: Some(ip(source)), ..route(5, 10, "v4") };
        let cases = [
            ("no default route: the first device that leads out", vec![], "192.0.2.1", "2001:db8::1"),
            (
                "the default route's device",
                vec![route(5, 0, "v4"), route(5, 0, "v6")],
                "172.18.0.1",
                "fd00:172::1",
            ),
            (
                "each family has its own",
                vec![route(4, 0, "v4"), route(5, 0, "v6")],
                "192.0.2.1",
                "fd00:172::1",
            ),
            ("the lowest metric", vec![route(4, 100, "v4"), route(5, 50, "v4")], "172.18.0.1", "2001:db8::1"),
            ("only the main table", vec![other_table, route(4, 9, "v4")], "192.0.2.1", "2001:db8::1"),
            ("the source of the route", vec![with_source("192.0.2.77")], "192.0.2.77", "2001:db8::1"),
            ("a source that is gone", vec![with_source("192.0.2.99")], "172.18.0.1", "2001:db8::1"),
            (
                "a device without address",
                vec![route(2, 0, "v4"), route(5, 1, "v4")],
                "172.18.0.1",
                "2001:db8::1",
            ),
            ("a device that is gone", vec![route(99, 0, "v4")], "192.0.2.1", "2001:db8::1"),
        ];
        for (what, routes, v4, v6) in cases {
            assert_eq!(primary_of(&with_routes(routes), &[]), [v4, v6], "{what}");
        }
    }

    #[test]
    fn address_of_the_node_object_is_preferred_if_it_is_local() {
        let network = with_routes(vec![route(5, 0, "v4")]);
        assert_eq!(primary_of(&network, &["2001:db8::3", "192.0.2.3"]), ["192.0.2.3", "2001:db8::3"]);
        assert_eq!(primary_of(&network, &["203.0.113.1"]), ["172.18.0.1", "2001:db8::1"]);
    }

    #[test]
    fn loopback_device_address_is_the_last_resort() {
        let routed = network(
            vec![
                link(1, "lo", &["~127.0.0.1/8", "192.0.2.7/32"]),
                Link { peer_elsewhere: true, ..link(2, "veth1", &["10.244.0.1/32"]) },
                link(3, "eth0", &["~169.254.0.2/30"]),
            ],
            vec![],
        );
        assert_eq!(primary_of(&routed, &[]), ["192.0.2.7"]);
    }

    #[test]
    fn health_checks_listen_on_a_family_or_on_node_port_addresses() {
        let node_ports = vec![ip("192.0.2.1"), ip("2001:db8::1")];
        let node = NodeAddresses { node_ports, ..NodeAddresses::default() };
        let networks = |texts: &[&str]| {
            NodePortAddresses::Networks(texts.iter().map(|text| text.parse().unwrap()).collect())
        };
        for (serving, expected) in [
            (NodePortAddresses::All, ["0.0.0.0", "::"]),
            (NodePortAddresses::Primary, ["192.0.2.1", "2001:db8::1"]),
            (networks(&["192.0.2.0/24"]), ["192.0.2.1", "::"]),
            (networks(&["192.0.2.0/24", "2001:db8::/64"]), ["192.0.2.1", "2001:db8::1"]),
            (networks(&["2001:db8::/64", "::/0", "0.0.0.0/0"]), ["0.0.0.0", "::"]),
        ] {
            assert_eq!(serving.listen(&node), expected.map(ip).into(), "{serving:?}");
        }
    }
}
