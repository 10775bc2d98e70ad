//! `service`: what each node serves, Services that not all nodes serve alike first.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use anyhow::bail;
use lb_output::{NOTHING, TableOrJson, print, print_json, render, table};
use serde::{Deserialize, Serialize};

use crate::{
    cli::{ClusterArgs, ServiceArgs},
    cluster::Cluster,
    gather::{self, Answer},
};

/// The fields of a service port that this command compares, from `lb-agent service list -o json`.
#[derive(Debug, Deserialize)]
struct Served {
    namespace: String,
    name: String,
    port: u16,
    protocol: String,
    frontends: Vec<Frontend>,
    backends: Vec<Backend>,
}

#[derive(Debug, Deserialize)]
struct Frontend {
    address: IpAddr,
    port: u16,
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Backend {
    address: IpAddr,
    port: u16,
}

/// A service port on all nodes, and its JSON. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Debug, Serialize)]
struct ServicePort {
    namespace: String,
    name: String,
    port: u16,
    protocol: String,
    /// What is wrong with the service port; `None` if nothing is.
    problem: Option<Problem>,
    /// Nodes that have answered, but do not serve the port.
    missing: Vec<String>,
    /// The nodes that serve the port.
    nodes: Vec<OnNode>,
}

/// A service port on one node.
#[derive(Debug, Serialize)]
struct OnNode {
    node: String,
    /// The virtual addresses on the node, without node ports, which have other addresses on each node.
    frontends: BTreeSet<SocketAddr>,
    /// The backends that the node uses, including terminating ones. Traffic policies and topology may give one node
    /// fewer backends than another.
    backends: BTreeSet<SocketAddr>,
}

/// What is wrong with a service port, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Problem {
    /// Some nodes do not serve the port.
    Missing,
    /// Nodes serve the port under different addresses.
    OtherFrontends,
    /// No node has a backend of the port.
    NoBackends,
}

/// Runs `service`.
///
/// # Errors
/// The agents cannot be found ([`Cluster::find`]), no node serves the Service that the user named, or not all nodes
/// have answered.
pub(crate) async fn service(cluster_args: &ClusterArgs, args: ServiceArgs) -> anyhow::Result<()> {
    let cluster = Cluster::find(cluster_args).await?;
    let answers: Vec<Answer<Vec<Served>>> =
        gather::json(&cluster, &["service", "list", "-o", "json"], cluster_args.limit()).await;
    let complete =
        gather::all_answered(answers.iter().map(|Answer { node, result }| {
            (node.name.as_str(), result.as_ref().err().map(ToString::to_string))
        }));
    let mut ports = merged(answers);
    if let Some(service) = &args.service {
        ports.retain(|port| format!("{}/{}", port.namespace, port.name) == *service);
        if ports.is_empty() && complete.is_ok() {
            bail!("no node serves a Service {service}; `kubectl lb service` lists those that are served");
        }
    }
    match (args.output, &args.service) {
        (TableOrJson::Json, _) => print_json(&ports)?,
        (TableOrJson::Table, None) => print(&list(&ports))?,
        (TableOrJson::Table, Some(_)) => print(&by_node(&ports))?,
    }
    complete
}

/// The service ports of all nodes that have answered, those with the worst problem first.
fn merged(answers: Vec<Answer<Vec<Served>>>) -> Vec<ServicePort> {
    let mut answered = BTreeSet::new();
    let mut found: BTreeMap<_, Vec<OnNode>> = BTreeMap::new();
    for Answer { node, result } in answers {
        let Ok(served) = result else { continue };
        answered.insert(node.name.clone());
        for service in served {
            let Served { namespace, name, port, protocol, frontends, backends } = service;
            let frontends = frontends.iter().filter(|frontend| frontend.kind != "NodePort");
            found.entry((namespace, name, port, protocol)).or_default().push(OnNode {
                node: node.name.clone(),
                frontends: frontends
                    .map(|frontend| SocketAddr::new(frontend.address, frontend.port))
                    .collect(),
                backends: backends
                    .iter()
                    .map(|backend| SocketAddr::new(backend.address, backend.port))
                    .collect(),
            });
        }
    }
    let mut ports: Vec<_> = found
        .into_iter()
        .map(|((namespace, name, port, protocol), mut nodes)| {
            nodes.sort_by(|a, b| a.node.cmp(&b.node));
            let serves = |name: &String| nodes.iter().any(|node| node.node == *name);
            let missing: Vec<_> = answered.iter().filter(|name| !serves(name)).cloned().collect();
            ServicePort {
                problem: problem(&missing, &nodes),
                namespace,
                name,
                port,
                protocol,
                missing,
                nodes,
            }
        })
        .collect();
    // The sort is stable: ports with the same problem stay in the order of their names.
    ports.sort_by_key(|port| (port.problem.is_none(), port.problem));
    ports
}

fn problem(missing: &[String], nodes: &[OnNode]) -> Option<Problem> {
    if !missing.is_empty() {
        Some(Problem::Missing)
    } else if nodes.iter().any(|node| node.frontends != nodes[0].frontends) {
        Some(Problem::OtherFrontends)
    } else if nodes.iter().all(|node| node.backends.is_empty()) {
        Some(Problem::NoBackends)
    } else {
        None
    }
}

