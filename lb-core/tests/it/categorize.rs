//! The table of `TestCategorizeEndpoints` (`pkg/proxy/topology_test.go` of Kubernetes 1.36) without its feature gates
//! (here, all are on): which endpoints a service port uses, and which of them are on this node.

use std::collections::BTreeSet;

use lb_common::{Backend, FrontendKind, service_flags};
use lb_core::{
    desired::{Frontend, Port, desired},
    model::{
        Endpoint, EndpointPort, EndpointSlice, External, Hints, Node, NodeAddresses, ObjectName, Policy,
        Protocol, Service, ServicePort, TrafficPolicy,
    },
};

const NODE: &str = "node-1";

/// One case of kube-proxy's table.
struct Case {
    name: &'static str,
    zone: Option<&'static str>,
    /// Words about the service port: `iTP` (its internal traffic policy is `Local`), `eTP` (its external one is), `NP`
    /// (it has a node port).
    service: &'static str,
    /// The endpoints, each as `address state…`; states are `ready`, `serving`, `terminating`, `here`, `zones=a,b`,
    /// `nodes=a,b`.
    endpoints: &'static [&'static str],
    /// The endpoints expected for the policy Cluster; `None` if the service port never uses that list.
    cluster: Option<&'static [&'static str]>,
    /// The endpoints expected for the policy Local; `None` if the service port never uses that list.
    local: Option<&'static [&'static str]>,
    /// Whether an endpoint is usable on any node.
    any: bool,
}

const ZONES: &[&str] = &["3 ready zones=a", "4 ready zones=b", "5 ready zones=c", "6 ready zones=a"];
const NODES: &[&str] = &[
    "3 ready zones=a nodes=node-1",
    "4 ready zones=b nodes=node-2",
    "5 ready zones=c nodes=node-3",
    "6 ready zones=a nodes=node-4",
];
const OTHER_NODES: &[&str] = &[
    "3 ready zones=a nodes=node-5",
    "4 ready zones=b nodes=node-2",
    "5 ready zones=c nodes=node-3",
    "6 ready zones=a nodes=node-4",
];
const ZONES_HERE: &[&str] =
    &["3 ready here zones=a", "4 ready here zones=b", "5 ready zones=c", "6 ready zones=a"];
