//! The workload as API objects of realistic size, in the pages of lists.

use std::{collections::BTreeMap, net::Ipv4Addr};

use lb_common::{Address, ServiceKey, protocol};
use serde_json::{Value, json};

use crate::workload::{FIRST_ENDPOINT, FIRST_MOVED_ENDPOINT, NODES, STRIDE, Size, cluster_ip};

/// Number of objects per page of a list, as the agent requests.
const PAGE: usize = 200;
/// Name of the agent's node.
pub(crate) const NODE: &str = "node-000";
const PORT: u16 = 80;

/// The lists of all resources, by the plural name of the resource: the response bodies of each list, page by page.
pub(crate) type Lists = BTreeMap<&'static str, Vec<String>>;

/// The objects of a mock API server, and the changes to them.
pub(crate) struct Objects {
    size: Size,
    slices_per_service: u32,
    changes: u32,
}

/// The change that moves one endpoint to another address.
pub(crate) struct Moved {
    /// The watch event of the changed EndpointSlice, as a line of JSON.
    pub(crate) line: String,
    /// Cluster IP and port of the changed Service.
    pub(crate) frontend: ServiceKey,
    /// The new address of the endpoint.
    pub(crate) address: Address,
}

impl Objects {
    pub(crate) const fn new(size: Size, slices_per_service: u32) -> Self {
        Self { size, slices_per_service, changes: 0 }
    }

    /// The pages of all lists.
    pub(crate) fn lists(&self) -> Lists {
        let all = 0..self.size.services;
        let services = all.clone().map(service);
        let slices = all.flat_map(|n| (0..self.slices_per_service).map(move |part| (n, part)));
        let slices = slices.map(|(n, part)| self.slice(n, part, None, 1));
        let node = json!({"metadata": {"name": NODE, "resourceVersion": "1"}});
        BTreeMap::from([
            ("services", pages(services)),
            ("endpointslices", pages(slices)),
            ("nodes", pages([node].into_iter())),
            ("servicecidrs", pages([].into_iter())),
        ])
    }

    /// Moves one endpoint of a Service to another address. Each call changes the Service [`STRIDE`] places after the
    /// Service of the previous call.
    pub(crate) fn move_endpoint(&mut self) -> Moved {
        let address = Ipv4Addr::from(FIRST_MOVED_ENDPOINT + self.changes);
        let n = self.changes.wrapping_mul(STRIDE) % self.size.services;
        self.changes += 1;
        let slice = self.slice(n, 0, Some(address), 1 + self.changes);
        Moved {
            line: format!("{}\n", json!({"type": "MODIFIED", "object": slice})),
            frontend: ServiceKey::new(cluster_ip(n).into(), PORT, protocol::TCP),
            address: std::net::IpAddr::from(address).into(),
        }
    }

    /// EndpointSlice number `part` of Service number `n`. If `moved` is given, it is the address of the Service's first
    /// endpoint, which is in slice 0.
    fn slice(&self, n: u32, part: u32, moved: Option<Ipv4Addr>, version: u32) -> Value {
        let service = name(n);
        let endpoint = |i: u32| {
            let address = Ipv4Addr::from(FIRST_ENDPOINT + n * self.size.endpoints + i);
            let address = moved.filter(|_| i == 0).unwrap_or(address);
            json!({
                "addresses": [address.to_string()],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "nodeName": format!("node-{:03}", (n + i) % NODES),
                "zone": format!("zone-{}", i % 3),
                "targetRef": {
                    "kind": "Pod", "namespace": "default", "name": format!("{service}-7d4b9c8f6d-{i:05}"),
                    "uid": uid(n, i),
                },
            })
        };
        let share = self.size.endpoints.div_ceil(self.slices_per_service);
        let endpoints: Vec<Value> =
            (part * share..self.size.endpoints.min((part + 1) * share)).map(endpoint).collect();
        let fields = json!({"f:addressType": {}, "f:endpoints": {}, "f:metadata": {"f:labels": {".": {}}}, "f:ports": {}});
        json!({
            "metadata": {
                "name": format!("{service}-{part:05}"), "namespace": "default", "uid": uid(n, part),
                "resourceVersion": version.to_string(), "generation": version,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {
                    "kubernetes.io/service-name": service,
                    "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                },
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00.123456789Z"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service, "uid": uid(n, 0)}],
                "managedFields": [{
                    "manager": "kube-controller-manager", "operation": "Update", "apiVersion": "discovery.k8s.io/v1",
                    "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields,
                }],
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            "endpoints": endpoints,
        })
    }
}

fn service(n: u32) -> Value {
    let ip = cluster_ip(n).to_string();
    json!({
        "metadata": {
            "name": name(n), "namespace": "default", "uid": uid(n, 0), "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": name(n)},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": {"app": name(n)},
            "ports": [{"name": "http", "port": PORT, "protocol": "TCP", "targetPort": 8080}],
        },
        "status": {"loadBalancer": {}},
    })
}

fn name(n: u32) -> String {
    format!("service-{n:05}")
}

fn uid(n: u32, i: u32) -> String {
    format!("{n:08x}-0000-4000-8000-{i:012x}")
}

/// The bodies of the pages of a list. Only the objects of one page exist at a time, because a million endpoints as JSON
/// values would take gigabytes.
fn pages(objects: impl Iterator<Item = Value>) -> Vec<String> {
    let mut objects = objects.peekable();
    let mut pages = Vec::new();
    while pages.is_empty() || objects.peek().is_some() {
        let items: Vec<Value> = objects.by_ref().take(PAGE).collect();
        let next = if objects.peek().is_some() { (pages.len() + 1).to_string() } else { String::new() };
        pages.push(
            json!({"metadata": {"resourceVersion": "1", "continue": next}, "items": items}).to_string(),
        );
    }
    pages
}
