use std::{
    net::TcpListener,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use super::*;
use crate::{http_test, metrics::NoPackets};

const V4: &str = "127.0.0.1";
const V6: &str = "::1";

/// The servers under test; the test sets Services, endpoints, addresses and health.
struct Node {
    checks: watch::Sender<Checks>,
    addresses: watch::Sender<BTreeSet<IpAddr>>,
    healthy: Arc<AtomicBool>,
    failures: Arc<Mutex<Vec<(ObjectName, String)>>>,
    metrics: Arc<Metrics>,
    task: JoinHandle<anyhow::Result<Infallible>>,
}

impl Node {
    fn start(addresses: BTreeSet<IpAddr>) -> Self {
        let (checks, checks_receiver) = watch::channel(Checks::new());
        let (addresses, addresses_receiver) = watch::channel(addresses);
        let (healthy, failures) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let metrics = Arc::new(Metrics::new(NoPackets, Some(NoPackets)));
        let (is_healthy, failed) = (Arc::clone(&healthy), Arc::clone(&failures));
        let report = Report {
            healthy: Arc::new(move || is_healthy.load(Ordering::Relaxed)),
            failed: Box::new(move |service, why| {
                failed.lock().unwrap().push((service.clone(), why.to_owned()));
            }),
            metrics: Arc::clone(&metrics),
            node_name: "a".into(),
        };
        let task = tokio::spawn(Servers::new(checks_receiver, addresses_receiver, report).run());
        Self { checks, addresses, healthy, failures, metrics, task }
    }

    /// Sets the Services, each as name, port, and number of IPv4 endpoints on this node.
    fn set(&self, services: &[(&str, u16, usize)]) {
        let check = |&(name, port, endpoints): &(&str, u16, usize)| {
            (self::name(name), HealthCheck { port, v4: Some(endpoints), v6: None })
        };
        self.checks.send_replace(services.iter().map(check).collect());
    }

    /// Asserts the response that the server of a Service gives.
    async fn assert(&self, service: &str, port: u16, code: u16, endpoints: usize, healthy: bool) {
        let answer = eventually(V4, port, |answer| {
            answer.code == code && answer.json()["localEndpoints"] == endpoints
        })
        .await;
        let (namespace, name) = service.split_once('/').unwrap();
        assert_eq!(answer.json()["service"], serde_json::json!({"namespace": namespace, "name": name}));
        assert_eq!(answer.json()["serviceProxyHealthy"], healthy);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("x-load-balancing-endpoint-weight"), Some(&*endpoints.to_string()));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn name(text: &str) -> ObjectName {
    let (namespace, name) = text.split_once('/').unwrap();
    ObjectName::new(namespace, name)
}

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

fn only(ips: &[&str]) -> BTreeSet<IpAddr> {
    ips.iter().map(|ip| ip.parse().unwrap()).collect()
}

/// Free ports below the ephemeral range, so that the kernel gives them to no client.
fn free_ports<const N: usize>() -> [u16; N] {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let is_free = |port: &u16| TcpListener::bind(("::", *port)).is_ok();
    let mut ports = std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed)).filter(is_free);
    [(); N].map(|()| ports.next().unwrap())
}

