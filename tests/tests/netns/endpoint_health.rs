//! Health checks of endpoints (`lb.dev/health-check`) with real servers.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv6Addr, TcpListener},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
    thread,
    time::Duration,
};

use lb_tests::{
    cleanup::agent_file,
    client::{Connection, PATIENCE, REFUSED, ask_http},
    cluster::ClientLink,
    http as http_client,
    manifests::{Exposure, Service, Type},
    netns::Netns,
    patience, wait_for, within,
};
use serde_json::Value;

use crate::bed::{Bed, METRICS, WEB, http};

/// The backends of `web` in tests of its health check.
pub(crate) const PODS: [&str; 2] = ["pod2", "pod3"];
/// Port of the servers that report whether a pod is healthy.
pub(crate) const HEALTH: u16 = 9000;

/// The different requests to a [`recording_health_server`]: the client's address and the first line of each.
type Requests = Arc<Mutex<BTreeSet<(IpAddr, String)>>>;

/// Starts a server that answers every request with the status in the returned variable, which the test can change.
pub(crate) fn health_server(netns: &Netns) -> Arc<AtomicU16> {
    recording_health_server(netns).0
}

/// Like [`health_server`]; also returns the requests, to which the server adds each one before it answers.
fn recording_health_server(netns: &Netns) -> (Arc<AtomicU16>, Requests) {
    let listener = netns.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, HEALTH))).unwrap();
    let (status, requests) = (Arc::new(AtomicU16::new(200)), Requests::default());
    let (told, recorded) = (Arc::clone(&status), Arc::clone(&requests));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            let Ok(client) = stream.peer_addr() else { continue };
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let mut head = lines.take_while(|line| !line.is_empty());
            let request = head.next().unwrap_or_default();
            head.for_each(drop);
            recorded.lock().unwrap().insert((client.ip().to_canonical(), request));
            let status = told.load(Ordering::Relaxed);
            // Ignores errors: the prober may have closed its socket.
            let _gone =
                write!(&stream, "HTTP/1.1 {status} x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    (status, requests)
}

/// The Service `web` with a health check and further annotations. Probes of an endpoint begin about every 300 ms.
pub(crate) fn checked(bed: &Bed, check: &str, more: &[(&'static str, &str)]) -> Service {
    let timing = [("lb.dev/health-check-interval", "300ms"), ("lb.dev/health-check-timeout", "250ms")];
    let all = [("lb.dev/health-check", check)].into_iter().chain(timing).chain(more.iter().copied());
    let annotations = all.map(|(name, value)| (name, value.to_owned())).collect();
    Service { annotations, ..bed.service("web", WEB, &PODS) }
}

/// Names of the pods that answer new connections to both cluster IPs.
fn servers(bed: &Bed) -> BTreeSet<String> {
    let ask = |vip| Some(ask_http(&bed.cluster.client, http(vip)).ok()?.server);
    WEB.into_iter().cycle().take(40).filter_map(ask).collect()
}

#[track_caller]
fn wait_for_servers(bed: &Bed, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|name| (*name).to_owned()).collect();
    let right = || (servers(bed) == expected).then_some(());
    wait_for(PATIENCE * patience(), right)
        .unwrap_or_else(|| panic!("{:?}, not {expected:?}:\n{}", servers(bed), show(bed, "wide")));
}

fn show(bed: &Bed, output: &str) -> String {
    let agent = bed.agent.as_ref().unwrap();
    String::from_utf8(agent.ask(&["service", "show", "web", "-o", output]).unwrap().stdout).unwrap()
}

/// The health check of `web` in the output of `service show -o json`.
fn report(bed: &Bed) -> Value {
    serde_json::from_str::<Value>(&show(bed, "json")).unwrap()[0]["healthCheck"].clone()
}

#[track_caller]
fn wait_for_report(bed: &Bed, right: impl Fn(&Value) -> bool) -> Value {
    let found = wait_for(PATIENCE * patience(), || Some(report(bed)).filter(&right));
    found.unwrap_or_else(|| panic!("{}", report(bed)))
}

#[test]
fn endpoint_that_stops_accepting_gets_no_new_connections_until_it_accepts_again() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.cluster.manifests.put(&checked(&bed, "tcp", &[])).unwrap();
    bed.start_agent();
    wait_for_servers(&bed, &PODS);
    bed.cluster.pods.iter_mut().find(|pod| pod.name == "pod2").unwrap().stop_serving();
    wait_for_report(&bed, |report| report["unhealthy"] == 2);
    for vip in WEB {
        for _ in 0..20 {
            assert_eq!(ask_http(&bed.cluster.client, http(vip)).unwrap().server, "pod3");
        }
    }
    assert!(show(&bed, "table").contains("connection refused"), "{}", show(&bed, "table"));
    bed.cluster.pods.iter_mut().find(|pod| pod.name == "pod2").unwrap().serve().unwrap();
    wait_for_servers(&bed, &PODS);
}

