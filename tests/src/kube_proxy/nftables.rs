//! Rules as kube-proxy 1.36 writes them in mode `nftables`, with `clusterCIDR` for detecting local clients.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use super::{Cluster, Port, Service};

/// The rules as input of `nft -f`.
pub fn rules(cluster: &Cluster<'_>) -> String {
    let (ip, address) = if cluster.is_ipv6 { ("ip6", "ipv6_addr") } else { ("ip", "ipv4_addr") };
    let base = BASE.replace("FAMILY", ip).replace("ADDRESS", address);
    let base =
        base.replace("CLUSTER_CIDR", cluster.cluster_cidr).replace("SERVICE_CIDR", cluster.service_cidr);
    let mut table = Table { ip, text: base };
    for address in cluster.node_addresses {
        table.add(&format!("element {ip} kube-proxy nodeport-ips {{ {address} }}"));
    }
    for service in cluster.services {
        table.service(service);
    }
    table.text
}

/// The table, with the sets, maps, chains and rules that do not depend on Services. `FAMILY` stands for `ip` or `ip6`,
/// `ADDRESS` for `ipv4_addr` or `ipv6_addr`, `CLUSTER_CIDR` and `SERVICE_CIDR` for [`Cluster::cluster_cidr`] and
/// [`Cluster::service_cidr`].
const BASE: &str = r#"add table FAMILY kube-proxy { comment "rules for kube-proxy" ; }
add set FAMILY kube-proxy cluster-ips { type ADDRESS ; comment "Active ClusterIPs" ; }
add set FAMILY kube-proxy nodeport-ips { type ADDRESS ; comment "IPs that accept NodePort traffic" ; }
add set FAMILY kube-proxy hairpin-connections { type ADDRESS . ADDRESS . inet_proto . inet_service ; comment "service hairpin connections" ; }
add map FAMILY kube-proxy firewall-ips { type ADDRESS . inet_proto . inet_service : verdict ; comment "destinations that are subject to LoadBalancerSourceRanges" ; }
add map FAMILY kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to service nodeports with no endpoints" ; }
add map FAMILY kube-proxy no-endpoint-services { type ADDRESS . inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to services with no endpoints" ; }
add map FAMILY kube-proxy service-ips { type ADDRESS . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add map FAMILY kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }
add chain FAMILY kube-proxy cluster-ips-check
add chain FAMILY kube-proxy filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }
add chain FAMILY kube-proxy filter-output-pre-dnat { type filter hook output priority -110 ; }
add chain FAMILY kube-proxy filter-forward { type filter hook forward priority 0 ; }
add chain FAMILY kube-proxy filter-input { type filter hook input priority 0 ; }
add chain FAMILY kube-proxy filter-output { type filter hook output priority 0 ; }
add chain FAMILY kube-proxy firewall-check
add chain FAMILY kube-proxy masquerading
add chain FAMILY kube-proxy nat-output { type nat hook output priority -100 ; }
add chain FAMILY kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain FAMILY kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain FAMILY kube-proxy nodeport-endpoints-check
add chain FAMILY kube-proxy reject-chain { comment "helper for @no-endpoint-services / @no-endpoint-nodeports" ; }
add chain FAMILY kube-proxy services
add chain FAMILY kube-proxy service-endpoints-check
add rule FAMILY kube-proxy cluster-ips-check FAMILY daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
add rule FAMILY kube-proxy cluster-ips-check FAMILY daddr { SERVICE_CIDR } drop comment "Drop traffic to unallocated ClusterIPs"
add rule FAMILY kube-proxy filter-prerouting-pre-dnat ct state new jump firewall-check
add rule FAMILY kube-proxy filter-forward ct state new jump service-endpoints-check
add rule FAMILY kube-proxy filter-forward ct state new jump cluster-ips-check
add rule FAMILY kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule FAMILY kube-proxy filter-input ct state new jump service-endpoints-check
add rule FAMILY kube-proxy filter-output ct state new jump service-endpoints-check
add rule FAMILY kube-proxy filter-output-pre-dnat ct state new jump firewall-check
add rule FAMILY kube-proxy filter-output ct state new jump cluster-ips-check
add rule FAMILY kube-proxy firewall-check FAMILY daddr . meta l4proto . th dport vmap @firewall-ips
add rule FAMILY kube-proxy masquerading mark and 0x4000 != 0 mark set mark xor 0x4000 masquerade fully-random
add rule FAMILY kube-proxy masquerading ct status dnat FAMILY saddr . FAMILY daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
add rule FAMILY kube-proxy nat-output jump services
add rule FAMILY kube-proxy nat-postrouting jump masquerading
add rule FAMILY kube-proxy nat-prerouting jump services
add rule FAMILY kube-proxy nodeport-endpoints-check FAMILY daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
add rule FAMILY kube-proxy reject-chain reject
add rule FAMILY kube-proxy services FAMILY daddr @cluster-ips FAMILY saddr != CLUSTER_CIDR mark set mark or 0x4000 comment "masquerade clusterIP traffic from outside cluster"
add rule FAMILY kube-proxy services FAMILY daddr . meta l4proto . th dport vmap @service-ips
add rule FAMILY kube-proxy services FAMILY daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
add rule FAMILY kube-proxy service-endpoints-check FAMILY daddr . meta l4proto . th dport vmap @no-endpoint-services
"#;

