//! Tests of health checks and metrics, with requests like those of load balancers, probes and scrapers.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    process::Output,
    time::Duration,
};

use lb_tests::{
    agent::{Agent, binary, is_healthy},
    client::REFUSED,
    cluster::ClientLink,
    http::{self, Answer},
    manifests::{Endpoint, Exposure, Service, Type},
    server, wait_for,
};

use crate::bed::{Bed, METRICS, WEB};

const PORT: u16 = 32_000;
/// Addresses of node1 on the link to the external client, IPv4 first.
const NODE1: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x198, 0x51, 0x100, 0, 0, 0, 1)),
];
const HEALTHZ: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10_256);
/// How long the agent may take to start, and to listen on a port that has become free: it tries every 5 s.
const AGENT_START: Duration = Duration::from_secs(15);
/// How long a change of the manifests may take until the health check reports it.
const PROMPTLY: Duration = Duration::from_secs(2);

/// The Service `web` as type `LoadBalancer` under `externalTrafficPolicy: Local`, with these endpoints.
fn exposed(bed: &Bed, endpoints: Vec<Endpoint>) -> Service {
    let exposure = Exposure {
        kind: Type::LoadBalancer,
        external_local: true,
        health_check_node_port: Some(PORT),
        ..Exposure::default()
    };
    Service { endpoints, exposure, ..bed.service("web", WEB, &[]) }
}

fn endpoint(bed: &Bed, pod: &str) -> Endpoint {
    bed.cluster.pod(pod).unwrap().endpoint()
}

fn check(bed: &Bed, node: IpAddr, port: u16) -> io::Result<Answer> {
    http::get(&bed.cluster.client, SocketAddr::new(node, port), "/healthz")
}

/// Waits until the `healthCheckNodePort` in both families reports this number of endpoints.
fn assert_reports(bed: &Bed, port: u16, local_endpoints: usize) {
    for node in NODE1 {
        let weight = Some(local_endpoints.to_string());
        let mut last = None;
        let told = wait_for(PROMPTLY, || {
            let answer = check(bed, node, port);
            let right = answer
                .as_ref()
                .is_ok_and(|answer| answer.header("x-load-balancing-endpoint-weight") == weight.as_deref());
            last = Some(answer);
            right.then_some(())
        });
        let answer = last.unwrap();
        assert!(told.is_some(), "{node} {port}: {answer:?} instead of {local_endpoints}");
        let answer = answer.unwrap();
        assert_eq!(answer.code, if local_endpoints > 0 { 200 } else { 503 }, "{answer:?}");
        let body = format!(
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t}},\n\
             \t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": true\n}}"
        );
        assert_eq!(answer.body, body);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    }
}

fn assert_refused(bed: &Bed, port: u16) {
    for node in NODE1 {
        let refused = || check(bed, node, port).is_err_and(|error| error.kind() == REFUSED).then_some(());
        assert!(wait_for(PROMPTLY, refused).is_some(), "{node} {port}: {:?}", check(bed, node, port));
    }
}

#[test]
fn health_check_node_port_reports_the_number_of_ready_local_endpoints() {
    let bed = Bed::with_web(&[]);
    let [pod1, pod2, pod3] = ["pod1", "pod2", "pod3"].map(|pod| endpoint(&bed, pod));
    for (endpoints, count) in [
        (vec![pod1.clone(), pod3.clone()], 1),
        (vec![pod1.clone(), pod2.clone(), pod3.clone()], 2),
        (vec![pod1.clone().unready(), pod2.clone(), pod3.clone()], 1),
        (vec![pod1.clone().unready(), pod2.clone().terminating()], 0),
        (vec![pod1], 1),
        (vec![pod3], 0),
        (vec![pod2], 1),
    ] {
        bed.cluster.manifests.put(&exposed(&bed, endpoints)).unwrap();
        assert_reports(&bed, PORT, count);
    }
}

