//! The agent and an API server: what happens to the Services in the kernel when lists, watches and the server fail.
//!
//! Needs root and `target/release/lb-agent`, and fails without, like the other tests of this package.
#![expect(clippy::unwrap_used, reason = "a test panics when the testbed fails")]

mod api_server;

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use lb_tests::{
    agent::{ask, binary},
    cleanup::{Cleanup, Resource},
    netns::{Netns, unique_prefix},
    wait_for,
};
use serde_json::{Value, json};

use self::api_server::ApiServer;

/// How long the agent may take for what needs no pause between two attempts.
const SOON: Duration = Duration::from_secs(5);
/// The same after a failure: the pauses are 0.8 s, 1.6 s, … at random up to twice as long.
const PATIENCE: Duration = Duration::from_secs(30);

/// A node with an API server, and an agent that can be started.
struct Bed {
    server: ApiServer,
    agent: Option<(Child, Cleanup)>,
    netns: Netns,
    folder: PathBuf,
    _cleanup: Cleanup,
}

impl Bed {
    fn new() -> Self {
        let name = format!("{}k8s", unique_prefix());
        let folder = std::env::temp_dir().join(&name);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let netns = Netns::create(&name).unwrap();
        let server = ApiServer::start(&netns);
        fs::write(folder.join("kubeconfig"), server.kubeconfig()).unwrap();
        Self { server, agent: None, netns, folder, _cleanup: cleanup }
    }

    /// The agent runs and serves `a` and `b`, each with one backend.
    fn with_a_and_b() -> Self {
        let mut bed = Self::new();
        bed.put("a", 1);
        bed.put("b", 2);
        bed.start_agent();
        bed.wait_until("a and b are served", SOON, |bed| bed.served() == ["a 1", "b 2"]);
        bed
    }

    /// A Service `name` with the address 10.96.0.NUMBER, and a backend 198.51.100.NUMBER.
    fn put(&self, name: &str, number: u8) {
        self.server.put(service(name, number));
        self.server.put(slice(name, number));
    }

    fn delete(&self, name: &str) {
        self.server.delete("services", name);
        self.server.delete("endpointslices", name);
    }

    fn start_agent(&mut self) {
        let log = File::options().create(true).append(true).open(self.folder.join("log")).unwrap();
        let mut command = self.netns.command(binary());
        command.arg("run").arg("--kubeconfig").arg(self.folder.join("kubeconfig"));
        command.arg("--bpffs").arg(self.folder.join("bpf")).args(["--node-name", "a"]);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.agent = Some(Cleanup::spawn(&mut command).unwrap());
    }

    fn kill_agent(&mut self) {
        if let Some((mut child, cleanup)) = self.agent.take() {
            child.kill().unwrap();
            child.wait().unwrap();
            cleanup.disarm();
        }
    }

    fn json(&self, arguments: &[&str]) -> Option<Value> {
        let output =
            ask(&self.netns, &self.folder.join("bpf"), &[arguments, &["-o", "json"]].concat()).ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }

    /// What the kernel holds, as `NAME NUMBER…`: the number of its address and those of its backends where they differ.
    fn served(&self) -> Vec<String> {
        let last = |address: &Value| address.as_str().unwrap().rsplit('.').next().unwrap().to_owned();
        let text = |service: &Value| {
            let mut numbers = vec![last(&service["frontends"][0]["address"])];
            numbers.extend(service["backends"].as_array().unwrap().iter().map(|b| last(&b["address"])));
            numbers.dedup();
            let alone = if service["backends"] == json!([]) { " without backends" } else { "" };
            format!("{} {}{alone}", service["name"].as_str().unwrap(), numbers.join(" "))
        };
        let services = self.json(&["service", "list"]).unwrap_or_default();
        services.as_array().into_iter().flatten().map(text).collect()
    }

    fn problems(&self) -> String {
        self.json(&["status"]).unwrap()["agent"]["problems"].to_string()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, limit: Duration, probe: impl Fn(&Self) -> bool) {
        if wait_for(limit, || probe(self).then_some(())).is_none() {
            panic!("not within {limit:?}: {what}; served: {:?}; log:\n{}", self.served(), self.log());
        }
    }

    /// What is served stays as it is for a while.
    #[track_caller]
    fn assert_stays(&self, served: &[&str], time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            assert_eq!(self.served(), served, "after {:?}; log:\n{}", start.elapsed(), self.log());
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.kill_agent();
        self.server.stop();
    }
}

fn service(name: &str, number: u8) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "default", "name": name, "uid": name},
        "spec": {"type": "ClusterIP", "clusterIP": format!("10.96.0.{number}"), "ports": [{"port": 80, "protocol": "TCP"}]},
    })
}

fn slice(name: &str, number: u8) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "default", "name": name, "uid": name, "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": [format!("198.51.100.{number}")], "conditions": {"ready": true}}],
    })
}

