//! Tests with objects as users of MetalLB have them, unchanged: addresses and announcements must be those that
//! MetalLB's documentation describes.

use std::{collections::BTreeSet, sync::Arc};

use lb_core::{
    announce::{
        advertisement::{Advertised, labels_of},
        bgp::{Configuration, configuration, routes},
        holders::Holder,
    },
    family::Families,
    load_balancer::Labels,
};

use super::*;

/// A Service of type LoadBalancer; `metadata` and `spec` are further lines of these sections, such as the ports.
fn balancer(name: &str, metadata: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n{metadata}spec:\n  type: LoadBalancer\n  \
         selector:\n    app: {name}\n{spec}"
    )
}

const HTTP: &str = "  ports:\n  - name: http\n    port: 80\n    protocol: TCP\n    targetPort: 8080\n";

fn node(name: &str) -> (Arc<str>, Labels) {
    (Arc::from(name), labels_of(&Arc::from(name)))
}

impl Folder {
    fn addresses(&self, name: &str) -> Vec<String> {
        self.service(name).external.load_balancer_ips.iter().map(ToString::to_string).collect()
    }

    /// The devices on which a node may announce an address at layer 2; `None` if it may not, empty for all devices.
    fn layer2(&self, address: &str, on: &str) -> Option<BTreeSet<String>> {
        let (advertised, (_, labels)) = (self.manifests.advertised(), node(on));
        let of_node = advertised.of(address.parse().unwrap()).filter(|it| it.selects_node(&labels));
        of_node.map(|it| it.interfaces.clone()).reduce(|one, other| {
            let all = one.is_empty() || other.is_empty();
            if all { BTreeSet::new() } else { one.union(&other).cloned().collect() }
        })
    }

    /// The routes that the node `on` offers while it serves these addresses.
    fn routes(&self, on: &str, addresses: &[&str]) -> Vec<String> {
        let (advertised, (name, labels)) = (self.manifests.advertised(), node(on));
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let here = addresses.iter().copied().collect();
        let given = BTreeSet::new();
        let holder = Holder { addresses, given, served: Families::BOTH, nodes: None, here };
        let holders = BTreeMap::from([(ObjectName::new("default", "web"), holder)]);
        routes(&advertised, &holders, &name, &labels).keys().map(ToString::to_string).collect()
    }

    /// BIRD's configuration on the node `on`.
    fn bird(&self, on: &str) -> String {
        let advertised: Advertised = self.manifests.advertised();
        let configuration: Configuration = configuration(&advertised, 1080, &node(on).1);
        assert_eq!(configuration.errors.len() + configuration.warnings.len(), 0, "{configuration:?}");
        configuration.text("", true)
    }
}

#[test]
fn pool_and_layer_2_advertisement_of_a_small_network() {
    let objects = "\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: first-pool
  namespace: metallb-system
spec:
  addresses:
  - 192.168.1.240-192.168.1.250
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata:
  name: example
  namespace: metallb-system
";
    let folder = Folder::of(&[("metallb.yaml", objects), ("web.yaml", &balancer("web", "", HTTP))]);
    assert_eq!((folder.addresses("web"), folder.problems()), (vec!["192.168.1.240".into()], vec![]));
    assert_eq!(folder.layer2("192.168.1.240", "any"), Some(BTreeSet::new()));
    assert_eq!(folder.layer2("192.168.1.251", "any"), None, "an address of no pool");
}

#[test]
fn pools_for_namespaces_and_for_those_that_name_them() {
    let objects = "\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: cheap
  namespace: metallb-system
spec:
  addresses:
  - 192.168.144.0/20
  avoidBuggyIPs: true
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: expensive
  namespace: metallb-system
spec:
  addresses:
  - 42.176.25.64/30
  autoAssign: false
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: shop
  namespace: metallb-system
spec:
  addresses:
  - 192.168.20.0/24
  - fd00:20::/120
  serviceAllocation:
    priority: 50
    namespaces:
    - default
    namespaceSelectors:
    - matchLabels:
        team: shop
    serviceSelectors:
    - matchExpressions:
      - {key: tier, operator: In, values: [front]}
";
    let front = "  labels:\n    tier: front\n";
    let named = "  annotations:\n    metallb.io/address-pool: expensive\n";
    let asked = "  annotations:\n    metallb.io/loadBalancerIPs: 192.168.144.9\n";
    let folder = Folder::of(&[
        ("metallb.yaml", objects),
        ("web.yaml", &balancer("web", "", HTTP)),
        ("front.yaml", &balancer("front", front, &format!("  ipFamilyPolicy: RequireDualStack\n{HTTP}"))),
        ("named.yaml", &balancer("named", named, HTTP)),
        ("asked.yaml", &balancer("asked", asked, HTTP)),
    ]);
    assert_eq!(folder.problems(), [""; 0]);
    assert_eq!(folder.addresses("web"), ["192.168.144.1"], "not .0");
    assert_eq!(folder.addresses("front"), ["192.168.20.0", "fd00:20::"]);
    assert_eq!(folder.addresses("named"), ["42.176.25.64"]);
    assert_eq!(folder.addresses("asked"), ["192.168.144.9"]);
}

