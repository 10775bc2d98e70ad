//! A node with an API server and an agent, for the tests of the API server source.

use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU8, Ordering},
    time::{Duration, Instant},
};

use lb_tests::{
    agent::ask_json,
    cleanup::{Cleanup, Resource},
    netns::{Netns, unique_prefix},
    wait_for,
};
use serde_json::{Value, json};

use crate::{
    api_server::ApiServer,
    cluster::{self, Cluster},
    running_agent::{Files, RunningAgent},
};

/// Time limit of every wait; only an agent that hangs takes so long. After a failure an agent pauses for 0.8 s, 1.6 s
/// and so on up to a minute, and on a busy machine it takes seconds to load programs.
pub(crate) const LIMIT: Duration = Duration::from_secs(180);
/// How long a test watches for a change that must not happen.
pub(crate) const A_WHILE: Duration = Duration::from_millis(500);
/// Arguments for a DNS server at a loopback address; at the address of its upstream server nothing listens.
pub(crate) const DNS: [&str; 4] = ["--dns-bind-address", "127.0.0.1", "--dns-upstream", "127.0.0.9"];

/// A node with an API server; the test starts the agent.
pub(crate) struct Bed {
    /// The mock API server; `None` if a real one is used.
    server: Option<ApiServer>,
    pub(crate) cluster: Cluster,
    /// The Kubernetes namespace of all objects of this test, because other tests may use the same server.
    namespace: String,
    /// The third byte of all cluster IPs of this test.
    subnet: u8,
    agent: Option<RunningAgent>,
    pub(crate) netns: Netns,
    folder: PathBuf,
    _cleanup: Cleanup,
}

impl Bed {
    /// Uses the real API server if the environment names one, else the mock.
    pub(crate) fn new() -> Self {
        Self::with(Cluster::real())
    }

    /// Uses the mock API server, which can simulate faults.
    pub(crate) fn with_faults() -> Self {
        Self::with(None)
    }

    /// Uses this API server, or the mock if there is none.
    pub(crate) fn with(real: Option<Cluster>) -> Self {
        static SUBNET: AtomicU8 = AtomicU8::new(200);
        let name = format!("{}k8s", unique_prefix());
        let folder = std::env::temp_dir().join(&name);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let netns = Netns::create(&name).unwrap();
        let (server, cluster, kubeconfig) = cluster::connect(real, &netns);
        fs::write(folder.join("kubeconfig"), kubeconfig).unwrap();
        let namespace = if server.is_some() { "default".to_owned() } else { name };
        let subnet = SUBNET.fetch_add(1, Ordering::Relaxed);
        let bed = Self { server, cluster, namespace, subnet, agent: None, netns, folder, _cleanup: cleanup };
        if bed.server.is_none() {
            bed.cluster.apply(&bed.namespace_object());
        }
        bed
    }

    /// Starts the agent with the Services `a` and `b`, each of which has one backend.
    pub(crate) fn with_a_and_b(mut self) -> Self {
        self.put("a", 1);
        self.put("b", 2);
        self.start_agent();
        self.wait_until("a and b are served", LIMIT, |bed| bed.served() == ["a 1", "b 2"]);
        self
    }

    /// The mock API server; panics if the test uses a real one.
    pub(crate) fn server(&self) -> &ApiServer {
        self.server.as_ref().expect("a test that needs faults uses the in-repo server")
    }

    pub(crate) fn server_mut(&mut self) -> &mut ApiServer {
        self.server.as_mut().expect("a test that needs faults uses the in-repo server")
    }

    fn namespace_object(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
    }

