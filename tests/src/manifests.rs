//! The folder of manifests that the agent reads, and YAML for it.

use std::{
    fmt::Write as _,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

/// A folder of manifests. Files appear and change by rename, as `kubectl`-like tools and editors do it.
#[derive(Debug, Clone)]
pub struct Manifests {
    folder: PathBuf,
}

impl Manifests {
    /// Makes the folder if there is none.
    pub fn create(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes or replaces `NAME.yaml` in one step.
    pub fn write(&self, name: &str, yaml: &str) -> io::Result<()> {
        let temporary = self.folder.join(format!(".{name}.tmp"));
        fs::write(&temporary, yaml)?;
        fs::rename(temporary, self.folder.join(format!("{name}.yaml")))
    }

    /// Writes or replaces the file of a service.
    pub fn put(&self, service: &Service) -> io::Result<()> {
        self.write(&service.name, &service.yaml())
    }

    /// Removes `NAME.yaml`.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.folder.join(format!("{name}.yaml")))
    }
}

/// An endpoint of a service: the addresses of a pod.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The pod's name.
    pub pod: String,
    /// The node's name.
    pub node: String,
    /// One address of each family at most.
    pub addresses: Vec<IpAddr>,
    /// Whether the pod is ready; one that is not is shown with `ready: false`.
    pub ready: bool,
    /// Whether the pod is terminating (and still serves).
    pub terminating: bool,
}

/// A port of a service.
#[derive(Clone, Debug)]
pub struct Port {
    /// `name`
    pub name: &'static str,
    /// `protocol`: `TCP` or `UDP`
    pub protocol: &'static str,
    /// `port`, which clients speak to
    pub port: u16,
    /// `targetPort`, where the pods listen
    pub target_port: u16,
}

/// A Service with its EndpointSlices, as one YAML file.
#[derive(Clone, Debug)]
pub struct Service {
    /// `metadata.name`
    pub name: String,
    /// `spec.clusterIPs`; when empty the agent allocates one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.ports`
    pub ports: Vec<Port>,
    /// Where its traffic goes.
    pub endpoints: Vec<Endpoint>,
}

impl Service {
    /// A Service and one EndpointSlice of each family that the endpoints have.
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
            let _infallible = self.write_slice(&mut yaml, family);
        }
        yaml
    }

    fn write_service(&self, yaml: &mut String, families: &[&str]) -> std::fmt::Result {
        let policy = if families.len() == 2 { "RequireDualStack" } else { "SingleStack" };
        writeln!(yaml, "apiVersion: v1\nkind: Service\nmetadata:\n  name: {}\nspec:", self.name)?;
        writeln!(yaml, "  ipFamilyPolicy: {policy}\n  ipFamilies: [{}]", families.join(", "))?;
        if let Some(first) = self.cluster_ips.first() {
            let all: Vec<String> =
                self.cluster_ips.iter().map(|ip| format!("{:?}", ip.to_string())).collect();
            writeln!(yaml, "  clusterIP: {:?}\n  clusterIPs: [{}]", first.to_string(), all.join(", "))?;
        }
        writeln!(yaml, "  ports:")?;
        for Port { name, protocol, port, target_port } in &self.ports {
            writeln!(
                yaml,
                "  - {{name: {name}, protocol: {protocol}, port: {port}, targetPort: {target_port}}}"
            )?;
        }
        Ok(())
    }

    fn write_slice(&self, yaml: &mut String, family: &str) -> std::fmt::Result {
        let name = &self.name;
        let suffix = family.to_lowercase();
        writeln!(yaml, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:")?;
        writeln!(yaml, "  name: {name}-{suffix}\n  labels:\n    kubernetes.io/service-name: {name}")?;
        writeln!(yaml, "addressType: {family}\nports:")?;
        for Port { name, protocol, target_port, .. } in &self.ports {
            writeln!(yaml, "- {{name: {name}, protocol: {protocol}, port: {target_port}}}")?;
        }
        let mut endpoints = String::new();
        for Endpoint { pod, node, addresses, ready, terminating } in &self.endpoints {
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
        }
        if endpoints.is_empty() {
            writeln!(yaml, "endpoints: []")
        } else {
            write!(yaml, "endpoints:\n{endpoints}")
        }
    }
}
