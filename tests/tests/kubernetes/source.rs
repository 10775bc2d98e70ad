//! Tests of what the Kubernetes source publishes in addition to Services: the agent's Node, ranges of cluster IPs, and
//! trigger times of changes. The source runs as a library in this process.

use std::{
    cell::RefCell,
    fs,
    path::PathBuf,
    thread,
    time::{Duration, SystemTime},
};

use lb_agent::kubernetes::{self, NodeInfo, Published};
use lb_core::{
    family::Family,
    model::{Change, SourceEvent, Trigger},
};
use lb_tests::{
    cleanup::{Cleanup, Resource},
    netns::{Netns, unique_prefix},
    wait_for,
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::{
    api_server::{ApiServer, Fault},
    bed::LIMIT,
    cluster::{self, Cluster},
};

/// A Kubernetes source that runs in a thread of this process.
struct Source {
    server: Option<ApiServer>,
    cluster: Cluster,
    node_name: String,
    /// The receiver of events, and all events that it has received.
    events: RefCell<(mpsc::Receiver<SourceEvent>, Vec<SourceEvent>)>,
    node: watch::Receiver<NodeInfo>,
    service_cidrs: watch::Receiver<Vec<ipnet::IpNet>>,
    problems: watch::Receiver<Vec<String>>,
    thread: Option<thread::JoinHandle<()>>,
    _folder: Cleanup,
}

impl Source {
    /// Starts a source with the real API server if the environment names one, else with the mock. `prepare` creates
    /// objects before the source starts.
    fn new(prepare: impl FnOnce(&Cluster, &str)) -> Self {
        Self::start(Cluster::real(), |_, cluster, name| prepare(cluster, name))
    }

    /// Starts a source with the mock API server, which can simulate faults.
    fn with_faults(prepare: impl FnOnce(&ApiServer, &Cluster, &str)) -> Self {
        Self::start(None, |server, cluster, name| prepare(server.unwrap(), cluster, name))
    }

    fn start(real: Option<Cluster>, prepare: impl FnOnce(Option<&ApiServer>, &Cluster, &str)) -> Self {
        let name = format!("{}source", unique_prefix());
        let folder = std::env::temp_dir().join(&name);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let netns = Netns::create(&name).unwrap();
        let (server, cluster, kubeconfig) = cluster::connect(real, &netns);
        let path = folder.join("kubeconfig");
        fs::write(&path, kubeconfig).unwrap();
        prepare(server.as_ref(), &cluster, &name);
        let (event_sender, events) = mpsc::channel(64);
        let (node_sender, node) = watch::channel(NodeInfo::default());
        let (cidr_sender, service_cidrs) = watch::channel(vec!["10.96.0.0/12".parse().unwrap()]);
        let (problem_sender, problems) = watch::channel(Vec::new());
        let published = Published {
            node: node_sender,
            service_cidrs: cidr_sender,
            peers: None,
            problems: problem_sender,
        };
        let node_name = name.clone();
        let thread =
            Some(thread::spawn(move || netns.run(|| run(path, &name, event_sender, published)).unwrap()));
        let events = RefCell::new((events, Vec::new()));
        Self { server, cluster, node_name, events, node, service_cidrs, problems, thread, _folder: cleanup }
    }

    fn server(&self) -> &ApiServer {
        self.server.as_ref().unwrap()
    }

    /// All events that the source has sent so far.
    fn sent(&self) -> Vec<SourceEvent> {
        let (receiver, sent) = &mut *self.events.borrow_mut();
        while let Ok(event) = receiver.try_recv() {
            sent.push(event);
        }
        sent.clone()
    }

    fn zones(&self) -> Vec<Option<String>> {
        let zone = |event| {
            if let SourceEvent::Zone(zone) = event { Some(zone.map(|zone| zone.to_string())) } else { None }
        };
        self.sent().into_iter().filter_map(zone).collect()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, limit: Duration, probe: impl Fn(&Self) -> bool) {
        if wait_for(limit, || probe(self).then_some(())).is_none() {
            let (node, cidrs, problems) =
                (self.node.borrow(), self.service_cidrs.borrow(), self.problems.borrow());
            panic!("not within {limit:?}: {what}; {node:?} {cidrs:?} {problems:?} {:?}", self.sent());
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // Closing the channel ends the source, and its thread leaves the namespace.
        self.events.get_mut().0.close();
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
        match &mut self.server {
            Some(server) => server.stop(),
            None => self.cluster.delete(&node(&self.node_name, "")),
        }
    }
}

fn run(
    kubeconfig: PathBuf,
    node: &str,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let server = kubernetes::ApiServer::Kubeconfig(kubeconfig);
    runtime.block_on(kubernetes::run(server, node, events, published)).map_err(std::io::Error::other)
}

fn node(name: &str, zone: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "spec": {"podCIDRs": ["10.244.1.0/24"], "podCIDR": "10.244.1.0/24"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    })
}

fn tainted(name: &str) -> Value {
    let mut node = node(name, "z2");
    node["spec"]["taints"] = json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]);
    node
}