struct Table {
    ip: &'static str,
    text: String,
}

impl Table {
    fn add(&mut self, what: &str) {
        // Writing to a String never fails.
        let _infallible = writeln!(self.text, "add {what}");
    }

    fn service(&mut self, service: &Service) {
        let ip = self.ip;
        self.add(&format!("element {ip} kube-proxy cluster-ips {{ {} }}", service.cluster_ip));
        for (index, port) in service.ports.iter().enumerate() {
            // Stands for the hash of 8 characters at the beginning of the names of kube-proxy's chains.
            let name = format!("{index:08}-default/{}/{1}/{1}", service.name, port.protocol);
            self.cluster_ip(service, port, &name);
            self.external(service, port, &name);
        }
    }

    fn cluster_ip(&mut self, service: &Service, port: &Port, name: &str) {
        let (ip, Port { protocol, target, .. }) = (self.ip, *port);
        let chain = format!("service-{name}");
        self.add(&format!("chain {ip} kube-proxy {chain}"));
        let dnat = match service.endpoints[..] {
            [endpoint] => format!("dnat to {}", SocketAddr::new(endpoint, target)),
            _ => format!("dnat {ip} to numgen random mod {}", endpoints(service, target)),
        };
        self.add(&format!("rule {ip} kube-proxy {chain} meta l4proto {protocol} {dnat}"));
        self.goto(service.cluster_ip, port, &chain);
        if service.is_local {
            for endpoint in &service.endpoints {
                self.add(&format!(
                    "element {ip} kube-proxy hairpin-connections {{ {endpoint} . {endpoint} . {protocol} . {target} }}"
                ));
            }
        }
    }

    fn external(&mut self, service: &Service, port: &Port, name: &str) {
        let (ip, Port { protocol, node_port, .. }) = (self.ip, *port);
        let Some(address) = service.load_balancer else { return };
        let chain = format!("external-{name}");
        self.add(&format!("chain {ip} kube-proxy {chain}"));
        self.add(&format!("rule {ip} kube-proxy {chain} mark set mark or 0x4000"));
        self.add(&format!("rule {ip} kube-proxy {chain} goto service-{name}"));
        self.goto(address, port, &chain);
        self.add(&format!(
            "element {ip} kube-proxy service-nodeports {{ {protocol} . {node_port} : goto {chain} }}"
        ));
    }

    fn goto(&mut self, address: IpAddr, Port { protocol, port, .. }: &Port, chain: &str) {
        let ip = self.ip;
        self.add(&format!(
            "element {ip} kube-proxy service-ips {{ {address} . {protocol} . {port} : goto {chain} }}"
        ));
    }
}

/// The operands of `numgen random mod`: the number of endpoints, and an nftables map from each index to an endpoint.
fn endpoints(service: &Service, target: u16) -> String {
    let endpoints = service.endpoints.iter().enumerate();
    let endpoints = endpoints.map(|(index, address)| format!("{index} : {address} . {target}"));
    format!("{} map {{ {} }}", service.endpoints.len(), endpoints.collect::<Vec<_>>().join(", "))
}