#[test]
fn endpoint_that_answers_500_keeps_its_connections_and_gets_no_new_ones() {
    let bed = Bed::with_web(&PODS);
    let status = health_server(bed.netns("pod2"));
    let _healthy = health_server(bed.netns("pod3"));
    // It takes five failures to make an endpoint unhealthy, so a stall of the machine does not make pod3 unhealthy.
    let threshold = [("lb.dev/health-check-unhealthy-threshold", "5")];
    let check = format!("http://:{HEALTH}/healthz");
    bed.cluster.manifests.put(&checked(&bed, &check, &threshold)).unwrap();
    wait_for_report(&bed, |report| report["healthy"] == 4);
    let to_pod2 = |vip| {
        let mut connection = Connection::open(&bed.cluster.client, http(vip)).ok()?;
        (connection.ask().ok()?.server == "pod2").then_some(connection)
    };
    let mut connections = WEB.map(|vip| wait_for(PATIENCE, || to_pod2(vip)).unwrap());
    status.store(500, Ordering::Relaxed);
    wait_for_servers(&bed, &["pod3"]);
    for connection in &mut connections {
        assert_eq!(connection.ask().unwrap().server, "pod2");
    }
    // If the machine stalls, a probe may come late and fail for another reason. The report shows that reason until the
    // next probe of the same endpoint.
    let fails_by_status = |one: &Value| one["reason"] == "status 500";
    wait_for_report(&bed, |report| {
        let mut failing = report["failing"].as_array().into_iter().flatten();
        report["healthy"] == 2 && report["unhealthy"] == 2 && failing.all(fails_by_status)
    });
    let text = show(&bed, "table");
    assert!(text.contains("every 300ms: 2 healthy, 2 unhealthy") && text.contains("status 500"), "{text}");
    let metrics = http_client::get(&bed.cluster.node1, METRICS, "/metrics").unwrap().body;
    assert!(metrics.contains("lb_probed_endpoints{health=\"unhealthy\"} 2"), "{metrics}");
    assert!(metrics.contains("lb_probes_total{result=\"status\"}"), "{metrics}");
    let log = bed.agent.as_ref().unwrap().log();
    assert!(log.contains("is unhealthy for node"), "{log}");
    status.store(302, Ordering::Relaxed);
    wait_for_servers(&bed, &PODS);
}

/// The annotations of AWS for `http://:9000/healthz`, where 9000 is [`HEALTH`], with the shortest times and the lowest
/// thresholds of AWS.
const AWS: [(&str, &str); 7] = [
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol", "http"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-port", "9000"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-path", "/healthz"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval", "5"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout", "2"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold", "2"),
    ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold", "2"),
];