const SOME_HERE: &[&str] = &["0 ready here", "1 ready"];
const ALL_HERE: &[&str] = &["0 ready here", "1 ready here"];
const REMOTE: &[&str] = &["0 ready", "1 ready"];
const TERMINATING: &[&str] = &["0 serving terminating here", "1 serving terminating"];
const REMOTE_TERMINATING: &[&str] = &["0 serving terminating", "1 serving terminating"];
const MIXED: &[&str] = &["0 ready", "1 here", "2 serving terminating here", "3 serving terminating"];

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { name: "hints for zones", zone: Some("a"), service: "", endpoints: ZONES,
        cluster: Some(&["3", "6"]), local: None, any: true },
    Case { name: "eTP Local, topology ignored for local endpoints", zone: Some("a"), service: "eTP NP", endpoints: ZONES_HERE,
        cluster: Some(&["3", "6"]), local: Some(&["3", "4"]), any: true },
    Case { name: "iTP Local, topology ignored for local endpoints", zone: Some("a"), service: "iTP NP", endpoints: ZONES_HERE,
        cluster: Some(&["3", "6"]), local: Some(&["3", "4"]), any: true },
    Case { name: "no zone of the node", zone: None, service: "", endpoints: &["3 ready zones=a"],
        cluster: Some(&["3"]), local: None, any: true },
    Case { name: "empty zone of the node", zone: Some(""), service: "", endpoints: &["3 ready zones=a"],
        cluster: Some(&["3"]), local: None, any: true },
    Case { name: "node in another zone", zone: Some("b"), service: "", endpoints: &["3 ready zones=a"],
        cluster: Some(&["3"]), local: None, any: true },
    Case { name: "unready endpoint with a hint", zone: Some("a"), service: "",
        endpoints: &["3 ready zones=a", "4 ready zones=b", "5 ready zones=c", "6 zones=a"],
        cluster: Some(&["3"]), local: None, any: true },
    Case { name: "only unready endpoints in the zone", zone: Some("a"), service: "",
        endpoints: &["3 zones=a", "4 ready zones=b", "5 ready zones=c", "6 zones=a"],
        cluster: Some(&["4", "5"]), local: None, any: true },
    Case { name: "a hint is missing", zone: Some("a"), service: "",
        endpoints: &["3 ready zones=a", "4 ready zones=b", "5 ready", "6 ready zones=a"],
        cluster: Some(&["3", "4", "5", "6"]), local: None, any: true },
    Case { name: "several hints for each endpoint", zone: Some("c"), service: "",
        endpoints: &["3 ready zones=a,b,c", "4 ready zones=b,c", "5 ready zones=b,d", "6 ready zones=c"],
        cluster: Some(&["3", "4", "6"]), local: None, any: true },
    Case { name: "hints for nodes", zone: Some("a"), service: "", endpoints: NODES,
        cluster: Some(&["3"]), local: None, any: true },
    Case { name: "hints for nodes, but not for all endpoints", zone: Some("a"), service: "",
        endpoints: &[NODES[0], "4 ready", NODES[2], NODES[3]],
        cluster: Some(&["3", "4", "5", "6"]), local: None, any: true },
    Case { name: "hints for other nodes: the zone counts", zone: Some("a"), service: "", endpoints: OTHER_NODES,
        cluster: Some(&["3", "6"]), local: None, any: true },
    Case { name: "topology and locality disagree", zone: Some("a"), service: "eTP NP",
        endpoints: &["0 ready here zones=a", "1 ready here zones=b", "2 ready zones=a", "3 ready zones=b"],
        cluster: Some(&["0", "2"]), local: Some(&["0", "1"]), any: true },
    Case { name: "iTP Local, no endpoints", zone: None, service: "iTP", endpoints: &[],
        cluster: None, local: Some(&[]), any: false },
    Case { name: "iTP Local, all remote", zone: None, service: "iTP", endpoints: REMOTE,
        cluster: None, local: Some(&[]), any: true },
    Case { name: "iTP Local, all local", zone: None, service: "iTP", endpoints: ALL_HERE,
        cluster: None, local: Some(&["0", "1"]), any: true },
    Case { name: "iTP Local, some local", zone: None, service: "iTP", endpoints: SOME_HERE,
        cluster: None, local: Some(&["0"]), any: true },
    Case { name: "iTP Cluster, none ready", zone: None, service: "", endpoints: &["0 serving", "1 serving"],
        cluster: Some(&[]), local: None, any: false },
    Case { name: "iTP Cluster, one ready", zone: None, service: "", endpoints: &["0 serving", "1 ready"],
        cluster: Some(&["1"]), local: None, any: true },
    Case { name: "iTP Cluster, all terminating", zone: None, service: "", endpoints: TERMINATING,
        cluster: Some(&["0", "1"]), local: None, any: true },
    Case { name: "iTP Local, eTP Cluster", zone: None, service: "iTP NP", endpoints: SOME_HERE,
        cluster: Some(&["0", "1"]), local: Some(&["0"]), any: true },
    Case { name: "iTP Cluster, eTP Local", zone: None, service: "eTP NP", endpoints: SOME_HERE,
        cluster: Some(&["0", "1"]), local: Some(&["0"]), any: true },
    Case { name: "both Local, some local", zone: None, service: "iTP eTP NP", endpoints: SOME_HERE,
        cluster: Some(&["0", "1"]), local: Some(&["0"]), any: true },
    Case { name: "both Local, all remote", zone: None, service: "iTP eTP NP", endpoints: REMOTE,
        cluster: Some(&["0", "1"]), local: Some(&[]), any: true },
    Case { name: "both Local, all remote and terminating", zone: None, service: "iTP eTP NP", endpoints: REMOTE_TERMINATING,
        cluster: Some(&["0", "1"]), local: Some(&[]), any: true },
    Case { name: "eTP Local, some terminating", zone: None, service: "eTP NP", endpoints: MIXED,
        cluster: Some(&["0"]), local: Some(&["2"]), any: true },
    Case { name: "eTP means nothing to a Service that is not reached from outside", zone: None, service: "eTP", endpoints: SOME_HERE,
        cluster: Some(&["0", "1"]), local: None, any: true },
    Case { name: "iTP Local of a Service that is not reached from outside", zone: None, service: "iTP", endpoints: SOME_HERE,
        cluster: None, local: Some(&["0"]), any: true },
    Case { name: "eTP Local, no endpoints", zone: None, service: "eTP NP", endpoints: &[],
        cluster: Some(&[]), local: Some(&[]), any: false },
    Case { name: "eTP Local, all remote", zone: None, service: "eTP NP", endpoints: REMOTE,
        cluster: Some(&["0", "1"]), local: Some(&[]), any: true },
    Case { name: "eTP Local, all local", zone: None, service: "eTP NP", endpoints: ALL_HERE,
        cluster: Some(&["0", "1"]), local: Some(&["0", "1"]), any: true },
];

