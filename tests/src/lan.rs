//! Connects network namespaces by one bridge, without a router, for the tests of layer 2 announcements.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::{
    netns::{self, Netns},
    server::{self, Server},
    sniffer::{Asker, Sniffer},
};

/// The bridge, as the sender of ARP requests and neighbour solicitations. No other machine has this MAC address, and no
/// machine is configured with these IP addresses.
const BRIDGE: Asker = Asker {
    mac: [2, 0, 0, 0, 0, 0xfa],
    v4: Ipv4Addr::new(192, 0, 2, 250),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0xfa),
};

/// A bridge in a namespace of its own. Its ports lead to devices in other namespaces.
#[derive(Debug)]
pub struct Lan {
    /// The namespace that contains the bridge `br0`.
    pub bridge: Netns,
}

/// MAC address of the device that is attached at this port of the bridge.
pub fn mac(port: usize) -> String {
    format!("02:00:00:00:00:{port:02x}")
}

impl Lan {
    /// Creates the bridge `br0`, without ports, in this namespace.
    pub fn new(bridge: Netns) -> Result<Self> {
        bridge.ip(&format!(
            "link add br0 address {} type bridge mcast_snooping 0\nlink set br0 up\n",
            mac(BRIDGE.mac[5].into())
        ))?;
        Ok(Self { bridge })
    }

    /// Starts a [`Sniffer`], which asks by ARP and NDP who has these addresses, and records which machines claim them.
    pub fn watch(&self, addresses: &[IpAddr]) -> Result<Sniffer> {
        Sniffer::start(&self.bridge, "br0", &BRIDGE, addresses)
    }

    /// Gives a namespace a device `eth0` at this port of the bridge, with these addresses (with prefix lengths).
    pub fn attach(&self, netns: &Netns, port: usize, addresses: &[String]) -> Result<()> {
        let (bridge, name) = (self.bridge.name(), netns.name());
        netns::ip(&format!("link add p{port} netns {bridge} type veth peer name eth0 netns {name}\n"))?;
        self.bridge.ip(&format!("link set p{port} master br0 up\n"))?;
        let add = |address: &String| {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            format!("address add {address} dev eth0{nodad}\n")
        };
        let addresses: String = addresses.iter().map(add).collect();
        netns.ip(&format!("link set eth0 address {} up\n{addresses}", mac(port)))
    }
}

/// An HTTP server on port 8080 of each node, which answers with the name of the node: `n1`, `n2`, …
///
/// # Errors
/// A server cannot listen.
pub fn serve(nodes: &[Netns]) -> Result<Vec<Server>> {
    nodes
        .iter()
        .enumerate()
        .map(|(index, node)| server::http(node, &format!("n{}", index + 1), 8080))
        .collect()
}

/// A dual-stack Service `web` of type LoadBalancer with one endpoint, and its address pool, as YAML.
#[derive(Clone, Copy, Debug)]
pub struct Web<'a> {
    /// The pool's `spec.addresses`, IPv4 first.
    pub pool: [&'a str; 2],
    /// Load balancer addresses of the Service, IPv4 first.
    pub vips: [&'a str; 2],
    /// The Service's `spec.externalTrafficPolicy`.
    pub policy: &'a str,
    /// Addresses of the endpoint, IPv4 first.
    pub endpoint: [&'a str; 2],
    /// Number of the node that has the endpoint.
    pub node: usize,
}

impl Web<'_> {
    /// The objects as YAML documents.
    pub fn yaml(&self) -> String {
        let Self { pool, vips, policy, endpoint, node } = self;
        let slice = |family: &str, address: &str| {
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: web-{}, labels: {{kubernetes.io/service-name: web}}}}\n\
                 addressType: {family}\nports: [{{name: http, port: 8080}}]\n\
                 endpoints: [{{addresses: [\"{address}\"], nodeName: n{node}}}]\n",
                family.to_lowercase()
            )
        };
        format!(
            "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {{name: pool, namespace: metallb-system}}\n\
             spec: {{addresses: [{}, \"{}\"]}}\n---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: web, annotations: {{metallb.io/loadBalancerIPs: \"{}\"}}}}\n\
             spec:\n  type: LoadBalancer\n  ipFamilyPolicy: RequireDualStack\n  externalTrafficPolicy: {policy}\n  \
             ports: [{{name: http, port: 80, targetPort: 8080}}]\n{}{}",
            pool[0],
            pool[1],
            vips.join(","),
            slice("IPv4", endpoint[0]),
            slice("IPv6", endpoint[1])
        )
    }
}