#[test]
fn services_share_an_address_by_their_key() {
    let pool = "\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: pool
  namespace: metallb-system
spec:
  addresses:
  - 1.2.3.0/28
";
    let key = "  annotations:\n    metallb.io/allow-shared-ip: \"key-to-share-1.2.3.4\"\n";
    let dns = |name: &str, protocol: &str| {
        let ports = format!(
            "  loadBalancerIP: 1.2.3.4\n  ports:\n  - name: dns\n    protocol: {protocol}\n    port: 53\n    targetPort: 53\n"
        );
        balancer(name, key, &ports)
    };
    let mut folder = Folder::of(&[
        ("pool.yaml", pool),
        ("dns-tcp.yaml", &dns("dns-tcp", "TCP")),
        ("dns-udp.yaml", &dns("dns-udp", "UDP")),
    ]);
    assert_eq!(folder.problems(), [""; 0]);
    for service in ["dns-tcp", "dns-udp"] {
        assert_eq!(folder.addresses(service), ["1.2.3.4"], "{service}");
    }
    // A third Service requests the shared address with the same protocol and port as `dns-tcp`.
    folder.write(&[("dns-two.yaml", &dns("dns-two", "TCP"))]);
    let problems = folder.problems();
    assert!(
        problems[0].contains("Service default/dns-tcp has 1.2.3.4: they have a port in common"),
        "{problems:?}"
    );
    assert_eq!(folder.addresses("dns-two"), [""; 0]);
    assert_eq!(folder.addresses("dns-tcp"), ["1.2.3.4"]);
}

#[test]
fn layer_2_advertisements_choose_pools_nodes_and_devices() {
    let objects = "\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: first-pool
  namespace: metallb-system
  labels:
    zone: east
spec:
  addresses:
  - 192.168.10.0/28
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: second-pool
  namespace: metallb-system
spec:
  addresses:
  - 192.168.20.0/28
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata:
  name: nodes
  namespace: metallb-system
spec:
  ipAddressPoolSelectors:
  - matchExpressions:
    - key: zone
      operator: In
      values:
      - east
  nodeSelectors:
  - matchLabels:
      kubernetes.io/hostname: NodeA
  - matchLabels:
      kubernetes.io/hostname: NodeB
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata:
  name: devices
  namespace: metallb-system
spec:
  ipAddressPools:
  - second-pool
  interfaces:
  - eth1
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata:
  name: more-devices
  namespace: metallb-system
spec:
  ipAddressPools:
  - second-pool
  nodeSelectors:
  - matchLabels:
      kubernetes.io/hostname: NodeA
  interfaces:
  - eth2
";
    let folder = Folder::of(&[("metallb.yaml", objects)]);
    assert_eq!(folder.problems(), [""; 0]);
    let devices = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect());
    assert_eq!(folder.layer2("192.168.10.1", "NodeA"), devices(&[]));
    assert_eq!(folder.layer2("192.168.10.1", "NodeC"), None);
    assert_eq!(folder.layer2("192.168.20.1", "NodeA"), devices(&["eth1", "eth2"]), "their union");
    assert_eq!(folder.layer2("192.168.20.1", "NodeC"), devices(&["eth1"]));
}

const BGP: &str = "\
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata:
  name: sample
  namespace: metallb-system
spec:
  myASN: 64500
  peerASN: 64501
  peerAddress: 10.0.0.1
  bfdProfile: testbfdprofile
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata:
  name: rack
  namespace: metallb-system
spec:
  myASN: 64500
  peerASN: 64500
  peerAddress: 10.0.0.2
  nodeSelectors:
  - matchLabels:
      kubernetes.io/hostname: hostA
---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata:
  name: testbfdprofile
  namespace: metallb-system
spec:
  receiveInterval: 380
  transmitInterval: 270
  detectMultiplier: 38
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: bgp-pool
  namespace: metallb-system
spec:
  addresses:
  - 198.51.100.0/24
---
apiVersion: metallb.io/v1beta1
kind: Community
metadata:
  name: communities
  namespace: metallb-system
spec:
  communities:
  - name: vpn-only
    value: 1234:1
  - name: NO_ADVERTISE
    value: 65535:65282
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata:
  name: local
  namespace: metallb-system
spec:
  ipAddressPools:
  - bgp-pool
  aggregationLength: 32
  localPref: 100
  communities:
  - NO_ADVERTISE
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata:
  name: external
  namespace: metallb-system
spec:
  ipAddressPools:
  - bgp-pool
  aggregationLength: 24
  communities:
  - vpn-only
  - large:64500:1:2
  peers:
  - sample
";

#[test]
fn bgp_advertisements_give_host_routes_and_aggregates_with_their_communities() {
    let folder = Folder::of(&[("metallb.yaml", BGP), ("web.yaml", &balancer("web", "", HTTP))]);
    assert_eq!((folder.addresses("web"), folder.problems()), (vec!["198.51.100.0".into()], vec![]));
    assert_eq!(folder.routes("hostA", &["198.51.100.10"]), ["198.51.100.0/24", "198.51.100.10/32"]);
    assert_eq!(folder.routes("hostA", &["203.0.113.1"]), [""; 0], "an address of no pool");

    let on_a = folder.bird("hostA");
    for statement in [
        "neighbor 10.0.0.1 port 179 as 64501",
        "neighbor 10.0.0.2 port 179 as 64500",
        "min rx interval 380 ms",
        "min tx interval 270 ms",
        "multiplier 38",
        "bgp_community.add((65535,65282))",
        "bgp_community.add((1234,1))",
        "bgp_large_community.add((64500,1,2))",
        "bgp_local_pref = 100",
        "import none",
    ] {
        assert!(on_a.contains(statement), "{statement} is not in\n{on_a}");
    }
    // The aggregate goes to the peer that its advertisement names; each filter lists the routes of its peer.
    let of_rack = on_a.split("# BGPPeer ").find(|it| it.starts_with("metallb-system/rack")).unwrap();
    assert!(of_rack.contains("(65535,65282)") && !of_rack.contains("(1234,1)"), "{on_a}");
    assert!(!folder.bird("hostB").contains("10.0.0.2"), "the rack's router is a peer of hostA only");
}