fn endpoint(text: &str) -> Endpoint {
    let (last, state) = text.split_once(' ').unwrap_or((text, ""));
    let has = |word| state.split(' ').any(|part| part == word);
    let list = |prefix| {
        let found = state.split(' ').find_map(|part| part.strip_prefix(prefix));
        found.map_or_else(Vec::new, |list| list.split(',').map(Into::into).collect())
    };
    let hints = Hints { zones: list("zones="), nodes: list("nodes=") };
    Endpoint {
        address: [10, 1, 2, last.parse().expect("a number")].into(),
        ready: has("ready"),
        serving: has("ready") || has("serving"),
        terminating: has("terminating"),
        node: Some(if has("here") { NODE } else { "elsewhere" }.into()),
        zone: None,
        pod: None,
        hints: (hints != Hints::default()).then(|| hints.into()),
    }
}

fn port_of(case: &Case) -> Port {
    let has = |word| case.service.split(' ').any(|part| part == word);
    let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
    let node_port = has("NP").then_some(30_080);
    let service = Service {
        cluster_ips: vec![[10, 96, 0, 1].into()],
        ports: vec![ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port }],
        external: External { policy: policy(has("eTP")), ..External::default() },
        internal_policy: policy(has("iTP")),
        ..Service::default()
    };
    let name = ObjectName::new("default", "web");
    let slice = EndpointSlice {
        service: name.clone(),
        ports: vec![EndpointPort { name: "".into(), protocol: Protocol::Tcp, port: 80 }],
        endpoints: case.endpoints.iter().map(|text| endpoint(text)).collect(),
    };
    let here = vec![[192, 0, 2, 1].into()];
    let node = Node {
        policy: Policy { node_name: NODE.into(), ..Policy::default() },
        zone: case.zone.map(Into::into),
        addresses: NodeAddresses { own: here.clone(), primary: here.clone(), node_ports: here },
        ..Node::default()
    };
    desired(&name, &service, [&slice].into_iter(), &node).remove(0)
}

/// The last bytes of the addresses in a slice of backends.
fn shown(port: &Port, slice: Option<usize>) -> Vec<String> {
    let last = |backend: &Backend| backend.address.v4_bytes()[3].to_string();
    slice.map_or_else(Vec::new, |slice| port.slices[slice].iter().map(last).collect())
}

/// The backends of a frontend, as two lists: first those that the policy Local chooses, then those that the policy
/// Cluster chooses or that are for internal clients. `None` if the frontend has no such list.
fn lists(port: &Port, frontend: &Frontend, is_local: bool) -> (Option<Vec<String>>, Option<Vec<String>>) {
    let own = Some(shown(port, frontend.slice));
    match (is_local, frontend.has(service_flags::SHORT_CIRCUIT)) {
        (false, false) => (None, own),
        (true, false) => (own, None),
        (true, true) => (own, Some(shown(port, frontend.internal_slice))),
        (false, true) => unreachable!("a short circuit under the policy Cluster"),
    }
}

#[test]
fn endpoints_are_categorized_as_by_kube_proxy() {
    for case in CASES {
        let port = port_of(case);
        let expected =
            |list: Option<&[&str]>| list.map(|l| l.iter().map(ToString::to_string).collect::<Vec<_>>());
        let (cluster, local) = (expected(case.cluster), expected(case.local));
        for frontend in &port.frontends {
            let policy = if frontend.kind == FrontendKind::ClusterIp { "iTP" } else { "eTP" };
            let is_local = case.service.contains(policy);
            let (of_local, of_cluster) = lists(&port, frontend, is_local);
            assert!(of_local.is_none() || of_local == local, "{}: local {of_local:?}", case.name);
            assert!(of_cluster.is_none() || of_cluster == cluster, "{}: cluster {of_cluster:?}", case.name);
            let drops = is_local && case.any && local.as_ref().is_some_and(Vec::is_empty);
            assert_eq!(frontend.has(service_flags::DROP_WITHOUT_BACKENDS), drops, "{}", case.name);
        }
        // The port must have exactly the expected lists, each once.
        let lists: BTreeSet<Vec<String>> =
            [cluster, local].into_iter().flatten().filter(|list| !list.is_empty()).collect();
        let slices: Vec<Vec<String>> =
            (0..port.slices.len()).map(|slice| shown(&port, Some(slice))).collect();
        assert_eq!(slices.len(), lists.len(), "{}", case.name);
        assert_eq!(slices.into_iter().collect::<BTreeSet<_>>(), lists, "{}", case.name);
    }
}
