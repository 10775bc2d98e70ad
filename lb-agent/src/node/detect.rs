use std::collections::BTreeSet;

use ipnet::IpNet;
use lb_core::family::{Families, Family};

use lb_datapath::Network;

/// How the agent recognises internal clients: [`Self::Never`], or one of the modes of kube-proxy's
/// `--detect-local-mode`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum DetectLocal {
    /// All clients count as external. Clients of cluster IPs are masqueraded only under `--masquerade-all`.
    #[default]
    Never,
    /// Clients with an address in one of these networks are internal.
    ClusterCidr(Vec<IpNet>),
    /// Clients with an address in the pod networks of this node's Node object are internal.
    NodeCidr,
    /// Clients whose packets arrive through this bridge are internal.
    BridgeInterface(String),
    /// Clients whose packets arrive on an interface with this name prefix are internal.
    InterfaceNamePrefix(String),
}

impl DetectLocal {
    /// The pod networks that the setting contains; empty in other modes than `ClusterCIDR`.
    pub fn pod_networks(&self) -> &[IpNet] {
        match self {
            Self::ClusterCidr(networks) => networks,
            Self::Never | Self::NodeCidr | Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => &[],
        }
    }

    /// Name of the mode, as kube-proxy spells it; `none` for [`Self::Never`].
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Never => "none",
            Self::ClusterCidr(_) => "ClusterCIDR",
            Self::NodeCidr => "NodeCIDR",
            Self::BridgeInterface(_) => "BridgeInterface",
            Self::InterfaceNamePrefix(_) => "InterfaceNamePrefix",
        }
    }

    /// Networks whose clients are internal. In mode `NodeCIDR`, `None` until the Node object names pod networks.
    pub fn networks(&self, pod_cidrs: &[IpNet]) -> Option<Vec<IpNet>> {
        match self {
            Self::ClusterCidr(networks) => Some(networks.clone()),
            Self::NodeCidr => (!pod_cidrs.is_empty()).then(|| pod_cidrs.to_vec()),
            Self::Never | Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => Some(Vec::new()),
        }
    }

    /// Families in which the node can distinguish internal clients from external ones. As in kube-proxy, networks apply
    /// only to clients of their own family. `networks` are the current networks of internal clients.
    pub fn families(&self, networks: &[IpNet]) -> Families {
        match self {
            Self::Never => Families::NONE,
            Self::ClusterCidr(_) | Self::NodeCidr => families_of(networks),
            Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => Families::BOTH,
        }
    }

    /// In mode `NodeCIDR`, a condition for each family in `in_use` in which the Node object has no pod network; none in
    /// other modes. `pod_cidrs` is `None` until the agent has read the Node object; `inside` are the families of the
    /// current networks of internal clients.
    pub fn problems(
        &self,
        node_name: &str,
        pod_cidrs: Option<&[IpNet]>,
        in_use: Families,
        inside: Families,
    ) -> Vec<String> {
        let (Self::NodeCidr, Some(pod_cidrs)) = (self, pod_cidrs) else { return Vec::new() };
        let named = families_of(pod_cidrs);
        let missing =
            Family::ALL.into_iter().filter(|family| in_use.contains(*family) && !named.contains(*family));
        let problem = |family: Family| {
            let meanwhile = if inside.contains(family) {
                "the pod network that was known before stays in force"
            } else {
                "in that family external clients cannot be recognised, so they are not masqueraded when they use cluster IPs"
            };
            format!(
                "Node {node_name:?} has no podCIDR of family {family}: {meanwhile}; let the control plane allocate one \
                 (kube-controller-manager --allocate-node-cidrs), set another --detect-local-mode, or set a \
                 --service-cluster-ip-range without that family",
                family = family.as_str(),
            )
        };
        missing.map(problem).collect()
    }

    /// Interface indices of the devices whose clients are internal. In mode `BridgeInterface`, these are the bridge and
    /// its ports: a packet that enters through a port meets the program of the port first.
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

fn families_of(networks: &[IpNet]) -> Families {
    networks.iter().map(|net| Family::of(net.addr())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_datapath::Link;

    const V4: Families = Families { v4: true, v6: false };
    const V6: Families = Families { v4: false, v6: true };

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn each_mode_has_its_networks() {
        let pods = nets(&["10.244.3.0/24"]);
        let of = |detect: &DetectLocal, pod_cidrs: &[IpNet]| detect.networks(pod_cidrs);
        let cluster = DetectLocal::ClusterCidr(nets(&["10.0.0.0/8"]));
        assert_eq!(of(&cluster, &pods), Some(nets(&["10.0.0.0/8"])));
        assert_eq!(of(&DetectLocal::NodeCidr, &[]), None, "not known yet");
        assert_eq!(of(&DetectLocal::NodeCidr, &pods), Some(pods.clone()));
        for detect in [DetectLocal::Never, DetectLocal::BridgeInterface("cni0".into())] {
            assert_eq!(of(&detect, &pods), Some(Vec::new()), "{detect:?}");
        }
    }

    #[test]
    fn each_mode_has_its_families() {
        for by_network in
            [DetectLocal::NodeCidr, DetectLocal::ClusterCidr(nets(&["10.0.0.0/8", "fd00::/48"]))]
        {
            for (known, families) in [
                (&[][..], Families::NONE),
                (&["10.244.3.0/24"], V4),
                (&["fd00:10:244:3::/64"], V6),
                (&["10.244.3.0/24", "fd00:10:244:3::/64"], Families::BOTH),
            ] {
                assert_eq!(by_network.families(&nets(known)), families, "{by_network:?} {known:?}");
            }
        }
        assert_eq!(DetectLocal::Never.families(&[]), Families::NONE);
        assert_eq!(DetectLocal::BridgeInterface("cni0".into()).families(&[]), Families::BOTH);
        assert_eq!(DetectLocal::InterfaceNamePrefix("veth".into()).families(&[]), Families::BOTH);
    }

    #[test]
    fn node_without_pod_network_is_a_condition_in_each_family_in_use() {
        let missing = |shown: Option<&[&str]>, in_use, count| {
            let shown = shown.map(nets);
            DetectLocal::NodeCidr.problems("a", shown.as_deref(), in_use, count)
        };
        let both = missing(Some(&[]), Families::BOTH, Families::NONE);
        assert_eq!(both.len(), 2, "{both:?}");
        assert!(both[0].starts_with("Node \"a\" has no podCIDR of family IPv4: "), "{both:?}");
        assert!(both[1].starts_with("Node \"a\" has no podCIDR of family IPv6: "), "{both:?}");
        let one = missing(Some(&["10.244.3.0/24"]), Families::BOTH, V4);
        assert_eq!(one, both[1..]);
        assert!(one[0].contains("are not masqueraded"), "{one:?}");
        let stays = missing(Some(&[]), V4, V4);
        assert!(stays.len() == 1 && stays[0].contains("that was known before stays"), "{stays:?}");
        assert_eq!(missing(Some(&["10.244.3.0/24"]), V4, V4), [""; 0], "IPv6 is not in use");
        assert_eq!(missing(None, Families::BOTH, Families::NONE), [""; 0], "the Node is unknown");
        let other = DetectLocal::InterfaceNamePrefix("veth".into());
        assert_eq!(other.problems("a", Some(&[]), Families::BOTH, Families::BOTH), [""; 0]);
    }

    #[test]
    fn each_mode_has_its_devices() {
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
        let network = Network { links, ..Network::default() };
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
