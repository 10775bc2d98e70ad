//! The frontends of a Service: their backends by traffic policy, and the clients that are masqueraded.

use std::net::IpAddr;

use lb_common::{Address, FrontendKind, ServiceKey, service_flags};

use super::Frontend;
use crate::{
    family::Family,
    model::{Node, Protocol, Service, ServicePort, TrafficPolicy},
};

/// The frontends of one port of a Service in one family, as keys of `SERVICES`, each once.
pub(super) struct PortFrontends {
    family: Family,
    keys: Vec<(ServiceKey, FrontendKind)>,
    internal: TrafficPolicy,
    external: TrafficPolicy,
    /// Whether a load balancer address or external IP of the Service is an address of this node. If so, the Service's
    /// other load balancer addresses and external IPs are usually addresses of other nodes.
    at_nodes: bool,
    /// Whether the programs answer segments of unknown connections with a RST, because the agent ends connections of
    /// the Service, or because the programs shift sequence numbers of its connections.
    resets: bool,
    /// Whether backends get a PROXY protocol header.
    proxy_protocol: bool,
    /// Whether new connections have a limit.
    limited: bool,
}

/// The slices of backends that frontends can refer to, as indices of [`Port::slices`](super::Port::slices); `None` is
/// no backend.
pub(super) struct Slices {
    pub(super) cluster: Option<usize>,
    pub(super) local: Option<usize>,
    /// The slice for direct server return: the backends of `cluster` (those on other nodes answer external clients
    /// directly) and, with weight 0, the endpoints on this node that `cluster` lacks.
    pub(super) dsr: Option<usize>,
    /// Whether there is a usable endpoint anywhere in the cluster.
    pub(super) any: bool,
}

impl PortFrontends {
    /// Collects the addresses, kind by kind. If two kinds have the same address and port, only the first kind keeps
    /// them. Cluster IPs come first, because each is allocated to one Service; then the addresses that a load balancer
    /// assigns; then external IPs, which any user may set; and node ports last, as in kube-proxy.
    ///
    /// A cluster IP that the node itself has is left out: packets to it are for a process of the node, such as
    /// NodeLocal DNSCache. (Load balancer addresses and external IPs often are addresses of nodes, so they stay.)
    pub(super) fn new(service: &Service, port: &ServicePort, family: Family, node: &Node) -> Self {
        let mut keys: Vec<(ServiceKey, FrontendKind)> = Vec::new();
        let mut add = |kind, addresses: &[IpAddr], number| {
            for address in addresses.iter().filter(|address| Family::of(**address) == family) {
                let key = ServiceKey::new(Address::from(*address), number, port.protocol.number());
                if keys.iter().all(|(known, _)| *known != key) {
                    keys.push((key, kind));
                }
            }
        };
        let is_own = |address: &IpAddr| node.addresses.is_own(address);
        let external_ips = if node.policy.ignore_external_ips { &[][..] } else { &service.external.ips };
        let served: Vec<IpAddr> = service.cluster_ips.iter().copied().filter(|ip| !is_own(ip)).collect();
        add(FrontendKind::ClusterIp, &served, port.port);
        add(FrontendKind::LoadBalancer, &service.external.load_balancer_ips, port.port);
        add(FrontendKind::ExternalIp, external_ips, port.port);
        if let Some(node_port) = port.node_port {
            add(FrontendKind::NodePort, &node.addresses.node_ports, node_port);
        }
        let at_nodes = service.external.load_balancer_ips.iter().chain(external_ips).any(is_own);
        let (internal, external) = (service.internal_policy, service.external.policy);
        let proxy_protocol = service.has_proxy_protocol(port.protocol);
        let resets = port.protocol == Protocol::Tcp && (proxy_protocol || !service.timeouts().is_unset());
        let limited = service.limits().is_any();
        Self { family, keys, internal, external, at_nodes, resets, proxy_protocol, limited }
    }

    /// Whether some frontend may use the endpoints of the whole cluster. Under `externalTrafficPolicy: Local`, external
    /// addresses use these endpoints for internal clients.
    pub(super) fn use_cluster(&self) -> bool {
        self.internal == TrafficPolicy::Cluster || self.is_external()
    }

    /// Whether some frontend may be limited to the endpoints on this node.
    pub(super) fn use_local(&self) -> bool {
        self.internal == TrafficPolicy::Local || self.external == TrafficPolicy::Local && self.is_external()
    }

