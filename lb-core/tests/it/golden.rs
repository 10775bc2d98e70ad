//! Computes the contents of the maps for each `tests/golden/*.yaml`, and compares them with the text next to the file.
//! `UPDATE_EXPECT=1 cargo test` writes the text.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use lb_common::Scheduler;
use lb_core::{
    api,
    convert::{self, ConvertError, Converted, Origin},
    family::{Families, Family},
    model::{Change, NodeAddresses, Policy},
    north_south::NorthSouthMode,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::kernel::Node;

/// The state of the node in a golden manifest: a document of kind `Node` with fields that only these tests know.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NodeDocument {
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    name: String,
    zone: Option<String>,
    /// All addresses of the node; the first one of each family is its primary address.
    #[serde(default)]
    addresses: Vec<IpAddr>,
    /// The addresses that serve node ports; all addresses if unset.
    node_port_addresses: Option<Vec<IpAddr>>,
    #[serde(default)]
    masquerade_all: bool,
    #[serde(default)]
    ignore_external_ips: bool,
    #[serde(default)]
    detects_inside: bool,
    scheduler: Option<String>,
    north_south_mode: Option<String>,
}

const SLOTS: u32 = 1000;

#[test]
fn every_manifest_gives_the_maps_written_beside_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").path());
    let mut manifests: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    manifests.sort();
    assert!(!manifests.is_empty());
    let wrong: Vec<String> = manifests.iter().filter_map(|path| difference(path)).collect();
    assert!(wrong.is_empty(), "{}\nUPDATE_EXPECT=1 accepts the text that was found", wrong.join("\n"));
}

fn difference(manifest: &Path) -> Option<String> {
    let text = fs::read_to_string(manifest).expect("the manifest");
    let (node, errors) = node_of(&text);
    let errors = errors.into_iter().map(|error| format!("{error}\n"));
    let problems = node.reconciler.problems().map(|problem| format!("problem {problem}\n"));
    let found = node.kernel.dump()
        + &node.dump_health()
        + &errors.collect::<String>()
        + &problems.collect::<String>();
    let path = manifest.with_extension("txt");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&path, &found).expect("the text");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    (found != expected).then(|| format!("{}\n--- expected\n{expected}--- found\n{found}", manifest.display()))
}

/// A node that has read these YAML documents, and the errors of invalid ones.
pub(crate) fn node_of(yaml: &str) -> (Node, Vec<String>) {
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(yaml).expect("YAML");
    let is_node = |document: &Value| document["kind"] == "Node";
    let this = documents.iter().position(is_node).map(|index| documents.remove(index));
    let mut node = this.map_or_else(|| Node::new(SLOTS), |this| described(parse(this)));
    let mut errors = Vec::new();
    for document in documents {
        match converted(document) {
            Ok(Converted { value, left_out }) => {
                node.reconciler.handle(value);
                errors.extend(left_out.iter().map(|error| format!("left out {error}")));
            }
            Err(error) => errors.push(format!("error {error}")),
        }
    }
    node.settle();
    (node, errors)
}

fn described(document: NodeDocument) -> Node {
    let scheduler = document.scheduler.map_or(Ok(Scheduler::default()), |name| name.parse());
    let mode = document.north_south_mode.map_or(Ok(NorthSouthMode::default()), |name| name.parse());
    let policy = Policy {
        north_south: mode.expect("a mode"),
        node_name: document.name.into(),
        masquerade_all: document.masquerade_all,
        ignore_external_ips: document.ignore_external_ips,
        scheduler: scheduler.expect("a scheduler"),
        ..Policy::default()
    };
    let sorted = |mut addresses: Vec<IpAddr>| {
        addresses.sort();
        addresses
    };
    let node_ports = document.node_port_addresses.unwrap_or_else(|| document.addresses.clone());
    let first = |family| document.addresses.iter().copied().find(|ip| Family::of(*ip) == family);
    let primary = Family::ALL.into_iter().filter_map(first).collect();
    let addresses =
        NodeAddresses { own: sorted(document.addresses), primary, node_ports: sorted(node_ports) };
    let mut node = Node::with_policy(SLOTS, policy);
    node.set_zone(document.zone.as_deref());
    node.set_addresses(addresses);
    node.set_detects_inside(if document.detects_inside { Families::BOTH } else { Families::NONE });
    node
}

pub(crate) fn changes(document: Value) -> Result<Vec<Change>, ConvertError> {
    converted(document)?.whole()
}

fn converted(document: Value) -> Result<Converted<Vec<Change>>, ConvertError> {
    match document["kind"].as_str() {
        Some("Service") => {
            let service = parse::<api::Service>(document);
            Ok(convert::service(&service, Origin::Cluster)?.map(|change| vec![change]))
        }
        Some("EndpointSlice") => {
            let slice = parse::<api::EndpointSlice>(document);
            Ok(convert::endpoint_slice(&slice)?.map(|change| vec![change]))
        }
        Some("Endpoints") => {
            let slices = convert::endpoints(&parse::<api::Endpoints>(document))?.into_iter();
            let changes: Vec<_> =
                slices.map(|(name, slice)| Change::EndpointSlice(name, Some(slice))).collect();
            Ok(changes.into())
        }
        kind => panic!("no test needs {kind:?}"),
    }
}

fn parse<T: DeserializeOwned>(document: Value) -> T {
    serde_json::from_value(document).expect("an object of its kind")
}
