use std::collections::BTreeSet;

use ipnet::IpNet;
use lb_core::family::Families;

use crate::datapath::Network;

/// How clients inside the cluster are told from others: kube-proxy's `--detect-local-mode`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum DetectLocal {
    /// Not at all.
    #[default]
    Never,
    /// Their addresses are in one of these networks.
    ClusterCidr(Vec<IpNet>),
    /// Their addresses are in the networks of this node's pods, which its Node object names.
    NodeCidr,
    /// Their packets come through this bridge.
    BridgeInterface(String),
    /// Their packets come through a device whose name begins so.
    InterfaceNamePrefix(String),
}

impl DetectLocal {
    /// The name of the mode as kube-proxy spells it.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Never => "none",
            Self::ClusterCidr(_) => "ClusterCIDR",
            Self::NodeCidr => "NodeCIDR",
            Self::BridgeInterface(_) => "BridgeInterface",
            Self::InterfaceNamePrefix(_) => "InterfaceNamePrefix",
        }
    }

    /// The networks of clients inside the cluster; `None` as long as the Node object has not named those of its pods.
    pub fn networks(&self, pod_cidrs: &[IpNet]) -> Option<Vec<IpNet>> {
        match self {
            Self::ClusterCidr(networks) => Some(networks.clone()),
            Self::NodeCidr => (!pod_cidrs.is_empty()).then(|| pod_cidrs.to_vec()),
            Self::Never | Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => Some(Vec::new()),
        }
    }

    /// In which families clients inside can be told from others: with networks only in theirs, as kube-proxy does it.
    pub fn families(&self) -> Families {
        match self {
            Self::Never => Families::NONE,
            Self::ClusterCidr(networks) => Families {
                v4: networks.iter().any(|net| net.addr().is_ipv4()),
                v6: networks.iter().any(|net| net.addr().is_ipv6()),
            },
            // Nobody knows yet of which families the networks of the node are.
            Self::NodeCidr | Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => Families::BOTH,
        }
    }

    /// Interface indices of the devices that only clients inside the cluster send through. The ports of a bridge count
    /// as the bridge: our programs see packets before it does.
    pub fn devices(&self, network: &Network) -> BTreeSet<u32> {
        let links = network.links.iter();
        match self {
            Self::Never | Self::ClusterCidr(_) | Self::NodeCidr => BTreeSet::new(),
            Self::BridgeInterface(name) => {
                let Some(bridge) = links.clone().find(|link| link.name == *name) else {
                    return BTreeSet::new();
                };
                let of_bridge =
                    links.filter(|link| link.index == bridge.index || link.controller == Some(bridge.index));
                of_bridge.map(|link| link.index).collect()
            }
            Self::InterfaceNamePrefix(prefix) => {
                links.filter(|link| link.name.starts_with(prefix)).map(|link| link.index).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::Link;

    #[test]
    fn the_networks_of_each_mode() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let pods = [net("10.244.3.0/24")];
        let of = |detect: &DetectLocal, pod_cidrs: &[IpNet]| detect.networks(pod_cidrs);
        let cluster = DetectLocal::ClusterCidr(vec![net("10.0.0.0/8")]);
        assert_eq!(of(&cluster, &pods), Some(vec![net("10.0.0.0/8")]));
        assert_eq!(of(&DetectLocal::NodeCidr, &[]), None, "not known yet");
        assert_eq!(of(&DetectLocal::NodeCidr, &pods), Some(pods.to_vec()));
        for detect in [DetectLocal::Never, DetectLocal::BridgeInterface("cni0".into())] {
            assert_eq!(of(&detect, &pods), Some(Vec::new()), "{detect:?}");
        }
    }

    #[test]
    fn the_families_of_each_mode() {
        let of = |texts: &[&str]| {
            DetectLocal::ClusterCidr(texts.iter().map(|text| text.parse().unwrap()).collect()).families()
        };
        assert_eq!(of(&["10.0.0.0/8"]), Families { v4: true, v6: false });
        assert_eq!(of(&["fd00::/48"]), Families { v4: false, v6: true });
        assert_eq!(of(&["10.0.0.0/8", "fd00::/48"]), Families::BOTH);
        assert_eq!(DetectLocal::Never.families(), Families::NONE);
        assert_eq!(DetectLocal::InterfaceNamePrefix("veth".into()).families(), Families::BOTH);
    }

    #[test]
    fn the_devices_of_each_mode() {
        let link = |index, name: &str, controller| Link {
            index,
            name: name.to_owned(),
            controller,
            ..Link::default()
        };
        let links = vec![
            link(2, "eth0", None),
            link(3, "cni0", None),
            link(4, "veth1", Some(3)),
            link(5, "veth2", Some(3)),
            link(6, "veth3", Some(7)),
            link(7, "cni01", None),
        ];
        let network = Network { links, default_routes: Vec::new() };
        let cases: [(DetectLocal, &[u32]); 7] = [
            (DetectLocal::Never, &[]),
            (DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().unwrap()]), &[]),
            (DetectLocal::NodeCidr, &[]),
            (DetectLocal::BridgeInterface("cni0".into()), &[3, 4, 5]),
            (DetectLocal::BridgeInterface("cni".into()), &[]),
            (DetectLocal::InterfaceNamePrefix("veth".into()), &[4, 5, 6]),
            (DetectLocal::InterfaceNamePrefix("cali".into()), &[]),
        ];
        for (detect, devices) in cases {
            assert!(detect.devices(&network).into_iter().eq(devices.iter().copied()), "{detect:?}");
        }
    }
}