#[test]
fn source_reports_changes_of_its_own_node_only() {
    let source = Source::new(|cluster, name| {
        cluster.apply(&node(name, "z1"));
        cluster.apply(&node(&format!("{name}-other"), "z9"));
    });
    source.wait_until("synchronised", LIMIT, |source| source.sent().contains(&SourceEvent::Synchronised));
    let zone = SourceEvent::Zone(Some("z1".into()));
    let position = |wanted: &SourceEvent| source.sent().iter().position(|event| event == wanted);
    assert!(
        position(&zone).unwrap() < position(&SourceEvent::Synchronised).unwrap(),
        "the zone is known before the first write"
    );
    let known = source.node.borrow().clone();
    assert_eq!(known.pod_cidrs, Some(vec!["10.244.1.0/24".parse().unwrap()]));
    assert_eq!(known.internal_ips, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    assert!(known.eligible);

    let name = &source.node_name;
    source.cluster.apply(&node(name, "z2"));
    source.wait_until("another zone", LIMIT, |source| source.zones().last() == Some(&Some("z2".to_owned())));
    source.cluster.apply(&tainted(name));
    source.wait_until("a taint", LIMIT, |source| !source.node.borrow().eligible);
    source.cluster.apply(&node(name, "z2"));
    source.wait_until("no taint", LIMIT, |source| source.node.borrow().eligible);
    source.cluster.delete(&node(name, "z2"));
    source.wait_until("no Node", LIMIT, |source| !source.node.borrow().eligible);
    assert_eq!(*source.node.borrow(), NodeInfo { zone: Some("z2".into()), eligible: false, ..known });
    source.cluster.apply(&node(name, "z2"));
    source.wait_until("the Node again", LIMIT, |source| source.node.borrow().eligible);
    assert_eq!(source.zones().len(), 2, "no zone was sent twice: {:?}", source.zones());
    source.cluster.delete(&node(&format!("{name}-other"), ""));
}

#[test]
fn missing_node_does_not_delay_synchronisation() {
    let source = Source::new(|_, _| {});
    source.wait_until("synchronised", LIMIT, |source| source.sent().contains(&SourceEvent::Synchronised));
    assert_eq!(source.zones(), []);
    let complains =
        |source: &Source| source.problems.borrow().iter().any(|problem| problem.contains("has no Node"));
    source.wait_until("no Node", LIMIT, complains);
    assert!(source.node.borrow().eligible, "the Node may not be registered yet");
    source.cluster.apply(&node(&source.node_name, "z1"));
    source.wait_until("the Node", LIMIT, |source| source.node.borrow().zone.is_some() && !complains(source));
}

#[test]
fn unreadable_or_unreachable_node_keeps_its_last_state() {
    let mut source = Source::with_faults(|_, cluster, name| cluster.apply(&node(name, "z1")));
    source.wait_until("the zone", LIMIT, |source| source.zones() == [Some("z1".to_owned())]);
    let known = source.node.borrow().clone();
    let mut malformed = node(&source.node_name, "z1");
    malformed["spec"]["podCIDRs"] = "all".into();
    source.server().put(malformed);
    source.wait_until("a problem", LIMIT, |source| {
        source
            .problems
            .borrow()
            .iter()
            .any(|problem| problem.starts_with(&format!("Node \"{}\"", source.node_name)))
    });
    source.server.as_mut().unwrap().stop();
    source.wait_until("a failure", LIMIT, |source| source.problems.borrow().len() == 2);
    assert_eq!(*source.node.borrow(), known);
    source.server().put(node(&source.node_name, "z2"));
    source.server().drop_history();
    source.server.as_mut().unwrap().listen();
    source.wait_until("another zone", LIMIT, |source| source.zones().len() == 2);
    source.wait_until("no problem", LIMIT, |source| source.problems.borrow().is_empty());
}

fn service_cidr(name: &str, cidrs: &[&str]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": name},
        "spec": {"cidrs": cidrs},
    })
}

