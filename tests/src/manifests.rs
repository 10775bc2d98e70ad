//! Writes the folder of manifests that the agent reads.

use std::{
    fmt::Write as _,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

/// A folder of manifests. Files are written by a rename, as editors and configuration tools do.
#[derive(Debug, Clone)]
pub struct Manifests {
    folder: PathBuf,
}

impl Manifests {
    /// Creates the folder unless it exists.
    pub fn create(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// Path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes or replaces `NAME.yaml` in one step.
    pub fn write(&self, name: &str, yaml: &str) -> io::Result<()> {
        let temporary = self.folder.join(format!(".{name}.tmp"));
        fs::write(&temporary, yaml)?;
        fs::rename(temporary, self.folder.join(format!("{name}.yaml")))
    }

    /// Writes or replaces the file of a Service.
    pub fn put(&self, service: &Service) -> io::Result<()> {
        self.write(&service.name, &service.yaml())
    }

    /// Removes `NAME.yaml`.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.folder.join(format!("{name}.yaml")))
    }
}

/// Maximum number of endpoints in an EndpointSlice; the API server rejects larger ones.
const MOST_ENDPOINTS: usize = 1000;

/// An endpoint of a Service: the addresses of one pod.
#[derive(Clone, Debug, Default)]
pub struct Endpoint {
    /// Name of the endpoint's pod.
    pub pod: String,
    /// Name of the endpoint's node.
    pub node: String,
    /// Name of the endpoint's zone; empty for none.
    pub zone: String,
    /// Addresses of the pod, at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// Whether the endpoint is ready: `conditions.ready`.
    pub ready: bool,
    /// Whether the endpoint is terminating: `conditions.terminating`. The manifest then also has `serving: true`.
    pub terminating: bool,
    /// Names of nodes in `hints.forNodes`.
    pub for_nodes: Vec<String>,
    /// Names of zones in `hints.forZones`.
    pub for_zones: Vec<String>,
}

impl Endpoint {
    fn write_hints(&self, yaml: &mut String) -> std::fmt::Result {
        if self.for_nodes.is_empty() && self.for_zones.is_empty() {
            return Ok(());
        }
        let named = |names: &[String]| -> String {
            let names: Vec<_> = names.iter().map(|name| format!("{{name: {name}}}")).collect();
            names.join(", ")
        };
        let (nodes, zones) = (named(&self.for_nodes), named(&self.for_zones));
        writeln!(yaml, "  hints: {{forNodes: [{nodes}], forZones: [{zones}]}}")
    }

    /// The same endpoint after its pod has failed the readiness probe.
    #[must_use]
    pub fn unready(mut self) -> Self {
        self.ready = false;
        self
    }

    /// The same endpoint after its pod was deleted, while the pod still serves.
    #[must_use]
    pub fn terminating(mut self) -> Self {
        (self.ready, self.terminating) = (false, true);
        self
    }
}

/// A port of a Service.
#[derive(Clone, Debug)]
pub struct Port {
    /// Name of the port.
    pub name: &'static str,
    /// Protocol of the port: `TCP`, `UDP` or `SCTP`.
    pub protocol: &'static str,
    /// Port number that clients connect to, `port`.
    pub port: u16,
    /// Port number that pods listen on, `targetPort`.
    pub target_port: u16,
    /// The `nodePort`; `None` omits it, so that the agent allocates one if the Service needs it.
    pub node_port: Option<u16>,
}

/// The `spec.type` of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Type {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
    ExternalName,
}

/// How a Service can be reached: type, external addresses, traffic policies and affinity.
#[derive(Clone, Debug, Default)]
pub struct Exposure {
    /// The `spec.type` of the Service.
    pub kind: Type,
    /// Addresses in `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// Load balancers' addresses: `status.loadBalancer.ingress[].ip`.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Whether the load balancer addresses have `ipMode: Proxy`, so that the agent does not serve them.
    pub proxied: bool,
    /// Whether the Service has `spec.allocateLoadBalancerNodePorts: false`.
    pub without_node_ports: bool,
    /// Networks in `spec.loadBalancerSourceRanges`.
    pub source_ranges: Vec<String>,
    /// Whether `spec.internalTrafficPolicy` is `Local`.
    pub internal_local: bool,
    /// Whether `spec.externalTrafficPolicy` is `Local`.
    pub external_local: bool,
    /// The `spec.healthCheckNodePort`.
    pub health_check_node_port: Option<u16>,
    /// Timeout in seconds of `spec.sessionAffinity: ClientIP`; `None` for no affinity.
    pub affinity: Option<u32>,
}

/// A Service with EndpointSlices, to be written as one YAML file.
#[derive(Clone, Debug, Default)]
pub struct Service {
    /// Name of the Service.
    pub name: String,
    /// Names and values of the Service's annotations.
    pub annotations: Vec<(&'static str, String)>,
    /// The `spec.clusterIPs`; if empty, the agent allocates one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// Ports of the Service.
    pub ports: Vec<Port>,
    /// Endpoints of the Service, which are written as EndpointSlices.
    pub endpoints: Vec<Endpoint>,
    /// Type, external addresses, traffic policies and affinity of the Service.
    pub exposure: Exposure,
}

impl Service {
    /// The Service and its EndpointSlices as YAML: in the family of the cluster IP if the Service has exactly one
    /// cluster IP, else in both families.
    pub fn yaml(&self) -> String {
        let mut yaml = String::new();
        let families: &[&str] = match self.cluster_ips[..] {
            [IpAddr::V4(_)] => &["IPv4"],
            [IpAddr::V6(_)] => &["IPv6"],
            _ => &["IPv4", "IPv6"],
        };
        // Writing to a String never fails.
        let _infallible = self.write_service(&mut yaml, families);
        for family in families {
            // A Service without endpoints has an empty slice.
            let all = self.endpoints.chunks(MOST_ENDPOINTS);
            let none = self.endpoints.is_empty().then_some(&[][..]);
            for (number, endpoints) in all.chain(none).enumerate() {
                let _infallible = self.write_slice(&mut yaml, family, number, endpoints);
            }
        }
        yaml
    }