impl ServicePort {
    fn problem_text(&self) -> String {
        match self.problem {
            Some(Problem::Missing) => format!("missing on {}", self.missing.join(", ")),
            Some(Problem::OtherFrontends) => "frontends differ between nodes".to_owned(),
            Some(Problem::NoBackends) => "no backends".to_owned(),
            None => NOTHING.to_owned(),
        }
    }

    /// The number of backends, or the least and the greatest number if nodes have different numbers of backends.
    fn backend_count(&self) -> String {
        let counts: BTreeSet<_> = self.nodes.iter().map(|node| node.backends.len()).collect();
        match (counts.first(), counts.last()) {
            (Some(least), Some(most)) if least != most => format!("{least}-{most}"),
            (count, _) => count.map_or_else(|| NOTHING.to_owned(), ToString::to_string),
        }
    }

    /// The frontends on any node.
    fn frontends(&self) -> BTreeSet<SocketAddr> {
        self.nodes.iter().flat_map(|node| &node.frontends).copied().collect()
    }

    fn socket(&self) -> String {
        format!("{}/{}", self.port, self.protocol)
    }
}

fn list(ports: &[ServicePort]) -> String {
    let mut table = table(&["NAMESPACE", "NAME", "PORT", "FRONTENDS", "NODES", "BACKENDS", "PROBLEM"]);
    for port in ports {
        table.add_row([
            port.namespace.clone(),
            port.name.clone(),
            port.socket(),
            joined(&port.frontends()),
            format!("{}/{}", port.nodes.len(), port.nodes.len() + port.missing.len()),
            port.backend_count(),
            port.problem_text(),
        ]);
    }
    render(&table)
}

/// A row for each port and node. Nodes that do not serve the port come first.
fn by_node(ports: &[ServicePort]) -> String {
    let mut table = table(&["PORT", "NODE", "FRONTENDS", "BACKENDS"]);
    for port in ports {
        for node in &port.missing {
            table.add_row([port.socket(), node.clone(), "not served".to_owned(), NOTHING.to_owned()]);
        }
        for node in &port.nodes {
            table.add_row([
                port.socket(),
                node.node.clone(),
                joined(&node.frontends),
                joined(&node.backends),
            ]);
        }
    }
    render(&table)
}

fn joined(sockets: &BTreeSet<SocketAddr>) -> String {
    if sockets.is_empty() {
        return NOTHING.to_owned();
    }
    sockets.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::{cluster::AgentNode, exec::NodeError};

    fn answer(name: &str, result: Result<Value, NodeError>) -> Answer<Vec<Served>> {
        let node = AgentNode { name: name.to_owned(), kernel: None, pod: Ok(name.to_owned()) };
        Answer { node, result: result.map(|served| from_value(served).expect("service ports")) }
    }

    /// A service port with a cluster IP, a node port and some backends.
    fn port(name: &str, node: u8, cluster_ip: &str, backends: &[&str]) -> Value {
        let backends: Vec<_> = backends
            .iter()
            .map(|address| json!({"address": address, "port": 8080, "state": "active"}))
            .collect();
        json!({
            "namespace": "shop", "name": name, "port": 80, "portName": "", "protocol": "TCP", "backends": backends,
            "frontends": [
                {"address": cluster_ip, "port": 80, "kind": "ClusterIP"},
                {"address": format!("192.0.2.{node}"), "port": 30080, "kind": "NodePort"},
            ],
        })
    }

    fn ports() -> Vec<ServicePort> {
        let (good, moved, empty) = (["10.0.0.1", "10.0.0.2"], ["10.0.0.3"], []);
        merged(vec![
            answer("n3", Err(NodeError::NoPod)),
            answer(
                "n2",
                Ok(json!([
                    port("local", 2, "fd00::7", &["10.0.0.1"]),
                    port("moved", 2, "10.96.0.9", &moved),
                    port("void", 2, "10.96.0.3", &empty),
                    port("web", 2, "10.96.0.1", &good),
                ])),
            ),
            answer(
                "n1",
                Ok(json!([
                    port("late", 1, "10.96.0.4", &good),
                    port("local", 1, "fd00::7", &good),
                    port("moved", 1, "10.96.0.2", &moved),
                    port("void", 1, "10.96.0.3", &empty),
                    port("web", 1, "10.96.0.1", &good),
                ])),
            ),
        ])
    }

    #[test]
    fn services_that_nodes_serve_differently_come_first() {
        let expected = "\
NAMESPACE  NAME   PORT    FRONTENDS                  NODES  BACKENDS  PROBLEM
shop       late   80/TCP  10.96.0.4:80               1/2    2         missing on n2
shop       moved  80/TCP  10.96.0.2:80,10.96.0.9:80  2/2    1         frontends differ between nodes
shop       void   80/TCP  10.96.0.3:80               2/2    0         no backends
shop       local  80/TCP  [fd00::7]:80               2/2    1-2       -
shop       web    80/TCP  10.96.0.1:80               2/2    2         -
";
        assert_eq!(list(&ports()), expected);
    }

    #[test]
    fn one_service_has_a_row_for_each_node() {
        let expected = "\
PORT    NODE  FRONTENDS     BACKENDS
80/TCP  n2    not served    -
80/TCP  n1    10.96.0.4:80  10.0.0.1:8080,10.0.0.2:8080
";
        assert_eq!(by_node(&ports()[..1]), expected);
    }
}