    /// Whether some frontend other than a cluster IP sends external clients to endpoints on other nodes. (Cluster IPs
    /// do not count: they never use direct server return.)
    pub(super) fn leads_elsewhere(&self) -> bool {
        self.external == TrafficPolicy::Cluster && self.is_external()
    }

    fn is_external(&self) -> bool {
        self.keys.iter().any(|(_, kind)| *kind != FrontendKind::ClusterIp)
    }

    /// The frontends; `has_ranges` is whether load balancer addresses of this family have source ranges.
    pub(super) fn frontends(
        self,
        slices: &Slices,
        has_ranges: bool,
        node: &Node,
    ) -> impl Iterator<Item = Frontend> {
        let internal = internal(self.internal, slices, node, self.family);
        let external = external(self.external, slices);
        self.keys.into_iter().map(move |(key, kind)| {
            let Route { slice, internal_slice, mut flags } =
                if kind == FrontendKind::ClusterIp { internal } else { external };
            if has_ranges && kind == FrontendKind::LoadBalancer {
                flags |= service_flags::SOURCE_RANGES;
            }
            if kind == FrontendKind::NodePort && IpAddr::from(key.address).is_loopback() {
                flags |= service_flags::SOCKETS_ONLY;
            }
            if self.at_nodes && kind != FrontendKind::ClusterIp && is_unprivileged(key.port) {
                flags |= service_flags::SYN_ONLY;
            }
            if self.resets && flags & service_flags::DSR == 0 {
                flags |= service_flags::RESET_UNKNOWN;
            }
            if self.proxy_protocol {
                flags |= service_flags::PROXY_PROTOCOL;
            }
            if self.limited && flags & service_flags::SOCKETS_ONLY == 0 {
                flags |= service_flags::LIMITED;
            }
            Frontend { key, kind, slice, internal_slice, flags }
        })
    }
}

/// Whether the port is not privileged. Frontends at privileged ports do not need [`service_flags::SYN_ONLY`], because
/// outgoing connections of a node rarely have a privileged source port. Without this flag, frontends also accept
/// packets of connections that began while another node had the address.
const fn is_unprivileged(port: u16) -> bool {
    port >= 1024
}

/// The backends of a frontend, as indices of slices of `BACKENDS`. With [`service_flags::SHORT_CIRCUIT`], internal
/// clients get `internal_slice`.
#[derive(Clone, Copy)]
struct Route {
    slice: Option<usize>,
    internal_slice: Option<usize>,
    flags: u16,
}

/// The route of cluster IPs. External clients reach cluster IPs only by a route to this node, and the endpoint may be
/// on another node. So external clients are masqueraded if the node can distinguish them from internal ones; under
/// `masquerade_all`, every client is masqueraded.
fn internal(traffic: TrafficPolicy, slices: &Slices, node: &Node, family: Family) -> Route {
    let masquerade = if node.policy.masquerade_all {
        service_flags::MASQUERADE
    } else if node.detects_inside.contains(family) {
        service_flags::MASQUERADE_EXTERNAL
    } else {
        0
    };
    match traffic {
        TrafficPolicy::Cluster => Route { slice: slices.cluster, internal_slice: None, flags: masquerade },
        TrafficPolicy::Local => {
            Route { slice: slices.local, internal_slice: None, flags: masquerade | without_local(slices) }
        }
    }
}

/// The route of all other addresses. Under `Cluster` the endpoint may be on another node, so every client is
/// masqueraded. With [`service_flags::DSR`], the programs do not masquerade an external client if a tunnel leads to the
/// endpoint or if the endpoint is on this node. Under `Local` no client is masqueraded, and internal clients get all
/// endpoints, as if a load balancer had sent them to the right node.
fn external(traffic: TrafficPolicy, slices: &Slices) -> Route {
    match traffic {
        TrafficPolicy::Cluster if slices.dsr.is_some() => Route {
            slice: slices.dsr,
            internal_slice: None,
            flags: service_flags::MASQUERADE | service_flags::DSR,
        },
        TrafficPolicy::Cluster => {
            Route { slice: slices.cluster, internal_slice: None, flags: service_flags::MASQUERADE }
        }
        TrafficPolicy::Local => Route {
            slice: slices.local,
            internal_slice: slices.cluster,
            flags: service_flags::SHORT_CIRCUIT | without_local(slices),
        },
    }
}

const fn without_local(slices: &Slices) -> u16 {
    if slices.local.is_none() && slices.any { service_flags::DROP_WITHOUT_BACKENDS } else { 0 }
}
