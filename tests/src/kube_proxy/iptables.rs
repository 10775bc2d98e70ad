//! Rules as kube-proxy 1.36 writes them in mode `iptables`, with `clusterCIDR` for detecting local clients.
//!
//! Leaves out health check node ports, source ranges, and node ports on loopback addresses.

use std::{fmt::Write as _, net::SocketAddr};

use super::{Cluster, Port, Service};

/// The rules as input of `iptables-restore` or `ip6tables-restore`.
pub fn rules(cluster: &Cluster<'_>) -> String {
    let mut nat = Nat::default();
    for service in cluster.services {
        for port in service.ports {
            nat.service(cluster.cluster_cidr, service, port);
        }
    }
    let Nat { chains, services, node_ports, rules, .. } = nat;
    format!("{FILTER}*nat\n{NAT_CHAINS}{chains}{NAT}{services}{LAST}{node_ports}{rules}COMMIT\n")
}

const FILTER: &str = r#"*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"#;

const NAT_CHAINS: &str = "\
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
";

const NAT: &str = r#"-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
"#;

const LAST: &str = r#"-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
"#;

/// Collects the chains and rules of Services for the table `nat`.
#[derive(Default)]
struct Nat {
    chains: String,
    services: String,
    node_ports: String,
    rules: String,
    service_count: u32,
    endpoint_count: u32,
}

impl Nat {
    fn service(&mut self, cluster_cidr: &str, service: &Service, port: &Port) {
        // Stands for the hash of 16 characters at the end of the names of kube-proxy's chains.
        let id = format!("{:016}", self.service_count);
        self.service_count += 1;
        let name = format!("default/{}:{}", service.name, port.protocol);
        // Writing to a String never fails.
        let _infallible = self.cluster_ip(cluster_cidr, service, port, &id, &name);
        let _infallible = self.external(service, port, &id, &name);
        let _infallible = self.endpoints(service, port, &id, &name);
    }

    fn cluster_ip(
        &mut self,
        cluster_cidr: &str,
        service: &Service,
        Port { protocol, port, .. }: &Port,
        id: &str,
        name: &str,
    ) -> std::fmt::Result {
        let to = format!(
            "-m comment --comment \"{name} cluster IP\" -m {protocol} -p {protocol} -d {} --dport {port}",
            service.cluster_ip
        );
        writeln!(self.chains, ":KUBE-SVC-{id} - [0:0]")?;
        writeln!(self.services, "-A KUBE-SERVICES {to} -j KUBE-SVC-{id}")?;
        writeln!(self.rules, "-A KUBE-SVC-{id} {to} ! -s {cluster_cidr} -j KUBE-MARK-MASQ")
    }

    fn external(
        &mut self,
        service: &Service,
        Port { protocol, port, node_port, .. }: &Port,
        id: &str,
        name: &str,
    ) -> std::fmt::Result {
        let Some(address) = service.load_balancer else { return Ok(()) };
        writeln!(self.chains, ":KUBE-EXT-{id} - [0:0]")?;
        writeln!(
            self.services,
            "-A KUBE-SERVICES -m comment --comment \"{name} loadbalancer IP\" -m {protocol} -p {protocol} \
             -d {address} --dport {port} -j KUBE-EXT-{id}"
        )?;
        writeln!(
            self.node_ports,
            "-A KUBE-NODEPORTS -m comment --comment {name} -m {protocol} -p {protocol} --dport {node_port} \
             -j KUBE-EXT-{id}"
        )?;
        writeln!(
            self.rules,
            "-A KUBE-EXT-{id} -m comment --comment \"masquerade traffic for {name} external destinations\" \
             -j KUBE-MARK-MASQ\n-A KUBE-EXT-{id} -j KUBE-SVC-{id}"
        )
    }

    fn endpoints(
        &mut self,
        service: &Service,
        Port { protocol, target, .. }: &Port,
        id: &str,
        name: &str,
    ) -> std::fmt::Result {
        let count = service.endpoints.len();
        for (index, address) in service.endpoints.iter().enumerate() {
            let endpoint = SocketAddr::new(*address, *target);
            let chain = format!("KUBE-SEP-{:016}", self.endpoint_count);
            self.endpoint_count += 1;
            writeln!(self.chains, ":{chain} - [0:0]")?;
            write!(self.rules, "-A KUBE-SVC-{id} -m comment --comment \"{name} -> {endpoint}\" ")?;
            // Each rule matches with the probability 1 / `left`, so that all endpoints get an equal share.
            let left = count - index;
            if left > 1 {
                write!(self.rules, "-m statistic --mode random --probability {:.10} ", 1.0 / left as f64)?;
            }
            writeln!(self.rules, "-j {chain}")?;
            writeln!(
                self.rules,
                "-A {chain} -m comment --comment {name} -s {address} -j KUBE-MARK-MASQ\n\
                 -A {chain} -m comment --comment {name} -m {protocol} -p {protocol} -j DNAT --to-destination {endpoint}"
            )?;
        }
        Ok(())
    }
}
