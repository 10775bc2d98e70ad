//! A node with its own clients and servers. Every load balancer has its own node, so all are ready at any time.
//!
//! ```text
//! client pod ───── veth ──┐                ┌── veth ── server pod
//!                         ├───── node ─────┤
//! external client ═ wire ═╛                ╘═ wire ═ other node, with server pods
//! ```
//!
//! A *veth* has the kernel's defaults: checksums and segmentation are offloaded to the other end, which is on the same
//! machine. On a *wire*, frames to the node are as on a cable: at most one MTU, with complete checksums. The node's end
//! acts as a network card: it merges received segments (GRO) and accepts unsegmented packets (TSO).

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use lb_tests::{
    cgroup::Cgroup,
    cluster::veth,
    netns::Netns,
    offload::{self, Offload},
};

use crate::{
    family::{Family, NODE},
    load::Servers,
};

pub(crate) const WIRES: [&str; 2] = ["eth0", "eth1"];
/// Names of the veth ends on the node: the one to the client pod, then the one to the server pod.
pub(crate) const PODS: [&str; 2] = ["pod", "serving"];

/// A node with its neighbours, all network namespaces. Dropping this removes them.
pub(crate) struct Node {
    /// The node's namespace.
    pub(crate) node: Netns,
    /// Namespace of the pod that is a client.
    pub(crate) pod: Netns,
    /// Namespace of the external client.
    pub(crate) outside: Netns,
    /// The cgroup to which the agent attaches its socket hooks.
    pub(crate) cgroup: Cgroup,
    servers: [Servers; 2],
    _peers: [Netns; 2],
}

impl Node {
    /// Creates the namespaces `PREFIX-node` and so on, and opens the servers' sockets in them.
    pub(crate) fn create(prefix: &str, family: Family) -> Result<Self> {
        let cgroup = Cgroup::create(&format!("{prefix}-node"))?;
        let host = |name: &str| host(&format!("{prefix}-{name}"));
        let node = host("node")?.within(Some(&cgroup));
        node.sysctls(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
        let (pod, serving, outside, other) =
            (host("pod")?, host("serving")?, host("outside")?, host("other")?);
        connect_pod(&node, PODS[0], &pod, 2)?;
        connect_pod(&node, PODS[1], &serving, 3)?;
        connect_wire(&node, WIRES[0], &outside)?;
        connect_wire(&node, WIRES[1], &other)?;
        route(&node, &outside, &other)?;
        accept_all(&serving, "10.244.64.0/18", "fd00:10:244:64::/64")?;
        accept_all(&other, "10.244.128.0/18", "fd00:10:244:128::/64")?;
        node.ip("route add 10.244.64.0/18 via 10.244.1.3 dev serving\n\
             route add fd00:10:244:64::/64 via fd00:10:244:1::3 dev serving\n")?;
        let servers = [Servers::open(&serving, family)?, Servers::open(&other, family)?];
        Ok(Self { node, pod, outside, cgroup, servers, _peers: [serving, other] })
    }

    /// The servers in the node's pod, and those in the other node's pods.
    pub(crate) const fn servers(&self) -> &[Servers; 2] {
        &self.servers
    }
}

pub(crate) fn addresses(family: Family) -> [IpAddr; 2] {
    NODE.map(|address| address.at(family, 0))
}

/// Creates a namespace without duplicate address detection, and with enough ports for all connections of a run.
fn host(name: &str) -> Result<Netns> {
    let netns = Netns::create(name)?;
    netns.sysctls(&[
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/ip_local_port_range", "32768 65000"),
        ("ipv4/tcp_tw_reuse", "1"),
        // Reno does not pace segments; the machine's default congestion control may (BBR does).
        ("ipv4/tcp_congestion_control", "reno"),
        ("ipv6/conf/all/accept_dad", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
        ("ipv6/conf/default/dad_transmits", "0"),
        ("ipv6/conf/default/router_solicitations", "0"),
    ])?;
    Ok(netns)
}

/// Connects a pod to the node by a veth, as the CNI plugin `ptp` does.
fn connect_pod(node: &Netns, device: &str, pod: &Netns, number: u8) -> Result<()> {
    veth((node, device), (pod, "eth0"))?;
    let (v4, v6) = (format!("10.244.1.{number}"), format!("fd00:10:244:1::{number}"));
    node.ip(&format!(
        "address add 10.244.1.1/32 dev {device}\naddress add fd00:10:244:1::1/128 dev {device} nodad\n\
         link set {device} up\nroute add {v4}/32 dev {device}\nroute add {v6}/128 dev {device}\n"
    ))?;
    pod.ip(&format!(
        "address add {v4}/32 dev eth0\naddress add {v6}/128 dev eth0 nodad\nlink set eth0 up\n\
         route add 10.244.1.1 dev eth0\nroute add fd00:10:244:1::1 dev eth0\n\
         route add default via 10.244.1.1\nroute add default via fd00:10:244:1::1\n"
    ))
}

/// Creates a veth pair between `node` and `peer` that acts like a link of network cards: both ends merge what they
/// receive (GRO), and the peer sends complete packets of MTU size, so that nothing is left to offload.
fn connect_wire(node: &Netns, device: &str, peer: &Netns) -> Result<()> {
    veth((node, device), (peer, "eth0"))?;
    node.ip(&format!("link set {device} up\n"))?;
    peer.ip("link set eth0 up\n")?;
    node.run(|| offload::set(device, Offload::Reception, true))?;
    peer.run(|| {
        offload::set("eth0", Offload::Reception, true)?;
        [Offload::TcpSegmentation, Offload::Segmentation, Offload::TransmitChecksum]
            .into_iter()
            .try_for_each(|offload| offload::set("eth0", offload, false))
    })
    .with_context(|| format!("setting up {device} as a wire"))
}

/// Sets addresses and routes of the wires' ends.
fn route(node: &Netns, outside: &Netns, other: &Netns) -> Result<()> {
    node.ip("address add 198.51.100.1/24 dev eth0\naddress add fd00:198:51:100::1/64 dev eth0 nodad\n\
         address add 172.18.0.1/24 dev eth1\naddress add fd00:172:18::1/64 dev eth1 nodad\n\
         route add 10.244.128.0/18 via 172.18.0.2\nroute add fd00:10:244:128::/64 via fd00:172:18::2\n\
         route add default via 198.51.100.2\nroute add default via fd00:198:51:100::2\n")?;
    outside.ip("address add 198.51.100.2/24 dev eth0\naddress add fd00:198:51:100::2/64 dev eth0 nodad\n\
         route add default via 198.51.100.1\nroute add default via fd00:198:51:100::1\n")?;
    other.ip("address add 172.18.0.2/24 dev eth0\naddress add fd00:172:18::2/64 dev eth0 nodad\n\
         route add default via 172.18.0.1\nroute add default via fd00:172:18::1\n")
}

/// Makes all addresses of these networks local addresses of the namespace.
fn accept_all(netns: &Netns, v4: &str, v6: &str) -> Result<()> {
    // No device has these addresses, so replies from them need permission to use foreign source addresses.
    netns.sysctl("ipv6/ip_nonlocal_bind", "1")?;
    netns.ip(&format!("route add local {v4} dev lo\nroute add local {v6} dev lo\n"))
}
