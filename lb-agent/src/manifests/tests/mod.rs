//! Tests of the source that reads a folder of manifests.

use std::{collections::BTreeMap, net::IpAddr};

use lb_core::{
    allocate::{DEFAULT_NODE_PORTS, OutsideRanges},
    model::{Change, EndpointSlice, ObjectName, Service},
    plan::Contents,
};

use super::{Content, Edit, Manifests, ManifestsOptions, Update};

mod bgp;
mod edits;
mod follow;
mod metallb;
mod names;
mod pools;
mod random_edits;
mod rejected;
mod seeds;

/// The options of an agent without settings.
fn options() -> ManifestsOptions {
    let other_cluster_ips = OutsideRanges::Accepted;
    ManifestsOptions { other_cluster_ips, ..options_with("10.96.0.0/12,fd00:10:96::/112") }
}

/// The options of an agent with `--service-cluster-ip-range`.
fn options_with(ranges: &str) -> ManifestsOptions {
    ManifestsOptions {
        dir: "services".into(),
        cluster_ip_ranges: ranges.split(',').map(|range| range.parse().unwrap()).collect(),
        other_cluster_ips: OutsideRanges::Refused,
        pod_networks: Vec::new(),
        load_balancer_pool: Vec::new(),
        load_balancer_reassign: false,
        load_balancer_class: None,
        has_members: false,
        names: None,
        node_port_range: DEFAULT_NODE_PORTS,
    }
}

/// The state of a folder under test, and the objects that its changes have produced so far.
struct Folder {
    manifests: Manifests,
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
    update: Update,
}

impl Folder {
    fn new() -> Self {
        Self::with(options(), &Contents::default())
    }

    fn with(options: ManifestsOptions, contents: &Contents) -> Self {
        let manifests = Manifests::new(&options, contents);
        Self { manifests, services: BTreeMap::new(), slices: BTreeMap::new(), update: Update::default() }
    }

    fn of(files: &[(&str, &str)]) -> Self {
        let mut folder = Self::new();
        folder.write(files);
        folder
    }

    fn write(&mut self, files: &[(&str, &str)]) -> &mut Self {
        let text = |(file, text): &(&str, &str)| edit(file, Content::Text((*text).to_owned()));
        self.apply(&files.iter().map(text).collect::<Vec<_>>())
    }

    fn remove(&mut self, file: &str) -> &mut Self {
        self.apply(&[edit(file, Content::Gone)])
    }

    fn apply(&mut self, edits: &[Edit]) -> &mut Self {
        self.update = self.manifests.apply(edits);
        for change in self.update.changes.clone() {
            match change {
                Change::Service(name, Some(service)) => {
                    assert_ne!(self.services.insert(name, service.clone()), Some(service), "no change");
                }
                Change::Service(name, None) => {
                    assert!(self.services.remove(&name).is_some(), "{name} was not there");
                }
                Change::EndpointSlice(name, Some(slice)) => {
                    assert_ne!(self.slices.insert(name, slice.clone()), Some(slice), "no change");
                }
                Change::EndpointSlice(name, None) => {
                    assert!(self.slices.remove(&name).is_some(), "{name} was not there");
                }
            }
        }
        self
    }

    fn problems(&self) -> Vec<String> {
        self.update.problems.iter().map(ToString::to_string).collect()
    }

    fn service(&self, name: &str) -> &Service {
        self.services
            .get(&ObjectName::new("default", name))
            .unwrap_or_else(|| panic!("{name}: {:?}", self.problems()))
    }

    fn ports(&self, name: &str) -> Vec<u16> {
        self.service(name).ports.iter().map(|port| port.port).collect()
    }

    fn endpoints(&self, service: &str) -> Vec<String> {
        let service = ObjectName::new("default", service);
        let slices = self.slices.values().filter(|slice| slice.service == service);
        let targets = |slice: &EndpointSlice| {
            let ports = slice.ports.clone();
            let of = move |address: IpAddr| {
                ports.clone().into_iter().map(move |port| format!("{address}:{}", port.port))
            };
            slice.endpoints.iter().flat_map(|endpoint| of(endpoint.address)).collect::<Vec<_>>()
        };
        slices.flat_map(targets).collect()
    }

    fn names(&self) -> Vec<&str> {
        self.services.keys().map(|name| &*name.name).collect()
    }
}

fn edit(file: &str, content: Content) -> Edit {
    Edit { file: file.into(), content }
}

fn service(name: &str, port: u16) -> String {
    format!("apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  ports:\n  - port: {port}\n")
}

fn service_at(name: &str, address: &str) -> String {
    format!("{}  clusterIP: {address}\n", service(name, 80))
}

fn slice(name: &str, service: &str, address: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}\n  labels:\n    \
         kubernetes.io/service-name: {service}\naddressType: IPv4\nports:\n- port: 8080\nendpoints:\n- addresses: \
         [{address}]\n"
    )
}