#[test]
fn service_ranges_are_those_of_all_service_cidrs() {
    let mut source = Source::with_faults(|server, cluster, _| {
        server.set_fault("servicecidrs", Fault { held: true, ..Fault::default() });
        cluster.apply(&service_cidr("kubernetes", &["10.100.0.0/16", "fd00:10:100::/112"]));
    });
    let ranges = |wanted: &'static [&str]| {
        move |source: &Source| {
            source.service_cidrs.borrow().iter().map(ToString::to_string).eq(wanted.iter().copied())
        }
    };
    source.wait_until("synchronised", LIMIT, |source| source.sent().contains(&SourceEvent::Synchronised));
    assert!(ranges(&["10.96.0.0/12"])(&source), "the default, until the list is answered");
    source.server().set_fault("servicecidrs", Fault::default());
    source.wait_until("the list", LIMIT, ranges(&["10.100.0.0/16", "fd00:10:100::/112"]));
    source.cluster.apply(&service_cidr("more", &["10.50.0.0/24"]));
    source.wait_until("more", LIMIT, ranges(&["10.50.0.0/24", "10.100.0.0/16", "fd00:10:100::/112"]));
    source.server().put(service_cidr("more", &["10.50.0.0/240"]));
    source.wait_until("a problem", LIMIT, |source| {
        source.problems.borrow().iter().any(|problem| problem.contains("\"more\" is invalid: spec.cidrs[0]"))
    });
    assert!(ranges(&["10.50.0.0/24", "10.100.0.0/16", "fd00:10:100::/112"])(&source), "the last good state");
    source.server.as_mut().unwrap().stop();
    source.server().delete(&service_cidr("more", &[]));
    source.server().drop_history();
    source.server.as_mut().unwrap().listen();
    source.wait_until("less, by a list", LIMIT, ranges(&["10.100.0.0/16", "fd00:10:100::/112"]));
    source.cluster.delete(&service_cidr("kubernetes", &[]));
    source.wait_until("none", LIMIT, ranges(&["10.96.0.0/12"]));
}

#[test]
fn changes_carry_their_trigger_time() {
    let slice = |port: u16, triggered: &str| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "namespace": "default", "name": "s", "labels": {"kubernetes.io/service-name": "s"},
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": triggered},
            },
            "addressType": "IPv4", "ports": [{"name": "", "port": port, "protocol": "TCP"}], "endpoints": [],
        })
    };
    let long_ago = "2020-01-01T00:00:00Z";
    let source = Source::with_faults(|server, _, _| server.put(slice(80, long_ago)));
    source.wait_until("synchronised", LIMIT, |source| source.sent().contains(&SourceEvent::Synchronised));
    // A time in the future, because triggers from before the agent's start do not count.
    let soon = "2100-01-01T00:00:00.123456789Z";
    source.server().put(slice(81, soon));
    let changed = |source: &Source, count| {
        source.sent().iter().filter(|event| matches!(event, SourceEvent::Changes(_))).count() == count
    };
    source.wait_until("a change", LIMIT, |source| changed(source, 2));
    source.server().put(slice(82, soon));
    source.wait_until("another change", LIMIT, |source| changed(source, 3));
    let sent = source.sent();
    let triggered: Vec<usize> = sent
        .iter()
        .enumerate()
        .filter_map(|(index, event)| matches!(event, SourceEvent::Triggered(_)).then_some(index))
        .collect();
    assert_eq!(triggered.len(), 1, "{sent:?}");
    let since_1970 = Duration::new(4_102_444_800, 123_456_789);
    let trigger = Trigger { family: Family::V4, time: SystemTime::UNIX_EPOCH + since_1970 };
    assert_eq!(sent[triggered[0]], SourceEvent::Triggered(vec![trigger]));
    let SourceEvent::Changes(changes) = &sent[triggered[0] + 1] else { panic!("{sent:?}") };
    assert!(matches!(&changes[..], [Change::EndpointSlice(_, Some(slice))] if slice.ports[0].port == 81));
}

#[test]
fn short_watches_are_retried_with_a_pause() {
    let fault = Fault { short_watches: true, ..Fault::default() };
    let source = Source::with_faults(|server, _, _| server.set_fault("services", fault));
    source.wait_until("watches", LIMIT, |source| source.server().counts("services").1 >= 3);
    thread::sleep(Duration::from_secs(3));
    let (lists, watches) = source.server().counts("services");
    assert!(lists == 1 && watches < 10, "{lists} lists and {watches} watches in a few seconds");
}