#[test]
fn annotations_of_aws_alone_find_an_endpoint_that_answers_500() {
    let bed = Bed::with_web(&PODS);
    let (status, requests) = recording_health_server(bed.netns("pod2"));
    let _healthy = health_server(bed.netns("pod3"));
    let annotations = AWS.map(|(name, value)| (name, value.to_owned())).into();
    // These annotations apply to this type only.
    let exposure = Exposure { kind: Type::LoadBalancer, ..Exposure::default() };
    let service = Service { annotations, exposure, ..bed.service("web", WEB, &PODS) };
    bed.cluster.manifests.put(&service).unwrap();
    let before = wait_for_report(&bed, |report| report["healthy"] == 4);
    assert_eq!(before["check"], "http://:9000/healthz");
    status.store(500, Ordering::Relaxed);
    // The first failure comes up to 5.5 s later, the second one 2 s after it.
    let fails_by_status = |report: &Value| {
        let mut failing = report["failing"].as_array().into_iter().flatten();
        report["healthy"] == 2 && report["unhealthy"] == 2 && failing.all(|one| one["reason"] == "status 500")
    };
    wait_for(Duration::from_secs(30), || Some(report(&bed)).filter(fails_by_status))
        .unwrap_or_else(|| panic!("{}", report(&bed)));
    wait_for_servers(&bed, &["pod3"]);
    for (_, request) in &*requests.lock().unwrap() {
        assert_eq!(request, "GET /healthz HTTP/1.1");
    }
    let problems = bed.status()["agent"]["problems"].to_string();
    assert!(!problems.contains("healthcheck"), "{problems}");
}

#[test]
fn probe_comes_from_the_nodes_own_address() {
    let bed = Bed::with_web(&PODS);
    let (_status, of_pod2) = recording_health_server(bed.netns("pod2"));
    let (_status, of_pod3) = recording_health_server(bed.netns("pod3"));
    let check = format!("http://:{HEALTH}/healthz");
    bed.cluster.manifests.put(&checked(&bed, &check, &[])).unwrap();
    wait_for_report(&bed, |report| report["healthy"] == 4);
    // node1 probes. It reaches pod2 by the device with the gateway's addresses, and pod3 by the link to node2.
    for (requests, node1) in
        [(of_pod2, ["10.244.1.1", "fd00:10:244:1::1"]), (of_pod3, ["172.18.0.1", "fd00:172:18::1"])]
    {
        let sources: BTreeSet<IpAddr> = requests.lock().unwrap().iter().map(|(source, _)| *source).collect();
        assert_eq!(sources, BTreeSet::from(node1.map(|address| address.parse::<IpAddr>().unwrap())));
    }
}

#[test]
fn all_unhealthy_endpoints_are_used_unless_the_service_fails_closed() {
    let bed = Bed::with_web(&PODS);
    // No server listens on this port, so all endpoints are unhealthy.
    let check = format!("tcp://:{HEALTH}");
    bed.cluster.manifests.put(&checked(&bed, &check, &[])).unwrap();
    wait_for_report(&bed, |report| report["unhealthy"] == 4);
    wait_for_servers(&bed, &PODS);
    bed.cluster.manifests.put(&checked(&bed, &check, &[("lb.dev/fail-closed", "true")])).unwrap();
    for vip in WEB {
        let refused = || ask_http(&bed.cluster.client, http(vip)).is_err_and(|error| error.kind() == REFUSED);
        wait_for(PATIENCE, || refused().then_some(())).unwrap_or_else(|| panic!("{vip} answers"));
    }
}

/// Whether the file of unhealthy targets, which the next agent reads, contains both addresses of pod2.
fn is_recorded(bed: &Bed) -> bool {
    let path = agent_file(&bed.cluster.bpffs(1), ".unhealthy");
    let addresses = bed.cluster.pod("pod2").unwrap().addresses;
    let has_all = |text: String| addresses.iter().all(|address| text.contains(&format!("\"{address}\"")));
    fs::read_to_string(path).is_ok_and(has_all)
}

