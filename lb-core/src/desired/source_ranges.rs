//! Who may use the addresses of a load balancer: `spec.loadBalancerSourceRanges`.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    family::Family,
    model::{Node, Service},
};

/// The networks that may use the load balancer's addresses of the Service, sorted, each once; none of a family in which
/// everybody may. As in kube-proxy each family is for itself: one without ranges is open, whatever the other has.
pub(super) fn source_ranges(service: &Service, node: &Node) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for family in Family::ALL {
        let ranges =
            || service.external.source_ranges.iter().filter(|range| Family::of(range.addr()) == family);
        let vips = || service.external.load_balancer_ips.iter().filter(|ip| Family::of(**ip) == family);
        if vips().next().is_none() || ranges().any(|range| range.prefix_len() == 0) {
            continue;
        }
        networks.extend(ranges().map(IpNet::trunc));
        // Where a load balancer's address is one of the node's own, the node speaks to it from that very address. Whether
        // the node may is for kube-proxy a matter of the address by which others know it; that others of its addresses
        // may, such as the one of a container bridge that many nodes have, lets nobody in.
        let node_may = |ip: &IpAddr| ranges().any(|range| range.contains(ip));
        if node.addresses.primary.iter().any(node_may) {
            networks.extend(vips().map(|ip| IpNet::from(*ip)));
        }
    }
    networks.sort_unstable();
    networks.dedup();
    networks
}

/// Whether sources of that family are looked at.
pub(super) fn filter(ranges: &[IpNet], family: Family) -> bool {
    ranges.iter().any(|range| Family::of(range.addr()) == family)
}
