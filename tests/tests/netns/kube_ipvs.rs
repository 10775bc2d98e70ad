//! Leftovers of kube-proxy in mode `ipvs`, along with foreign virtual servers. The tests run only in guests, whose
//! kernels have IPVS.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use lb_tests::{
    agent::{self, run},
    cluster::HTTP_PORT,
    guest,
    netns::Netns,
    traffic::Kind,
};

use crate::{
    bed::{Bed, HTTP, UDP, WEB, vips},
    clock,
    leftovers::{BUILT_IN, rules, text_of},
};

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];
/// The node's own addresses towards the client.
const NODE: [&str; 2] = ["198.51.100.1", "fd00:198:51:100::1"];
const NODE_PORT: u16 = 30_080;
/// Ports of an administrator's virtual servers at the node's addresses.
const MINE: [u16; 2] = [8080, 30_090];

/// IPVS, sets and rules in the node's namespace.
#[derive(Debug, PartialEq, Eq)]
struct State {
    servers: String,
    sets: String,
    rules: Vec<String>,
}

impl State {
    fn of(node: &Netns) -> Self {
        Self {
            servers: text_of(node, "ipvsadm", &["-S", "-n"]),
            sets: text_of(node, "ipset", &["list", "-n"]),
            rules: rules(node),
        }
    }
}

/// A virtual server with its real servers, in the input format of `ipvsadm -R`.
fn server(protocol: &str, at: SocketAddr, to: &[SocketAddr]) -> String {
    let mut text = format!("-A {protocol} {at} -s rr\n");
    for to in to {
        writeln!(text, "-a {protocol} {at} -r {to} -m -w 1").unwrap();
    }
    text
}

/// The addresses of the pods' HTTP servers, and of their UDP servers, in the family of `like`.
fn endpoints(bed: &Bed, pods: &[&str], like: IpAddr) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
    pods.iter().map(|name| bed.cluster.pod(name).unwrap()).map(|pod| (pod.http(like), pod.udp(like))).unzip()
}

/// Adds what an administrator may have: two virtual servers (one of them at a port that could be a node port), a set
/// and a rule.
fn put_mine(bed: &Bed) {
    let node = &bed.cluster.node1;
    let at = |port| SocketAddr::new(NODE[0].parse().unwrap(), port);
    let (mine, _) = endpoints(bed, &["pod1"], at(0).ip());
    node.feed("ipvsadm", &["-R"], &MINE.map(|port| server("-t", at(port), &mine)).concat()).unwrap();
    node.feed("ipset", &["restore"], "create KUBE-MINE hash:ip\n").unwrap();
    for restore in ["iptables-restore", "ip6tables-restore"] {
        node.feed(restore, &["--noflush"], BUILT_IN).unwrap();
    }
    let rules = "*filter\n-A INPUT -m set --match-set KUBE-MINE src -j DROP\nCOMMIT\n";
    node.feed("iptables-restore", &["--noflush"], rules).unwrap();
}

/// Adds what kube-proxy leaves behind: the device `kube-ipvs0`; virtual servers for the Service `web`, for its node
/// port and for a Service without endpoints; sets and rules.
fn put_kube_proxys(bed: &Bed) {
    let node = &bed.cluster.node1;
    let mut device = "link add kube-ipvs0 type dummy\n".to_owned();
    for (family, (node_address, prefix)) in NODE.into_iter().zip(["KUBE-", "KUBE-6-"]).enumerate() {
        let (vip, empty) = (WEB[family], vips(99)[family]);
        let (http, udp) = endpoints(bed, &PODS, vip);
        for vip in [vip, empty] {
            writeln!(device, "address add {vip} dev kube-ipvs0").unwrap();
        }
        let servers = [
            server("-t", SocketAddr::new(vip, HTTP), &http),
            server("-u", SocketAddr::new(vip, UDP), &udp),
            server("-t", SocketAddr::new(empty, HTTP), &[]),
            server("-t", SocketAddr::new(node_address.parse().unwrap(), NODE_PORT), &http[..1]),
        ];
        node.feed("ipvsadm", &["-R"], &servers.concat()).unwrap();
        let inet = if vip.is_ipv6() { "inet6" } else { "inet" };
        let sets = format!(
            "create {prefix}CLUSTER-IP hash:ip,port family {inet}\nadd {prefix}CLUSTER-IP {vip},tcp:{HTTP}\n\
             create {prefix}IPVS-IPS hash:ip family {inet}\nadd {prefix}IPVS-IPS {vip}\n"
        );
        node.feed("ipset", &["restore"], &sets).unwrap();
        let restore = if vip.is_ipv6() { "ip6tables-restore" } else { "iptables-restore" };
        node.feed(restore, &["--noflush"], &RULES.replace("KUBE-_", prefix)).unwrap();
    }
    node.ip(&device).unwrap();
}

/// Some of the rules of mode `ipvs`; `KUBE-_` is replaced by the prefix of the family's sets.
const RULES: &str = "\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-SERVICES -m set --match-set KUBE-_CLUSTER-IP src,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m set --match-set KUBE-_CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A INPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER
-A OUTPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m set --match-set KUBE-_CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-_IPVS-IPS dst -j REJECT
COMMIT
";

#[test]
#[ignore = "only in a guest: `cargo xtask vm` runs it"]
fn cleanup_removes_only_ipvs_leftovers_of_kube_proxy() {
    guest::only();
    let bed = Bed::with_web(&PODS);
    let node = &bed.cluster.node1;
    let cleanup = |more: &[&str]| {
        let arguments = [&["cleanup", "--kube-proxy"], more].concat();
        String::from_utf8(agent::ask(node, &bed.cluster.bpffs(1), &arguments).unwrap().stdout).unwrap()
    };
    put_mine(&bed);
    let mine = State::of(node);
    assert!(cleanup(&["--dry-run"]).contains("has left nothing"));
    let mut traffic = clock::traffic(&bed);
    let served = SocketAddr::new(NODE[0].parse().unwrap(), MINE[0]);
    assert_eq!(bed.cluster.pod("pod1").unwrap().http(served.ip()).port(), HTTP_PORT);
    Kind::TCP.into_iter().for_each(|kind| traffic.add(&bed.cluster.client, kind, served));

    put_kube_proxys(&bed);
    traffic.progresses().unwrap();
    let all = State::of(node);
    assert!(all.servers.lines().count() > mine.servers.lines().count() + 20, "{all:?}");

    let status = bed.agent.as_ref().unwrap().ask(&["status"]).unwrap();
    assert!(String::from_utf8(status.stdout).unwrap().contains("cleanup --kube-proxy"));
    let would = cleanup(&["--dry-run"]);
    assert_eq!(would.lines().count(), 6, "two tables of two families, a device, sets: {would}");
    assert!(would.contains("with 4 addresses and 8 virtual servers"), "{would}");
    assert!(would.contains("4 sets of ipset"), "{would}");
    assert_eq!(State::of(node), all, "a dry run changes nothing");
    let did = cleanup(&[]);
    assert_eq!(did.replace("Removed", "Would remove"), would);
    assert_eq!(State::of(node), mine);
    assert!(run(node.command("ip").args(["link", "show", "kube-ipvs0"])).is_err(), "the device is gone");
    assert!(cleanup(&[]).contains("has left nothing"), "a second cleanup finds nothing");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}