    /// A Service whose cluster IP ends with `number`.
    pub(crate) fn service(&self, name: &str, number: u8) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": self.namespace, "name": name},
            "spec": {
                "type": "ClusterIP", "clusterIP": format!("10.96.{}.{number}", self.subnet),
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
            },
        })
    }

    /// The EndpointSlice of the Service with the same name; its only backend is `198.51.100.NUMBER`.
    pub(crate) fn slice(&self, name: &str, number: u8) -> Value {
        self.slice_of(name, name, &[endpoint(number)])
    }

    /// An EndpointSlice of `service` with these endpoints.
    pub(crate) fn slice_of(&self, name: &str, service: &str, endpoints: &[Value]) -> Value {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "namespace": self.namespace, "name": name, "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
            "endpoints": endpoints,
        })
    }

    /// Creates a Service and an EndpointSlice with one backend.
    pub(crate) fn put(&self, name: &str, number: u8) {
        for object in [self.service(name, number), self.slice(name, number)] {
            match &self.server {
                Some(server) => server.put(object),
                None => self.cluster.apply(&object),
            }
        }
    }

    /// Deletes the Service and the EndpointSlice with this name.
    pub(crate) fn delete(&self, name: &str) {
        for object in [self.service(name, 0), self.slice(name, 0)] {
            match &self.server {
                Some(server) => server.delete(&object),
                None => self.cluster.delete(&object),
            }
        }
    }

    pub(crate) fn start_agent(&mut self) {
        self.start_agent_with(&[]);
    }

    /// Starts the agent with these additional arguments of `run`.
    pub(crate) fn start_agent_with(&mut self, arguments: &[&str]) {
        let [kubeconfig, log] = ["kubeconfig", "log"].map(|name| self.folder.join(name));
        let files = Files { kubeconfig: &kubeconfig, bpffs: &self.bpffs(), log: &log };
        self.agent = Some(RunningAgent::start(&self.netns, "a", &files, arguments));
    }

    pub(crate) fn kill_agent(&mut self) {
        self.agent = None;
    }

    pub(crate) fn bpffs(&self) -> PathBuf {
        self.folder.join("bpf")
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Option<Value> {
        ask_json(&self.netns, &self.bpffs(), arguments).ok()
    }

    /// The Services in the kernel, each as `NAME NUMBER…`: the last byte of the cluster IP and of each backend's
    /// address, without consecutive duplicates. A Service without backends gets the suffix ` without backends`.
    pub(crate) fn served(&self) -> Vec<String> {
        let services = self.json(&["service", "list"]).unwrap_or_default();
        let services = services.as_array().into_iter().flatten();
        services.filter(|service| service["namespace"] == *self.namespace).map(shown).collect()
    }

    /// The conditions that `status` lists, except the missing Node object, which most tests do not create.
    pub(crate) fn problems(&self) -> String {
        let mut problems = self.json(&["status"]).unwrap()["agent"]["problems"].clone();
        if let Some(problems) = problems.as_array_mut() {
            problems.retain(|problem| !problem.to_string().contains("has no Node"));
        }
        problems.to_string()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap()
    }

    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, limit: Duration, probe: impl Fn(&Self) -> bool) {
        if wait_for(limit, || probe(self).then_some(())).is_none() {
            panic!("not within {limit:?}: {what}; served: {:?}; log:\n{}", self.served(), self.log());
        }
    }

    #[track_caller]
    pub(crate) fn wait_served(&self, what: &str, limit: Duration, served: &[&str]) {
        self.wait_until(&format!("{what}: {served:?}"), limit, |bed| bed.served() == served);
    }

    /// Asserts that the Services in the kernel stay the same during `time`.
    #[track_caller]
    pub(crate) fn assert_stays(&self, served: &[&str], time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            assert_eq!(self.served(), served, "after {:?}; log:\n{}", start.elapsed(), self.log());
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.kill_agent();
        match &mut self.server {
            Some(server) => server.stop(),
            None => self.cluster.delete(&self.namespace_object()),
        }
    }
}

/// A headless Service.
pub(crate) fn headless(bed: &Bed, name: &str) -> Value {
    let mut service = bed.service(name, 0);
    service["spec"]["clusterIP"] = "None".into();
    service
}

/// A ready endpoint with the address `198.51.100.NUMBER`.
pub(crate) fn endpoint(number: u8) -> Value {
    json!({"addresses": [format!("198.51.100.{number}")], "conditions": {"ready": true}})
}

fn shown(service: &Value) -> String {
    let last = |address: &Value| address.as_str().unwrap().rsplit('.').next().unwrap().to_owned();
    let frontends = service["frontends"].as_array().unwrap();
    let of_cluster = frontends.iter().filter(|frontend| frontend["kind"] == "ClusterIP");
    let mut numbers: Vec<String> = of_cluster.map(|frontend| last(&frontend["address"])).collect();
    numbers.extend(service["backends"].as_array().unwrap().iter().map(|backend| last(&backend["address"])));
    numbers.dedup();
    let alone = if service["backends"] == json!([]) { " without backends" } else { "" };
    format!("{} {}{alone}", service["name"].as_str().unwrap(), numbers.join(" "))
}
