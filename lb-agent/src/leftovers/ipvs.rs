//! Leftovers of kube-proxy's mode `ipvs`: an interface with the addresses of all Services, virtual servers, and address
//! sets that rules of iptables use.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::Path,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, netdevice::name_to_index, socket},
};

use super::{Findings, Invocation, Leftover, ToolError};

/// Name of the dummy interface on which kube-proxy puts the addresses of all Services.
const DEVICE: &str = "kube-ipvs0";
/// The range of node ports that an API server uses by default.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// Path that exists if the kernel module of ipset is loaded. The search checks this path first: `ipset` would load the
/// module, and a search must change nothing.
const SETS_MODULE: &str = "/sys/module/ip_set";
/// Names of the sets that kube-proxy creates, without the prefix `KUBE-` or, for IPv6, `KUBE-6-`.
const SETS: [&str; 17] = [
    "CLUSTER-IP",
    "EXTERNAL-IP",
    "EXTERNAL-IP-LOCAL",
    "HEALTH-CHECK-NODE-PORT",
    "IPVS-IPS",
    "LOAD-BALANCER",
    "LOAD-BALANCER-FW",
    "LOAD-BALANCER-LOCAL",
    "LOAD-BALANCER-SOURCE-CIDR",
    "LOAD-BALANCER-SOURCE-IP",
    "LOOP-BACK",
    "NODE-PORT-LOCAL-SCTP-HASH",
    "NODE-PORT-LOCAL-TCP",
    "NODE-PORT-LOCAL-UDP",
    "NODE-PORT-SCTP-HASH",
    "NODE-PORT-TCP",
    "NODE-PORT-UDP",
];
/// Maximum number of attempts to remove a set: it stays in use for a moment after the last rule that uses it was
/// removed.
const ATTEMPTS: u32 = 20;
/// Maximum length of a set's name in the kernel; longer names are cut.
const SET_NAME: usize = 31;

pub(super) fn find(findings: &mut Findings) {
    match has_device() {
        Ok(true) => device(findings),
        Ok(false) => {}
        Err(error) => findings.errors.push(error),
    }
    if Path::new(SETS_MODULE).exists() {
        sets(findings);
    }
}

fn has_device() -> Result<bool, ToolError> {
    let index =
        socket(AddressFamily::INET, SocketType::DGRAM, None).and_then(|any| name_to_index(any, DEVICE));
    match index {
        Ok(_) => Ok(true),
        Err(Errno::NODEV) => Ok(false),
        Err(error) => Err(ToolError { command: format!("ip link show {DEVICE}"), reason: error.to_string() }),
    }
}

/// Finds the interface `kube-ipvs0`, and kube-proxy's virtual servers, see [`servers`].
fn device(findings: &mut Findings) {
    let Some(listed) = findings.output_of("ip", &["-o", "address", "show", "dev", DEVICE]) else { return };
    let addresses = addresses(&listed);
    let saved = findings.output_of("ipvsadm", &["-S", "-n"]);
    let servers = saved.as_deref().map_or_else(Vec::new, |saved| servers(saved, &addresses));
    let mut removal: Vec<Invocation> = servers
        .iter()
        .map(|Server { protocol, at, .. }| Invocation::new("ipvsadm", &["-D", protocol, at]))
        .collect();
    removal.push(Invocation::new("ip", &["link", "delete", "dev", DEVICE]));
    let (count, servers) = (addresses.len(), servers.len());
    let what = format!("the device {DEVICE} with {count} addresses and {servers} virtual servers of IPVS");
    findings.leftovers.push(Leftover { what, removal });
}

/// Finds kube-proxy's sets of ipset. They can be removed only after the rules that use them.
fn sets(findings: &mut Findings) {
    let Some(listed) = findings.output_of("ipset", &["list", "-n"]) else { return };
    let destroy = |name| Invocation { attempts: ATTEMPTS, ..Invocation::new("ipset", &["destroy", name]) };
    let removal: Vec<_> = listed.lines().filter(|name| is_kube_proxys(name)).map(destroy).collect();
    if !removal.is_empty() {
        findings.leftovers.push(Leftover { what: format!("{} sets of ipset", removal.len()), removal });
    }
}

fn is_kube_proxys(set: &str) -> bool {
    let is = |prefix: &str, name: &str| {
        let whole = format!("{prefix}{name}");
        whole.get(..SET_NAME).unwrap_or(&whole) == set
    };
    ["KUBE-", "KUBE-6-"].into_iter().any(|prefix| SETS.into_iter().any(|name| is(prefix, name)))
}

/// The addresses in the output of `ip -o address show`, without link-local ones.
fn addresses(listed: &str) -> BTreeSet<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| !["inet", "inet6"].contains(word)).skip(1);
        let address = words.next()?.split('/').next()?.parse().ok()?;
        (!line.contains("scope link")).then_some(address)
    };
    listed.lines().filter_map(address).collect()
}