#[test]
fn restarted_agent_sends_nothing_to_an_unhealthy_endpoint() {
    let mut bed = Bed::with_web(&PODS);
    let status = health_server(bed.netns("pod2"));
    let _healthy = health_server(bed.netns("pod3"));
    let check = format!("http://:{HEALTH}/");
    bed.cluster.manifests.put(&checked(&bed, &check, &[])).unwrap();
    wait_for_report(&bed, |report| report["healthy"] == 4);
    status.store(500, Ordering::Relaxed);
    // Probes begin every 300 ms, so 100 good results take about 30 s, longer than the test runs. It takes ten failures
    // to make an endpoint unhealthy, so a stall of the machine does not make pod3 unhealthy.
    let slow =
        [("lb.dev/health-check-healthy-threshold", "100"), ("lb.dev/health-check-unhealthy-threshold", "10")];
    bed.cluster.manifests.put(&checked(&bed, &check, &slow)).unwrap();
    wait_for_servers(&bed, &["pod3"]);
    let before = wait_for_report(&bed, |report| report["unhealthy"] == 2);
    wait_for(PATIENCE, || is_recorded(&bed).then_some(())).expect("the agent writes the unhealthy targets");
    bed.agent.take().unwrap().kill().unwrap();
    // pod2 would be healthy at once if the next agent did not read the file, or if it did not recognise the targets
    // because their timing has changed. The file does not list pod3, so a single late answer to the new agent would
    // make pod3 unhealthy. The timeout of probes is therefore long now.
    status.store(200, Ordering::Relaxed);
    let slower = [
        ("lb.dev/health-check", &*check),
        ("lb.dev/health-check-interval", "4s"),
        ("lb.dev/health-check-timeout", "3500ms"),
        ("lb.dev/health-check-healthy-threshold", "99"),
    ];
    let annotations = slower.map(|(name, value)| (name, value.to_owned())).into();
    bed.cluster.manifests.put(&Service { annotations, ..bed.service("web", WEB, &PODS) }).unwrap();
    bed.start_agent();
    for _ in 0..3 {
        assert_eq!(servers(&bed), ["pod3".to_owned()].into());
    }
    let is_known = |report: &Value| report["unhealthy"] == 2 && report["healthy"] == 2;
    let after = wait_for(Duration::from_secs(30), || Some(report(&bed)).filter(is_known))
        .unwrap_or_else(|| panic!("{}", report(&bed)));
    let since = |report: &Value| report["failing"][0]["since"].clone();
    assert_eq!(since(&after), since(&before));
}

/// The next probe would begin after half a minute at the earliest; a client's unanswered SYNs cause an earlier probe.
#[test]
fn unanswered_connections_bring_a_probe_forward() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let timing = [
        ("lb.dev/health-check", "tcp"),
        ("lb.dev/health-check-interval", "60s"),
        ("lb.dev/health-check-timeout", "2s"),
        ("lb.dev/health-check-unhealthy-threshold", "2"),
    ];
    let annotations = timing.map(|(name, value)| (name, value.to_owned())).into();
    bed.cluster.manifests.put(&Service { annotations, ..bed.service("web", WEB, &PODS) }).unwrap();
    bed.start_agent_with(&["--syn-retries", "1"]);
    wait_for_report(&bed, |report| report["healthy"] == 4);
    bed.silence("pod2");
    let client = bed.cluster.client.clone();
    // Some of these connections go to pod2 first, which does not answer.
    let clients: Vec<_> = (0..32)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || Connection::open(&client, http(WEB[0])).and_then(|mut it| it.ask()))
        })
        .collect();
    let unhealthy = || Some(report(&bed)).filter(|report| report["unhealthy"] == 1);
    let found = within(Duration::from_secs(20), unhealthy).unwrap_or_else(|| panic!("{}", report(&bed)));
    assert!(found["failing"].to_string().contains("no answer"), "{found}");
    for client in clients {
        assert_eq!(client.join().unwrap().unwrap().server, "pod3");
    }
}

#[test]
fn annotation_without_effect_is_listed_by_status() {
    let bed = Bed::with_web(&PODS);
    let cloud = "service.beta.kubernetes.io/aws-load-balancer-ssl-cert";
    let service = checked(&bed, "icmp", &[(cloud, "arn:aws")]);
    bed.cluster.manifests.put(&service).unwrap();
    let problems = || bed.status()["agent"]["problems"].to_string();
    let listed = || (problems().contains(cloud) && problems().contains("lb.dev/health-check")).then_some(());
    wait_for(PATIENCE, listed).unwrap_or_else(|| panic!("{}", problems()));
    assert!(problems().contains("TLS is not terminated here"), "{}", problems());
    wait_for_servers(&bed, &PODS);
    assert_eq!(report(&bed), Value::Null, "an invalid check probes nothing");
}