#[test]
fn health_check_node_port_follows_its_service() {
    let bed = Bed::with_web(&["pod1"]);
    assert_refused(&bed, PORT);
    let mut service = exposed(&bed, vec![endpoint(&bed, "pod1")]);
    let put = |service: &Service| bed.cluster.manifests.put(service).unwrap();
    put(&service);
    assert_reports(&bed, PORT, 1);
    service.exposure.health_check_node_port = Some(PORT + 1);
    put(&service);
    assert_reports(&bed, PORT + 1, 1);
    assert_refused(&bed, PORT);

    // With this change of policy, an API server would also remove the health check port from the Service.
    (service.exposure.external_local, service.exposure.health_check_node_port) = (false, None);
    put(&service);
    assert_refused(&bed, PORT + 1);
    (service.exposure.external_local, service.exposure.health_check_node_port) = (true, Some(PORT));
    put(&service);
    assert_reports(&bed, PORT, 1);
    bed.cluster.manifests.remove("web").unwrap();
    assert_refused(&bed, PORT);
}

#[test]
fn busy_health_check_port_is_logged_once_and_served_when_freed() {
    let bed = Bed::with_web(&["pod1"]);
    let taken = bed.cluster.node1.run(|| TcpListener::bind(("::", PORT))).unwrap();
    bed.cluster.manifests.put(&exposed(&bed, vec![endpoint(&bed, "pod1")])).unwrap();
    let agent = bed.agent.as_ref().unwrap();
    let said = || agent.log().matches("cannot serve the health of a Service").count();
    wait_for(PROMPTLY, || (said() == 2).then_some(())).unwrap_or_else(|| panic!("{}", agent.log()));
    assert!(agent.log().contains("Address already in use"), "{}", agent.log());
    assert_eq!(metric(&bed, "lb_health_check_servers_failed"), 2.0);
    // Waits longer than the pause after the first attempt: the second attempt must log nothing.
    std::thread::sleep(Duration::from_millis(1_500));
    assert_eq!(said(), 2, "once for each family");
    drop(taken);
    let served = || check(&bed, NODE1[0], PORT).is_ok().then_some(());
    wait_for(Duration::from_secs(5), served).unwrap_or_else(|| panic!("{}", agent.log()));
    assert_reports(&bed, PORT, 1);
    assert_eq!(metric(&bed, "lb_health_check_servers_failed"), 0.0);
}

fn page(bed: &Bed, server: SocketAddr, path: &str) -> Answer {
    let answer = http::get(&bed.cluster.node1, server, path).unwrap();
    assert_eq!(answer.code, 200, "{path}: {answer:?}");
    answer
}

fn text(bed: &Bed, server: SocketAddr, path: &str) -> String {
    page(bed, server, path).body
}

/// Runs `lb-agent ready` with these arguments on node1.
fn ready(bed: &Bed, arguments: &[&str]) -> Output {
    let mut command = bed.cluster.node1.command(binary());
    command.arg("ready").args(arguments).arg("--bpffs").arg(bed.cluster.bpffs(1));
    command.output().unwrap()
}

fn assert_not_ready(bed: &Bed, parts: &[&str]) {
    let output = ready(bed, &[]);
    let reason = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b""[..]), "{reason}");
    for part in parts {
        assert!(reason.contains(part), "{part} is missing in: {reason}");
    }
}

#[test]
fn agent_is_not_ready_while_another_process_answers_at_its_health_port() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let foreign = server::http(&bed.cluster.node1, "kube-proxy", HEALTHZ.port()).unwrap();
    let agent = Agent::spawn(&bed.cluster.node1, bed.cluster.agent_settings(1)).unwrap();
    bed.agent = Some(agent);
    let log = |bed: &Bed| bed.agent.as_ref().unwrap().log();
    // The agent is alive before it has created its maps; until then, `status` fails.
    let synchronised = || {
        let alive = ready(&bed, &["--live"]).status.success();
        let status = bed.agent.as_ref().unwrap().json(&["status"]).ok()?;
        (alive && status["agent"]["synchronised"] == true).then_some(())
    };
    wait_for(AGENT_START, synchronised).unwrap_or_else(|| panic!("{}", log(&bed)));

    let address = HEALTHZ.to_string();
    assert!(is_healthy(&bed.cluster.node1).unwrap(), "the other process answers 200");
    assert_not_ready(&bed, &[&address, "another process", "stop it"]);
    let conditions = |bed: &Bed| -> Vec<String> {
        let status = bed.status();
        let conditions = status["conditions"].as_array().unwrap();
        let texts = conditions.iter().map(|condition| condition["text"].as_str().unwrap().to_owned());
        texts.filter(|text| text.contains(&address)).collect()
    };
    assert_eq!(conditions(&bed).len(), 1, "{:#}", bed.status()["conditions"]);
    assert_eq!(metric(&bed, "lb_conditions{about=\"healthz\"}"), 1.0);
    assert_eq!(metric(&bed, "lb_healthy"), 1.0);

    drop(foreign);
    let is_ready = || ready(&bed, &[]).status.success().then_some(());
    wait_for(AGENT_START, is_ready).unwrap_or_else(|| panic!("{}", log(&bed)));
    assert!(text(&bed, HEALTHZ, "/healthz").contains("nodeEligible"), "the agent answers");
    assert_eq!(conditions(&bed), [""; 0]);
    assert_eq!(metric(&bed, "lb_conditions{about=\"healthz\"}"), 0.0);
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    assert_not_ready(&bed, &["no agent", "start it"]);
}