/// Repeats a request until its response is as expected.
async fn eventually(
    ip: &str,
    port: u16,
    mut right: impl FnMut(&http_test::Answer) -> bool,
) -> http_test::Answer {
    let mut last = None;
    for _attempt in 0..500 {
        match http_test::request(address(ip, port), "GET", "/", "").await {
            Ok(answer) if right(&answer) => return answer,
            other => last = Some(other),
        }
        time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{ip} {port}: {last:?}");
}

async fn eventually_refused(ip: &str, port: u16) {
    for _attempt in 0..500 {
        if http_test::request(address(ip, port), "GET", "/", "").await.is_err() {
            return;
        }
        time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{ip} {port} still answers");
}

/// Follows kube-proxy's test `TestServer`.
#[tokio::test]
async fn servers_follow_services_and_report_their_endpoints() {
    let node = Node::start(only(&["0.0.0.0", "::"]));
    let [b, d, f, other_f, h] = free_ports();
    node.set(&[("a/b", b, 0)]);
    node.assert("a/b", b, 503, 0, true).await;
    for endpoints in [18, 0, 11] {
        node.set(&[("a/b", b, endpoints)]);
        node.assert("a/b", b, if endpoints > 0 { 200 } else { 503 }, endpoints, true).await;
    }
    node.set(&[]);
    eventually_refused(V4, b).await;

    node.set(&[("a/b", b, 9), ("c/d", d, 3), ("e/f", f, 7)]);
    for (service, port, endpoints) in [("a/b", b, 9), ("c/d", d, 3), ("e/f", f, 7)] {
        node.assert(service, port, 200, endpoints, true).await;
    }
    // One Service is deleted, one stays, one changes its port, one is new.
    node.set(&[("c/d", d, 3), ("e/f", other_f, 7), ("g/h", h, 6)]);
    for (service, port, endpoints) in [("c/d", d, 3), ("e/f", other_f, 7), ("g/h", h, 6)] {
        node.assert(service, port, 200, endpoints, true).await;
    }
    eventually_refused(V4, b).await;
    eventually_refused(V4, f).await;

    node.healthy.store(false, Ordering::Relaxed);
    node.assert("c/d", d, 503, 3, false).await;
    node.assert("g/h", h, 503, 6, false).await;
    node.healthy.store(true, Ordering::Relaxed);
    node.assert("c/d", d, 200, 3, true).await;
    assert_eq!(*node.failures.lock().unwrap(), []);
}

/// Follows kube-proxy's test `TestServerWithSelectiveListeningAddress`. In addition, this test changes the addresses;
/// kube-proxy ignores such changes.
#[tokio::test]
async fn servers_listen_on_the_addresses_of_node_ports_only() {
    let node = Node::start(only(&["127.0.0.2"]));
    let [port] = free_ports();
    node.set(&[("a/b", port, 1)]);
    eventually("127.0.0.2", port, |answer| answer.code == 200).await;
    eventually_refused("127.0.0.3", port).await;
    node.addresses.send_replace(only(&["127.0.0.3", V6]));
    eventually("127.0.0.3", port, |answer| answer.code == 200).await;
    eventually_refused("127.0.0.2", port).await;
    eventually_refused(V6, port).await;
}

#[tokio::test]
async fn endpoints_are_counted_per_family() {
    let node = Node::start(only(&["0.0.0.0", "::"]));
    let [port] = free_ports();
    let check = HealthCheck { port, v4: Some(2), v6: Some(0) };
    node.checks.send_replace([(name("a/b"), check)].into());
    eventually(V4, port, |answer| answer.code == 200 && answer.json()["localEndpoints"] == 2).await;
    eventually(V6, port, |answer| answer.code == 503 && answer.json()["localEndpoints"] == 0).await;
    let check = HealthCheck { port, v4: None, v6: Some(1) };
    node.checks.send_replace([(name("a/b"), check)].into());
    eventually(V6, port, |answer| answer.code == 200).await;
    eventually_refused(V4, port).await;
    assert_eq!(*node.failures.lock().unwrap(), []);
}

#[tokio::test]
async fn taken_port_is_reported_once_and_served_when_freed() {
    let node = Node::start(only(&[V4]));
    let [port, free] = free_ports();
    let taken = TcpListener::bind((V4, port)).unwrap();
    node.set(&[("a/b", port, 1), ("c/d", free, 1)]);
    node.assert("c/d", free, 200, 1, true).await;
    let failure = (
        name("a/b"),
        format!(
            "node a failed to start healthcheck \"a/b\" on port {port}: listen tcp 127.0.0.1:{port}: \
             Address already in use (os error 98)"
        ),
    );
    assert_eq!(*node.failures.lock().unwrap(), [failure]);
    let servers = |text: &str| {
        let metrics = node.metrics.text().unwrap();
        assert!(metrics.contains(text), "{text}: {metrics}");
    };
    servers("lb_health_check_servers_failed 1");
    // Waits until a further attempt has failed for the same reason, which is not reported again.
    time::sleep(FIRST_PAUSE + Duration::from_millis(200)).await;
    assert_eq!(node.failures.lock().unwrap().len(), 1);
    drop(taken);
    node.assert("a/b", port, 200, 1, true).await;
    time::sleep(Duration::from_millis(50)).await;
    servers("lb_health_check_servers 2");
    servers("lb_health_check_servers_failed 0");
}

#[tokio::test]
async fn port_moves_between_services_in_one_update() {
    let node = Node::start(only(&[V4]));
    let [port] = free_ports();
    for service in ["z/z", "a/a", "m/m"] {
        node.set(&[(service, port, 1)]);
        node.assert_owner(service, port).await;
    }
    assert_eq!(*node.failures.lock().unwrap(), []);
    // Two Services have the same port: the second Service waits for the port, and gets it at once when the first
    // Service is deleted.
    node.set(&[("m/m", port, 1), ("b/b", port, 1)]);
    node.assert_owner("m/m", port).await;
    time::sleep(Duration::from_millis(100)).await;
    assert_eq!(node.failures.lock().unwrap()[0].0, name("b/b"));
    let start = Instant::now();
    node.set(&[("b/b", port, 1)]);
    node.assert_owner("b/b", port).await;
    assert!(start.elapsed() < FIRST_PAUSE / 2, "{:?}", start.elapsed());
}

impl Node {
    async fn assert_owner(&self, service: &str, port: u16) {
        let (_, name) = service.split_once('/').unwrap();
        eventually(V4, port, |answer| answer.json()["service"]["name"] == name).await;
    }
}

#[tokio::test]
async fn silent_connection_does_not_delay_the_end_of_a_server() {
    let node = Node::start(only(&[V4]));
    let [port] = free_ports();
    node.set(&[("a/b", port, 1)]);
    node.assert("a/b", port, 200, 1, true).await;
    let mut silent = std::net::TcpStream::connect(address(V4, port)).unwrap();
    std::io::Write::write_all(&mut silent, b"GET /").unwrap();
    node.set(&[("c/d", port, 2)]);
    node.assert_owner("c/d", port).await;
}