/// A virtual server of IPVS, in the format of `ipvsadm -S -n`.
#[derive(Debug, PartialEq, Eq)]
struct Server<'a> {
    /// The option by which ipvsadm selects the protocol, such as `-t`.
    protocol: &'a str,
    at: &'a str,
    /// Addresses and ports of the virtual server's real servers.
    real: BTreeSet<&'a str>,
}

impl Server<'_> {
    /// Address and port of the virtual server; `None` if it has another form, such as a firewall mark.
    fn address(&self) -> Option<SocketAddr> {
        self.at.parse().ok()
    }

    /// Whether this virtual server seems to be a node port of a Service in `services`, the virtual servers on the
    /// addresses of the interface. True if this virtual server has real servers and a port in the default range of node
    /// ports, and a virtual server in `services` has the same protocol and all these real servers.
    fn is_node_port_of(&self, services: &[Self]) -> bool {
        let is_in_range = self.address().is_some_and(|address| NODE_PORTS.contains(&address.port()));
        let shares = |other: &Self| other.protocol == self.protocol && self.real.is_subset(&other.real);
        is_in_range && !self.real.is_empty() && services.iter().any(shares)
    }
}

/// The virtual servers on these addresses, and those that seem to be node ports of the same Services.
fn servers<'a>(saved: &'a str, addresses: &BTreeSet<IpAddr>) -> Vec<Server<'a>> {
    let mut real: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for line in saved.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["-A", protocol, at, ..] => {
                real.entry((protocol, at)).or_default();
            }
            ["-a", protocol, at, "-r", server, ..] => {
                real.entry((protocol, at)).or_default().insert(server);
            }
            _ => {}
        }
    }
    let all = real.into_iter().map(|((protocol, at), real)| Server { protocol, at, real });
    let is_there = |server: &Server<'_>| server.address().is_some_and(|at| addresses.contains(&at.ip()));
    let (mut found, others): (Vec<_>, Vec<_>) = all.partition(is_there);
    let node_ports: Vec<_> = others.into_iter().filter(|server| server.is_node_port_of(&found)).collect();
    found.extend(node_ports);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "\
7: kube-ipvs0    inet 10.96.0.1/32 scope global kube-ipvs0\\       valid_lft forever preferred_lft forever
7: kube-ipvs0    inet6 fd00:10:96::a/128 scope global \\       valid_lft forever preferred_lft forever
7: kube-ipvs0    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
";

    fn found(saved: &str) -> Vec<(&str, &str)> {
        servers(saved, &addresses(LISTED)).iter().map(|server| (server.protocol, server.at)).collect()
    }

    #[test]
    fn virtual_servers_at_addresses_of_the_device_are_kube_proxys() {
        assert_eq!(addresses(LISTED).len(), 2);
        let saved = "\
-A -t 10.96.0.1:443 -s rr
-a -t 10.96.0.1:443 -r 192.0.2.1:6443 -m -w 1
-A -u [fd00:10:96::a]:53 -s rr
-A -t 192.0.2.10:80 -s wlc
-A -f 7 -s rr
";
        assert_eq!(found(saved), [("-t", "10.96.0.1:443"), ("-u", "[fd00:10:96::a]:53")]);
    }

    #[test]
    fn node_ports_with_the_real_servers_of_a_service_are_kube_proxys() {
        let saved = "\
-A -t 10.96.0.1:443 -s rr
-a -t 10.96.0.1:443 -r 192.0.2.1:6443 -m -w 1
-a -t 10.96.0.1:443 -r 192.0.2.2:6443 -m -w 1
-A -t 172.18.0.1:30443 -s rr
-a -t 172.18.0.1:30443 -r 192.0.2.2:6443 -m -w 1
-A -t 172.18.0.1:443 -s rr
-a -t 172.18.0.1:443 -r 192.0.2.2:6443 -m -w 1
-A -u 172.18.0.1:30443 -s rr
-a -u 172.18.0.1:30443 -r 192.0.2.2:6443 -m -w 1
-A -t 172.18.0.1:30444 -s rr
-a -t 172.18.0.1:30444 -r 192.0.2.2:6443 -m -w 1
-a -t 172.18.0.1:30444 -r 192.0.2.3:6443 -m -w 1
-A -t 172.18.0.1:30445 -s rr
";
        assert_eq!(found(saved), [("-t", "10.96.0.1:443"), ("-t", "172.18.0.1:30443")]);
    }

    #[test]
    fn sets_of_kube_proxy_are_identified_by_name() {
        for set in ["KUBE-CLUSTER-IP", "KUBE-6-LOOP-BACK", "KUBE-6-LOAD-BALANCER-SOURCE-CID"] {
            assert!(is_kube_proxys(set), "{set}");
        }
        for set in ["KUBE-CLUSTER", "KUBE-CLUSTER-IPS", "KUBE-MINE", "cali40masq", "", "KUBE-"] {
            assert!(!is_kube_proxys(set), "{set}");
        }
    }
}