/// Prometheus cannot detect that another process has the port: here kube-proxy answers the requests in place of the
/// agent.
#[test]
fn status_names_a_metrics_port_that_another_process_has() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let foreign = server::http(&bed.cluster.node1, "kube-proxy", METRICS.port()).unwrap();
    bed.start_agent_with(&[]);
    let problems = |bed: &Bed| bed.status()["agent"]["problems"].to_string();
    let named = problems(&bed);
    for part in [METRICS.to_string().as_str(), "another process", "--metrics-bind-address"] {
        assert!(named.contains(part), "{part} is missing in: {named}");
    }
    drop(foreign);
    let listens = || (!problems(&bed).contains("--metrics-bind-address")).then_some(());
    wait_for(AGENT_START, listens).unwrap_or_else(|| panic!("{}", problems(&bed)));
}

/// The value of a metric, given by its name with labels.
fn metric(bed: &Bed, name: &str) -> f64 {
    let page = page(bed, METRICS, "/metrics");
    page.metric(name).unwrap_or_else(|| panic!("{name} is missing in {page:?}"))
}

#[test]
fn healthz_livez_and_metrics_are_served() {
    let bed = Bed::with_web(&["pod1"]);
    for path in ["/healthz", "/livez"] {
        assert!(text(&bed, HEALTHZ, path).contains("lastUpdated"));
    }
    let value = |name: &str| metric(&bed, name);
    assert_eq!(value("kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}"), 1.0);
    assert!(value("kubeproxy_proxy_healthz_total{code=\"200\"}") >= 1.0);
    assert_eq!(value("kubeproxy_sync_proxy_rules_service_changes_pending"), 0.0);
    assert!(value("kubeproxy_sync_proxy_rules_endpoint_changes_total") >= 2.0);
    let updated = value("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"}");
    let queued = value("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv6\"}");
    assert!(0.0 < queued && queued <= updated, "{queued} {updated}");

    let partial = "kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}";
    bed.put("web", WEB, &["pod2"]);
    wait_for(PROMPTLY, || (value(partial) >= 1.0).then_some(())).expect("another synchronisation");
}

#[test]
fn services_without_local_endpoints_are_counted() {
    let bed = Bed::with_web(&[]);
    let no_local = |policy: &str| {
        let labels = format!("ip_family=\"IPv4\",traffic_policy=\"{policy}\"");
        metric(&bed, &format!("kubeproxy_sync_proxy_rules_no_local_endpoints_total{{{labels}}}"))
    };
    let mut service = exposed(&bed, vec![endpoint(&bed, "pod3")]);
    service.exposure.load_balancer_ips = vec![[203, 0, 113, 9].into()];
    service.exposure.internal_local = true;
    let counted = |service: &Service, expected: f64| {
        bed.cluster.manifests.put(service).unwrap();
        let right = || (["internal", "external"].map(no_local) == [expected; 2]).then_some(());
        wait_for(PROMPTLY, right).unwrap_or_else(|| panic!("{:?}", ["internal", "external"].map(no_local)));
    };
    counted(&service, 2.0);
    service.endpoints = vec![endpoint(&bed, "pod1")];
    counted(&service, 0.0);
}