    fn write_service(&self, yaml: &mut String, families: &[&str]) -> std::fmt::Result {
        writeln!(yaml, "apiVersion: v1\nkind: Service\nmetadata:\n  name: {}\n  annotations:", self.name)?;
        for (annotation, value) in &self.annotations {
            writeln!(yaml, "    {annotation}: {value:?}")?;
        }
        writeln!(yaml, "spec:")?;
        self.write_exposure(yaml)?;
        if self.exposure.kind == Type::ExternalName {
            return writeln!(yaml, "  externalName: elsewhere.example");
        }
        let policy = if families.len() == 2 { "RequireDualStack" } else { "SingleStack" };
        writeln!(yaml, "  ipFamilyPolicy: {policy}\n  ipFamilies: [{}]", families.join(", "))?;
        if let Some(first) = self.cluster_ips.first() {
            let all = flow(&self.cluster_ips);
            writeln!(yaml, "  clusterIP: {:?}\n  clusterIPs: {all}", first.to_string())?;
        }
        writeln!(yaml, "  ports:")?;
        for Port { name, protocol, port, target_port, node_port } in &self.ports {
            write!(
                yaml,
                "  - {{name: {name}, protocol: {protocol}, port: {port}, targetPort: {target_port}"
            )?;
            if let Some(node_port) = node_port {
                write!(yaml, ", nodePort: {node_port}")?;
            }
            writeln!(yaml, "}}")?;
        }
        self.write_status(yaml)
    }

    fn write_exposure(&self, yaml: &mut String) -> std::fmt::Result {
        let Exposure { kind, external_ips, source_ranges, affinity, .. } = &self.exposure;
        writeln!(yaml, "  type: {kind:?}")?;
        if !external_ips.is_empty() {
            writeln!(yaml, "  externalIPs: {}", flow(external_ips))?;
        }
        if !source_ranges.is_empty() {
            writeln!(yaml, "  loadBalancerSourceRanges: {}", flow(source_ranges))?;
        }
        if self.exposure.without_node_ports {
            writeln!(yaml, "  allocateLoadBalancerNodePorts: false")?;
        }
        if self.exposure.internal_local {
            writeln!(yaml, "  internalTrafficPolicy: Local")?;
        }
        if self.exposure.external_local {
            writeln!(yaml, "  externalTrafficPolicy: Local")?;
        }
        if let Some(port) = self.exposure.health_check_node_port {
            writeln!(yaml, "  healthCheckNodePort: {port}")?;
        }
        if let Some(seconds) = affinity {
            writeln!(yaml, "  sessionAffinity: ClientIP")?;
            writeln!(yaml, "  sessionAffinityConfig: {{clientIP: {{timeoutSeconds: {seconds}}}}}")?;
        }
        Ok(())
    }

    fn write_status(&self, yaml: &mut String) -> std::fmt::Result {
        if self.exposure.load_balancer_ips.is_empty() {
            return Ok(());
        }
        writeln!(yaml, "status:\n  loadBalancer:\n    ingress:")?;
        let mode = if self.exposure.proxied { "Proxy" } else { "VIP" };
        for ip in &self.exposure.load_balancer_ips {
            writeln!(yaml, "    - {{ip: {:?}, ipMode: {mode}}}", ip.to_string())?;
        }
        Ok(())
    }

    fn write_slice(
        &self,
        yaml: &mut String,
        family: &str,
        number: usize,
        of_slice: &[Endpoint],
    ) -> std::fmt::Result {
        let name = &self.name;
        let mut suffix = family.to_lowercase();
        if number > 0 {
            write!(suffix, "-{number}")?;
        }
        writeln!(yaml, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:")?;
        writeln!(yaml, "  name: {name}-{suffix}\n  labels:\n    kubernetes.io/service-name: {name}")?;
        writeln!(yaml, "addressType: {family}\nports:")?;
        for Port { name, protocol, target_port, .. } in &self.ports {
            writeln!(yaml, "- {{name: {name}, protocol: {protocol}, port: {target_port}}}")?;
        }
        let mut endpoints = String::new();
        for endpoint in of_slice {
            let Endpoint { pod, node, addresses, ready, terminating, .. } = endpoint;
            let Some(address) = addresses.iter().find(|ip| ip.is_ipv4() == (family == "IPv4")) else {
                continue;
            };
            writeln!(endpoints, "- addresses: [{:?}]", address.to_string())?;
            let serving = *ready || *terminating;
            writeln!(
                endpoints,
                "  conditions: {{ready: {ready}, serving: {serving}, terminating: {terminating}}}"
            )?;
            writeln!(endpoints, "  nodeName: {node}\n  targetRef: {{kind: Pod, name: {pod}}}")?;
            if !endpoint.zone.is_empty() {
                writeln!(endpoints, "  zone: {}", endpoint.zone)?;
            }
            endpoint.write_hints(&mut endpoints)?;
        }
        if endpoints.is_empty() {
            writeln!(yaml, "endpoints: []")
        } else {
            write!(yaml, "endpoints:\n{endpoints}")
        }
    }
}

/// A YAML list in flow style, of quoted texts.
fn flow(items: &[impl ToString]) -> String {
    let quoted: Vec<String> = items.iter().map(|item| format!("{:?}", item.to_string())).collect();
    format!("[{}]", quoted.join(", "))
}