#[test]
fn what_is_listed_and_then_watched_is_served() {
    let bed = Bed::with_a_and_b();
    bed.put("c", 3);
    bed.wait_until("an added Service", SOON, |bed| bed.served() == ["a 1", "b 2", "c 3"]);
    bed.server.put(slice("a", 7));
    bed.wait_until("a changed EndpointSlice", SOON, |bed| bed.served() == ["a 1 7", "b 2", "c 3"]);
    bed.server.delete("endpointslices", "c");
    bed.wait_until("no endpoints", SOON, |bed| bed.served() == ["a 1 7", "b 2", "c 3 without backends"]);
    bed.delete("b");
    bed.server.delete("services", "c");
    bed.wait_until("deleted Services", SOON, |bed| bed.served() == ["a 1 7"]);
    assert_eq!(bed.server.counts(), (2, 2), "one list and one watch of each kind");
    assert_eq!(bed.problems(), "[]");
}

#[test]
fn the_selectors_are_those_of_kube_proxy() {
    let bed = Bed::with_a_and_b();
    for request in bed.server.requests() {
        let labels = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";
        assert_eq!(request.query["labelSelector"], labels, "{request:?}");
        let fields = request.query.get("fieldSelector").map(String::as_str);
        assert_eq!(fields, (request.plural == "services").then_some("spec.clusterIP!=None"), "{request:?}");
    }
}

#[test]
fn a_version_that_is_gone_leads_to_a_list_without_a_gap() {
    let bed = Bed::with_a_and_b();
    bed.server.slow_slices(Duration::from_secs(1));
    bed.server.unseen(|_| {
        bed.delete("a");
        bed.put("c", 3);
    });
    let steady = |bed: &Bed| {
        let served = bed.served();
        assert!(served.contains(&"b 2".to_owned()), "{served:?}; log:\n{}", bed.log());
        served == ["b 2", "c 3"]
    };
    bed.wait_until("c instead of a", PATIENCE, steady);
    assert_eq!(bed.server.counts().0, 4, "two lists of each kind");
    assert!(!bed.log().contains("WARN"), "this is routine; log:\n{}", bed.log());
}

#[test]
fn a_watch_that_ends_goes_on_where_it_was() {
    let bed = Bed::with_a_and_b();
    bed.wait_until("both are watched", SOON, |bed| bed.server.counts() == (2, 2));
    bed.server.end_watches();
    bed.put("c", 3);
    bed.delete("a");
    bed.wait_until("c instead of a", PATIENCE, |bed| bed.served() == ["b 2", "c 3"]);
    assert_eq!(bed.server.counts(), (2, 4), "two watches of each kind, and no other list");
}

#[test]
fn a_malformed_object_costs_nobody_else_anything() {
    let mut bed = Bed::with_a_and_b();
    let mut malformed = service("a", 9);
    malformed["spec"]["ports"] = "eighty".into();
    bed.server.put(malformed);
    bed.put("c", 3);
    bed.wait_until("c, and a as before", SOON, |bed| bed.served() == ["a 1", "b 2", "c 3"]);
    let problems = bed.problems();
    assert!(problems.contains("default/a") && problems.contains("last good state"), "{problems}");

    // An agent that never saw it good leaves what the kernel has of it.
    bed.kill_agent();
    bed.start_agent();
    bed.wait_until("the problem", SOON, |bed| bed.problems().contains("it is left out"));
    bed.put("d", 4);
    bed.wait_until("d, and a as before", SOON, |bed| bed.served() == ["a 1", "b 2", "c 3", "d 4"]);

    bed.server.put(service("a", 1));
    bed.wait_until("no problem", SOON, |bed| bed.problems() == "[]");
    bed.assert_stays(&["a 1", "b 2", "c 3", "d 4"], Duration::from_millis(300));
}

#[test]
fn a_server_that_is_away_changes_nothing_and_is_warned_of_once() {
    let mut bed = Bed::with_a_and_b();
    bed.server.stop();
    bed.wait_until("a problem", PATIENCE, |bed| bed.problems().contains("cannot ask the API server"));
    bed.put("c", 3);
    bed.delete("a");
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(4));
    let warnings = bed.log().lines().filter(|line| line.contains("WARN")).count();
    assert_eq!(warnings, 1, "log:\n{}", bed.log());
    bed.server.listen();
    bed.wait_until("c instead of a", PATIENCE, |bed| bed.served() == ["b 2", "c 3"]);
}

#[test]
fn nothing_is_written_before_both_kinds_are_listed() {
    let mut bed = Bed::with_a_and_b();
    bed.kill_agent();
    bed.delete("a");
    bed.put("c", 3);
    bed.server.break_slices(true);
    let lists = bed.server.counts().0;
    bed.start_agent();
    bed.wait_until("lists", SOON, |bed| bed.server.counts().0 >= lists + 2);
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(2));
    bed.server.break_slices(false);
    bed.wait_until("c instead of a", PATIENCE, |bed| bed.served() == ["b 2", "c 3"]);
}
