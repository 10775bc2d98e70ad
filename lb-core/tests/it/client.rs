//! Computes the verdict on a client's connection from the contents of the maps: the decisions of the data plane without
//! packets.

use std::net::IpAddr;

use ipnet::IpNet;
use lb_common::{Address, ServiceKey, protocol, service_flags, vip_flags};
use lb_core::family::Family;

use crate::kernel::{Kernel, Node};

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    /// A pod of the cluster with this address: its packets enter through a device of internal clients.
    Pod(&'static str),
    /// A process in the node's network namespace: the socket hooks translate its system calls before there is a packet.
    Process,
    /// A machine outside the cluster with this address.
    Outside(&'static str),
}

/// The verdict on a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The connection goes to one of these backends, with the node's address if `masqueraded`, else with the client's
    /// own.
    To { backends: Vec<String>, masqueraded: bool },
    /// The client gets a RST or an ICMP error, because there is no backend, or no Service has the port.
    Reject,
    /// The packet is dropped.
    Drop,
    /// The packet passes without translation.
    Pass,
}

impl Node {
    /// The verdict on a TCP connection of `client` to this address and port.
    pub(crate) fn connect(&self, client: Client, to: &str, port: u16) -> Decision {
        let key = ServiceKey::new(ip(to).into(), port, protocol::TCP);
        let Some(record) = self.kernel.maps.frontends.get(&key) else {
            let vip = self.kernel.maps.vips.get(&ip(to));
            let is_cluster_ip = vip.is_some_and(|vip| vip.flags & vip_flags::CLUSTER_IP != 0);
            return if is_cluster_ip { Decision::Reject } else { Decision::Pass };
        };
        let has = |flag| record.flags & flag != 0;
        let is_process = client == Client::Process;
        if has(service_flags::SOCKETS_ONLY) && !is_process {
            return Decision::Pass;
        }
        if has(service_flags::SOURCE_RANGES) && !may(&self.kernel, record.id, self.source(client, ip(to))) {
            return Decision::Drop;
        }
        let inside = match client {
            Client::Pod(address) => self.node.detects_inside.contains(Family::of(ip(address))),
            Client::Process => true,
            Client::Outside(_) => false,
        };
        let masqueraded = !is_process && record.masquerades(inside);
        let record = record.for_client(inside);
        let slots = record.backends_base..record.backends_base + record.backends_count;
        let backends: Vec<String> = slots
            .map(|slot| self.kernel.maps.backends[&slot])
            .map(|backend| format!("{}:{}", backend.address, backend.port))
            .collect();
        match (backends.is_empty(), has(service_flags::DROP_WITHOUT_BACKENDS)) {
            (false, _) => Decision::To { backends, masqueraded },
            (true, false) => Decision::Reject,
            (true, true) => Decision::Drop,
        }
    }

    fn source(&self, client: Client, to: IpAddr) -> IpAddr {
        match client {
            Client::Pod(address) | Client::Outside(address) => ip(address),
            Client::Process => {
                let mut primary = self.node.addresses.primary.iter().copied();
                primary.find(|ip| ip.is_ipv4() == to.is_ipv4()).expect("an address of the node")
            }
        }
    }
}

fn may(kernel: &Kernel, service: u32, source: IpAddr) -> bool {
    let id = lb_common::SourceRange::new(service, Address::from(source)).service_and_family;
    kernel.maps.source_ranges.iter().filter(|key| key.range.service_and_family == id).any(|key| {
        let extra = if source.is_ipv4() { 96 } else { 0 };
        let prefix = u8::try_from(key.prefix_length - 32 - extra).expect("a prefix");
        IpNet::new(key.range.address.into(), prefix).expect("a network").contains(&source)
    })
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}
