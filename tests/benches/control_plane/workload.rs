//! The workload: a folder of manifests with Services and EndpointSlices, and changes to it.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use lb_common::{Address, ServiceKey, capacity, protocol};
use lb_tests::manifests::{Endpoint, Port, Service};
use serde::Serialize;

/// The range of cluster IPs, which is the agent's default.
pub(crate) const CLUSTER_IP_RANGE: &str = "10.96.0.0/12";
const FIRST_CLUSTER_IP: u32 = u32::from_be_bytes([10, 96, 1, 0]);
/// The first address of endpoints, and the first of moved endpoints.
pub(crate) const FIRST_ENDPOINT: u32 = u32::from_be_bytes([11, 0, 0, 1]);
pub(crate) const FIRST_MOVED_ENDPOINT: u32 = u32::from_be_bytes([12, 0, 0, 1]);

const PORT: Port = Port { name: "http", protocol: "TCP", port: 80, target_port: 8080, node_port: None };
pub(crate) const NODES: u32 = 100;
/// Distance between changed Services. A prime: unless it divides the number of Services, each Service is changed once
/// before any Service is changed again.
pub(crate) const STRIDE: u32 = 7919;

/// Size of the workload: number of Services, and of endpoints per Service.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Size {
    pub(crate) services: u32,
    /// Number of endpoints per Service.
    pub(crate) endpoints: u32,
}

impl Size {
    /// Number of endpoints of all Services together.
    pub(crate) fn endpoints(self) -> u64 {
        u64::from(self.services) * u64::from(self.endpoints)
    }

    /// Whether the performance limits apply to this size: at most 50,000 endpoints, as 10,000 Services with 5 each
    /// have.
    pub(crate) fn is_ordinary(self) -> bool {
        self.endpoints() <= 50_000
    }

    /// `--max-backends` for this size, if the default is too small. Changes need free slots: the agent writes all
    /// backends of a changed Service to new slots before it frees the old ones.
    pub(crate) fn max_backends(self) -> Option<u64> {
        let wanted = self.endpoints() / 9 * 10;
        (wanted > capacity::BACKENDS as u64).then_some(wanted)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Services x {} endpoints", self.services, self.endpoints)
    }
}

/// The manifests of a folder, in memory.
pub(crate) struct Folder {
    size: Size,
    /// For each Service: the YAML of the Service and of its EndpointSlices.
    services: Vec<String>,
    /// Number of Services per file; the last file may have fewer.
    services_per_file: u32,
    changes: u32,
}

/// An edit of one file that moves one endpoint to another address.
pub(crate) struct Edit {
    /// Name of the file, without `.yaml`.
    pub(crate) file: String,
    /// The new content of the file.
    pub(crate) text: String,
    /// Cluster IP and port of the changed Service.
    pub(crate) frontend: ServiceKey,
    /// The new address of the endpoint.
    pub(crate) address: Address,
}

impl Folder {
    /// The manifests of a workload, in at most `files` files.
    pub(crate) fn new(size: Size, files: u32) -> Self {
        Self {
            size,
            services: (0..size.services).map(|n| service(size, n, None).yaml()).collect(),
            services_per_file: size.services.div_ceil(files),
            changes: 0,
        }
    }

    /// Name (without `.yaml`) and content of each file.
    pub(crate) fn files(&self) -> impl Iterator<Item = (String, String)> {
        (0..self.size.services.div_ceil(self.services_per_file)).map(|file| (name(file), self.text(file)))
    }

    /// Moves one endpoint of a Service to another address. Each call changes the Service [`STRIDE`] places after the
    /// Service of the previous call.
    pub(crate) fn move_endpoint(&mut self) -> Edit {
        let address = Ipv4Addr::from(FIRST_MOVED_ENDPOINT + self.changes);
        let n = self.changes.wrapping_mul(STRIDE) % self.size.services;
        self.changes += 1;
        let service = service(self.size, n, Some(address));
        self.services[n as usize] = service.yaml();
        let file = n / self.services_per_file;
        Edit {
            file: name(file),
            text: self.text(file),
            frontend: ServiceKey::new(cluster_ip(n).into(), PORT.port, protocol::TCP),
            address: IpAddr::from(address).into(),
        }
    }

    fn text(&self, file: u32) -> String {
        let first = file * self.services_per_file;
        let end = self.size.services.min(first + self.services_per_file);
        self.services[first as usize..end as usize].join("---\n")
    }
}

fn name(file: u32) -> String {
    format!("services-{file:04}")
}

pub(crate) fn cluster_ip(n: u32) -> IpAddr {
    Ipv4Addr::from(FIRST_CLUSTER_IP + n).into()
}

/// Service number `n`; its first endpoint has the address `moved`, if that is given.
fn service(size: Size, n: u32, moved: Option<Ipv4Addr>) -> Service {
    let name = format!("service-{n:05}");
    let endpoint = |i: u32| {
        let address = Ipv4Addr::from(FIRST_ENDPOINT + n * size.endpoints + i);
        Endpoint {
            pod: format!("{name}-7d4b9c8f6d-{i:05}"),
            node: format!("node-{:03}", (n + i) % NODES),
            addresses: vec![moved.filter(|_| i == 0).unwrap_or(address).into()],
            ready: true,
            ..Endpoint::default()
        }
    };
    let endpoints = (0..size.endpoints).map(endpoint).collect();
    Service { cluster_ips: vec![cluster_ip(n)], ports: vec![PORT], endpoints, name, ..Service::default() }
}
