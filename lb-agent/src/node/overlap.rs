use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{Primary, addresses::addresses_of};
use lb_datapath::Network;

/// A condition for each network of an interface that overlaps a range of cluster IPs: machines in that network may have
/// cluster IPs as addresses. Networks of a single address (`/32`, `/128`) count only if it is a primary address of the
/// node: a node-local DNS cache, for example, has the cluster IP of the DNS Service.
pub fn overlaps(network: &Network, primary: &Primary, ranges: &[IpNet]) -> Vec<String> {
    let mut problems = BTreeSet::new();
    for link in &network.links {
        for address in addresses_of(link) {
            let Ok(net) = IpNet::new(address.ip, address.prefix).map(|net| net.trunc()) else { continue };
            if net.prefix_len() == net.max_prefix_len() && !primary.contains(address.ip) {
                continue;
            }
            let meets = |range: &&IpNet| range.contains(&net) || net.contains(*range);
            problems.extend(ranges.iter().filter(meets).map(|range| {
                format!(
                    "{net} of device {device} overlaps the cluster IP range {range}: addresses of machines there are treated as \
                     cluster IPs; set another --service-cluster-ip-range (with an API server also in the control plane)",
                    device = link.name,
                )
            }));
        }
    }
    problems.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_datapath::{Link, LinkAddress};

    fn link(name: &str, up: bool, addresses: &[&str]) -> Link {
        let address = |text: &&str| {
            let net: IpNet = text.parse().unwrap();
            LinkAddress { ip: net.addr(), prefix: net.prefix_len(), global: true, secondary: false }
        };
        Link {
            name: name.to_owned(),
            up,
            addresses: addresses.iter().map(address).collect(),
            ..Link::default()
        }
    }

    #[test]
    fn overlapping_networks_are_named() {
        let ranges = ["10.96.0.0/12".parse().unwrap(), "fd00:10:96::/112".parse().unwrap()];
        let links = vec![
            link("eth0", true, &["10.100.0.5/16", "fd00:10::5/32", "192.0.2.5/24"]),
            link("nodelocaldns", true, &["10.96.0.10/32", "fd00:10:96::a/128"]),
            link("eth1", false, &["10.101.0.5/16"]),
            link("kube-ipvs0", true, &["10.96.0.1/12"]),
        ];
        let network = Network { links, ..Network::default() };
        let problems = overlaps(&network, &Primary::default(), &ranges);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("10.100.0.0/16 of device eth0") && problems[0].contains("10.96.0.0/12"));
        assert!(problems[1].contains("fd00:10::/32 of device eth0"), "{problems:?}");

        let lone = Network { links: vec![link("eth0", true, &["10.100.0.5/32"])], ..Network::default() };
        assert_eq!(overlaps(&lone, &Primary::default(), &ranges), Vec::<String>::new());
        let primary = Primary { v4: "10.100.0.5".parse().ok(), v6: None };
        assert_eq!(overlaps(&lone, &primary, &ranges).len(), 1);
    }
}
