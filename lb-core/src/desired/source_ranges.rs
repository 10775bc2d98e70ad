//! The sources that may use the addresses of a load balancer: `spec.loadBalancerSourceRanges`.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    family::Family,
    model::{Node, Service},
};

/// The networks that may use the load balancer addresses of the Service, sorted, each once. As in kube-proxy, ranges
/// apply per family: a family without ranges admits every client and has no networks in this list.
pub(super) fn source_ranges(service: &Service, node: &Node) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for family in Family::ALL {
        let ranges =
            || service.external.source_ranges.iter().filter(|range| Family::of(range.addr()) == family);
        let vips = || service.external.load_balancer_ips.iter().filter(|ip| Family::of(**ip) == family);
        // Only load balancer addresses check ranges; `0.0.0.0/0` and `::/0` admit every client.
        if vips().next().is_none() || ranges().any(|range| range.prefix_len() == 0) {
            continue;
        }
        networks.extend(ranges().map(IpNet::trunc));
        // If the load balancer's address is one of the node's own, packets of the node to that address also have it as
        // their source. So if the ranges admit the node's primary address, kube-proxy also admits the load balancer's
        // addresses as sources. (The socket hooks do not need these entries: they check the primary address itself.)
        // Other addresses of the node, such as that of a container bridge, which many nodes share, make no difference.
        let node_may = |ip: &IpAddr| ranges().any(|range| range.contains(ip));
        if node.addresses.primary.iter().any(node_may) {
            networks.extend(vips().map(|ip| IpNet::from(*ip)));
        }
    }
    networks.sort_unstable();
    networks.dedup();
    networks
}

/// Whether there are ranges of that family; without any, every client is admitted.
pub(super) fn has_ranges(ranges: &[IpNet], family: Family) -> bool {
    ranges.iter().any(|range| Family::of(range.addr()) == family)
}
