//! Tests of `kubectl lb`, the plugin that asks the agents of two nodes through the API server's `exec`.

mod explain;

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream, UdpSocket},
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use lb_tests::{
    agent::{ask, binary},
    netns::Netns,
    terminal::Terminal,
    wait_for,
};
use serde_json::{Value, json};

use crate::{
    api_server::{ApiServer, Fault},
    pod_exec::PodExec,
    segment::{Segment, node},
};

/// How long to wait for agents, which first load their programs: that takes seconds on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Two nodes with Pods and agents; the agents have read all objects.
fn with_agents() -> Segment {
    let mut segment = Segment::new(2);
    for number in 1..=2 {
        segment.server.put(linux_node(number));
        segment.server.put(pod(number));
        let (netns, bpffs) = (segment.nodes[number - 1].clone(), segment.bpffs(number));
        segment.server.set_exec(&format!("lb-agent-{number}"), PodExec::Runs { netns, bpffs });
    }
    segment.start_with(|_| Vec::new());
    for number in 1..=2 {
        let is_synchronised = || {
            let status = segment.json(number, &["status"]).ok()?;
            (status["agent"]["synchronised"] == true).then_some(())
        };
        wait_for(SOON, is_synchronised).unwrap_or_else(|| panic!("n{number}\n{}", segment.logs()));
    }
    segment
}

/// Runs the plugin on the client, under the file name by which kubectl finds it.
fn plugin(segment: &Segment, arguments: &[&str]) -> Output {
    plugin_from(&segment.client, &segment.folder, arguments)
}

/// Runs the plugin in a namespace, with the kubeconfig in `folder`.
fn plugin_from(netns: &Netns, folder: &Path, arguments: &[&str]) -> Output {
    let link = folder.join("kubectl-lb");
    if !link.exists() {
        std::os::unix::fs::symlink(binary(), &link).unwrap();
    }
    let mut command = netns.command(link);
    command.arg("--kubeconfig").arg(folder.join("kubeconfig")).args(arguments).output().unwrap()
}

/// The Node object of a node that runs Linux, with the release of its kernel.
fn linux_node(number: usize) -> Value {
    let mut node = node(number, json!({"kubernetes.io/os": "linux"}));
    node["status"]["nodeInfo"] = json!({
        "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "6.1.0-test",
        "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "linux",
        "osImage": "", "systemUUID": "",
    });
    node
}

/// The Pod of the agent on a node, with the labels that the chart sets.
fn pod(number: usize) -> Value {
    let labels =
        json!({"app.kubernetes.io/name": "lb-agent", "app.kubernetes.io/component": "service-proxy"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "kube-system", "name": format!("lb-agent-{number}"), "labels": labels},
        "spec": {"nodeName": format!("n{number}"), "containers": [{"name": "lb-agent"}]},
        "status": {"phase": "Running"},
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The elements of the list that a command has printed as JSON, in order.
fn rows(output: &Output) -> Vec<Value> {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn kubectl_status_shows_all_nodes_and_those_that_do_not_answer_first() {
    let segment = with_agents();
    let output = plugin(&segment, &["status", "-o", "json"]);
    assert!(output.status.success(), "{output:?}");
    let all = rows(&output);
    assert_eq!(all.len(), 2);
    for row in &all {
        assert_eq!((&row["version"], &row["kernel"]), (&json!("0.1.0"), &json!("6.1.0-test")), "{row}");
        assert!(
            row["lastSync"].is_string() && row["conditions"].is_array() && row["error"].is_null(),
            "{row}"
        );
    }

    segment.server.set_exec("lb-agent-2", PodExec::Silent);
    let output = plugin(&segment, &["status", "--timeout", "8"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("NODE") && lines[1].starts_with("n2") && lines[1].ends_with("no answer"),
        "{table}"
    );
    assert!(lines[2].starts_with("n1") && lines[2].contains("0.1.0"), "{table}");
    let error = "error: 1 of 2 nodes have not answered\n  n2: Pod lb-agent-2 has not answered within 8 s";
    assert!(errors.starts_with(error), "{errors}");

    // A command that fails on a node shows its own error.
    let (netns, bpffs) = (segment.nodes[1].clone(), segment.folder.join("nothing"));
    segment.server.set_exec("lb-agent-2", PodExec::Runs { netns, bpffs });
    let errors = text(&plugin(&segment, &["status"]).stderr);
    assert!(errors.contains("n2: `lb-agent status -o json` has failed in Pod lb-agent-2: "), "{errors}");
}

#[test]
fn kubectl_names_missing_rights_and_missing_pods() {
    let segment = Segment::new(2);
    let fails = |arguments: &[&str]| {
        let output = plugin(&segment, arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        (text(&output.stdout), text(&output.stderr))
    };
    let (table, errors) = fails(&["status"]);
    assert!(
        table.is_empty() && errors.contains("no Pod in namespace kube-system has the labels"),
        "{errors}"
    );

    (1..=2).for_each(|number| segment.server.put(linux_node(number)));
    segment.server.put(pod(1));
    segment.server.set_exec("lb-agent-1", PodExec::Forbidden);
    let (table, errors) = fails(&["status"]);
    assert_eq!(table.lines().filter(|line| line.ends_with("no answer")).count(), 2, "{table}");
    assert!(
        errors.contains("n1: you may not run commands in Pod lb-agent-1: a fault 403; ask for a Role"),
        "{errors}"
    );
    assert!(errors.contains("n2: no agent's Pod runs on the node"), "{errors}");

    let fault = Fault { status: Some(403), ..Default::default() };
    segment.server.set_fault("pods", fault);
    let (_, errors) = fails(&["status"]);
    assert!(
        errors.starts_with("error: you may not list Pods in namespace kube-system: a fault 403"),
        "{errors}"
    );
}

#[test]
fn kubectl_service_names_the_node_that_lacks_a_service() {
    let mut segment = with_agents();
    put_shop(&segment.server);
    let served = |segment: &Segment, page: &str| {
        let same = || (text(&plugin(segment, &["service"]).stdout) == page).then_some(());
        wait_for(SOON, same).unwrap_or_else(|| {
            panic!("{:?}\nis not\n{page}\n{}", plugin(segment, &["service"]), segment.logs());
        });
    };
    let table = "\
NAMESPACE  NAME  PORT    FRONTENDS     NODES  BACKENDS  PROBLEM
shop       web   53/UDP  10.96.0.7:53  2/2    1         -
shop       web   80/TCP  10.96.0.7:80  2/2    1         -
";
    served(&segment, table);

    // Without an agent, a node's programs continue to serve the Services that they know.
    drop(segment.agents.pop().unwrap());
    segment.server.put(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": "late"},
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.0.8", "clusterIPs": ["10.96.0.8"],
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
        },
    }));
    let table = "\
NAMESPACE  NAME  PORT    FRONTENDS     NODES  BACKENDS  PROBLEM
shop       late  80/TCP  10.96.0.8:80  1/2    0         missing on n2
shop       web   53/UDP  10.96.0.7:53  2/2    1         -
shop       web   80/TCP  10.96.0.7:80  2/2    1         -
";
    served(&segment, table);
    let table = "\
PORT    NODE  FRONTENDS     BACKENDS
80/TCP  n2    not served    -
80/TCP  n1    10.96.0.8:80  -
";
    assert_eq!(text(&plugin(&segment, &["service", "shop/late"]).stdout), table);
    let ports = rows(&plugin(&segment, &["service", "shop/late", "-o", "json"]));
    assert_eq!((&ports[0]["problem"], &ports[0]["missing"]), (&json!("missing"), &json!(["n2"])));

    let output = plugin(&segment, &["service", "shop/none"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no node serves a Service shop/none"), "{output:?}");
    assert_eq!(plugin(&segment, &["service", "none"]).status.code(), Some(2), "no namespace");

    segment.server.set_exec("lb-agent-2", PodExec::Forbidden);
    let output = plugin(&segment, &["service"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("late  80/TCP  10.96.0.8:80  1/1    0         no backends"));
    assert!(text(&output.stderr).contains("1 of 2 nodes have not answered\n  n2: you may not"), "{output:?}");
}

/// Creates a Service with two ports and one backend on the second node, and a Pod on the first node.
fn put_shop(server: &ApiServer) {
    let metadata = json!({"namespace": "shop", "name": "web"});
    server.put(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"],
            "ports": [
                {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
                {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353},
            ],
        },
    }));
    server.put(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": "web", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": [{"addresses": ["192.0.2.22"], "nodeName": "n2", "conditions": {"ready": true}}],
    }));
    server.put(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": "client"},
        "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": "Running", "podIP": "192.0.2.11", "podIPs": [{"ip": "192.0.2.11"}]},
    }));
}

#[test]
fn kubectl_explain_follows_a_packet_to_the_second_node_and_back() {
    let segment = with_agents();
    put_shop(&segment.server);
    let is_served = || {
        let output = ask(&segment.nodes[0], &segment.bpffs(1), &["service", "list", "-o", "json"]).ok()?;
        text(&output.stdout).contains("\"192.0.2.22\"").then_some(())
    };
    wait_for(SOON, is_served).unwrap_or_else(|| panic!("{}", segment.logs()));

    let output = plugin(&segment, &["explain", "pod/shop/client", "svc/shop/web:http"]);
    let page = text(&output.stdout);
    assert!(output.status.success(), "{page}{output:?}");
    assert!(
        page.starts_with("Node n1: from the Pod to the Service\nTCP 192.0.2.11 -> 10.96.0.7:80, at "),
        "{page}"
    );
    assert!(page.contains("\n  => sent to 192.0.2.22:8080"), "{page}");
    assert!(
        page.contains("\nNode n2: arrives at the backend's node\nTCP 192.0.2.11 -> 192.0.2.22:8080, at "),
        "{page}"
    );
    assert!(
        page.contains("\nBackend 192.0.2.22:8080 is on node n2. --client-port PORT shows the way back"),
        "{page}"
    );

    let typed = ["explain", "pod/shop/client", "svc/shop/web:53", "--client-port", "4000", "-o", "json"];
    let output = plugin(&segment, &typed);
    let parts = rows(&output);
    let nodes: Vec<_> = parts.iter().map(|part| part["node"].as_str().unwrap()).collect();
    assert_eq!(nodes, ["n1", "n2", "n2", "n1"], "there and back: {output:?}");
    assert_eq!(
        (&parts[0]["page"]["protocol"], &parts[0]["page"]["verdict"]),
        (&json!("UDP"), &json!("begins"))
    );
    assert_eq!((&parts[3]["from"], &parts[3]["to"]), (&json!("192.0.2.22:5353"), &json!("192.0.2.11:4000")));

    explain_says_which_node_it_waits_for(&segment);
    segment.server.set_exec("lb-agent-2", PodExec::Forbidden);
    let output = plugin(&segment, &typed);
    assert_eq!((output.status.code(), rows(&output).len()), (Some(1), 1), "the first node has answered");
    let errors = text(&output.stderr);
    assert!(errors.contains("node n2, arrives at the backend's node: you may not run commands"), "{errors}");

    let errors = text(&plugin(&segment, &["explain", "pod/shop/client", "svc/shop/web"]).stderr);
    assert!(errors.contains("name a port of the Service: 80 (http), 53 (dns)"), "{errors}");
    let errors = text(&plugin(&segment, &["explain", "pod/shop/none", "svc/shop/web:80"]).stderr);
    assert!(errors.contains("cannot read Pod shop/none"), "{errors}");

    segment.server.set_fault("endpointslices", Fault { held: true, ..Default::default() });
    let hurried = ["--timeout", "10", "explain", "pod/shop/client", "svc/shop/web:http"];
    let errors = text(&plugin(&segment, &hurried).stderr);
    assert!(
        errors.contains("EndpointSlices of Service shop/web: the API server has not answered within 10 s"),
        "{errors}"
    );
}

/// Only on a terminal, `explain` prints a line with the node that it waits for, and removes that line before it prints
/// the result.
fn explain_says_which_node_it_waits_for(segment: &Segment) {
    segment.server.set_exec("lb-agent-2", PodExec::Silent);
    let typed = ["--timeout", "5", "explain", "pod/shop/client", "svc/shop/web:http"];
    let errors = text(&plugin(segment, &typed).stderr);
    assert!(errors.contains("Pod lb-agent-2 has not answered within 5 s"), "{errors}");
    assert!(!errors.contains("asking node"), "not on a terminal: {errors}");

    let (link, kubeconfig) = (segment.folder.join("kubectl-lb"), segment.folder.join("kubeconfig"));
    let command = format!("{} --kubeconfig {} {}", link.display(), kubeconfig.display(), typed.join(" "));
    let command = format!("{command}; echo ended; sleep 60");
    let terminal = Terminal::start(&segment.client, &segment.folder, (100, 40), &command).unwrap();
    let shows = |part: &str| {
        let screen = || terminal.screen().ok().filter(|screen| screen.contains(part));
        wait_for(SOON, screen).unwrap_or_else(|| panic!("no {part}: {:?}", terminal.screen()))
    };
    shows("asking node n2: arrives at the backend's node (");
    let end = shows("ended");
    assert!(end.contains("node n2, arrives at the backend's node: Pod lb-agent-2 has not answered"), "{end}");
    assert!(!end.contains("asking node") && !end.contains("looking for"), "{end}");
}

#[test]
fn kubectl_bugreport_has_an_archive_of_each_node_that_answers() {
    let segment = with_agents();
    let archive = segment.folder.join("all.tar");
    let report = |archive: &Path| plugin(&segment, &["bugreport", "--output", archive.to_str().unwrap()]);
    let output = report(&archive);
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    assert!(said.starts_with("Wrote the reports of 2 of 2 nodes to "), "{said}");
    let listed = |arguments: &[&str], archive: &Path| {
        text(&Command::new("tar").args(arguments).arg(archive).output().unwrap().stdout)
    };
    let names = listed(&["-tf"], &archive);
    assert!(
        names.contains("/n1.tar.gz\n") && names.contains("/n2.tar.gz\n") && names.contains("/nodes.txt\n"),
        "{names}"
    );
    let folder = segment.folder.join("all");
    std::fs::create_dir(&folder).unwrap();
    let unpack = ["--strip-components=1", "-C", folder.to_str().unwrap(), "-xf"];
    listed(&unpack, &archive);
    let of_node = listed(&["-tzf"], &folder.join("n1.tar.gz"));
    assert!(of_node.contains("/status.json\n") && of_node.contains("/services.json\n"), "{of_node}");

    let output = report(&archive);
    assert_eq!(output.status.code(), Some(1), "an archive is never replaced: {output:?}");
    segment.server.set_exec("lb-agent-2", PodExec::Forbidden);
    let partial = segment.folder.join("partial.tar");
    let output = report(&partial);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("1 of 2 nodes have not answered\n  n2: you may not"), "{output:?}");
    listed(&unpack, &partial);
    let nodes = std::fs::read_to_string(folder.join("nodes.txt")).unwrap();
    assert!(
        nodes.contains("\nn1: kernel 6.1.0-test: collected\nn2: kernel 6.1.0-test: you may not"),
        "{nodes}"
    );
}

#[test]
fn kubectl_top_sums_the_traffic_of_the_nodes() {
    let segment = with_agents();
    put_shop(&segment.server);
    let rows_of = |arguments: &[&str]| rows(&plugin(&segment, arguments));
    let served = || (rows_of(&["top", "-o", "json", "--interval", "1"]).len() == 2).then_some(());
    wait_for(SOON, served).unwrap_or_else(|| panic!("{}", segment.logs()));
    let all = rows_of(&["top", "-o", "json", "--interval", "1"]);
    let names: Vec<_> = all.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["shop/web:dns/UDP", "shop/web:http/TCP"]);
    assert!(all.iter().all(|row| row["bytes"] == 0.0 && row["activeFlows"] == 0), "{all:?}");
    let (stop, stopped) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let segment = &segment;
        scope.spawn(move || {
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                send_through_both(segment);
            }
        });
        // Measures the traffic of a second. Both nodes must have new flows: the datagrams go through them in turn.
        let moves = || {
            let all = rows_of(&["top", "-o", "json", "--interval", "1"]);
            let [dns, http] = &all[..] else { panic!("{all:?}") };
            let of_node = |number: usize| {
                let arguments = ["top", "-o", "json", "--interval", "1"];
                let output = ask(&segment.nodes[number - 1], &segment.bpffs(number), &arguments).unwrap();
                let found = rows(&output).into_iter().find(|row| row["name"] == "shop/web:dns/UDP").unwrap();
                found["newFlows"].as_f64().unwrap() > 0.0
            };
            let is_dns = dns["name"] == "shop/web:dns/UDP" && http["bytes"] == 0.0;
            let node = dns["busiestNode"].as_str()?;
            let is_moving = dns["newFlows"].as_f64()? > 0.0 && dns["bytes"].as_f64()? > 0.0;
            (is_dns && is_moving && ["n1", "n2"].contains(&node) && of_node(1) && of_node(2)).then_some(())
        };
        let found = wait_for(SOON, moves);
        drop(stop);
        found.unwrap_or_else(|| panic!("{}", segment.logs()));
    });
    segment.server.set_exec("lb-agent-2", PodExec::Silent);
    let output = plugin(&segment, &["top", "--timeout", "8", "--interval", "1"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stdout).starts_with("SERVICE "), "{output:?}");
    assert!(text(&output.stderr).contains("n2: Pod lb-agent-2 has not answered within 9 s"), "{output:?}");
}

/// Sends a datagram to the Service `shop/web` through each node. Each datagram has another source port and so begins a
/// flow. The backend does not answer.
fn send_through_both(segment: &Segment) {
    for node in ["192.0.2.1", "192.0.2.2"] {
        segment.client.ip(&format!("route replace 10.96.0.0/16 via {node}")).unwrap();
        let send = || UdpSocket::bind("0.0.0.0:0")?.send_to(b"?", "10.96.0.7:53");
        segment.client.run(send).unwrap();
    }
}

/// A running `kubectl lb monitor`, and the lines that it prints.
struct Monitor {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Monitor {
    fn start(segment: &Segment) -> Self {
        // The first run of the plugin creates the symbolic link `kubectl-lb`.
        plugin(segment, &["status"]);
        let mut command = segment.client.command(segment.folder.join("kubectl-lb"));
        command.arg("--kubeconfig").arg(segment.folder.join("kubeconfig")).args(["monitor", "-o", "json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let printed = BufReader::new(child.stdout.take().unwrap()).lines();
        let (found, lines) = mpsc::channel();
        // The thread ends with the output of the child, or when `lines` is dropped.
        thread::spawn(move || printed.map_while(Result::ok).try_for_each(|line| found.send(line)));
        Self { child, lines }
    }

    /// The nodes of the events so far.
    fn nodes(&self) -> impl Iterator<Item = String> {
        self.lines.try_iter().map(|line| {
            let event: Value = serde_json::from_str(&line).unwrap();
            event["node"].as_str().unwrap().to_owned()
        })
    }

    fn end(mut self) -> Output {
        self.child.kill().unwrap();
        self.child.wait_with_output().unwrap()
    }
}

#[test]
fn kubectl_monitor_merges_the_events_of_two_nodes() {
    let segment = with_agents();
    put_shop(&segment.server);
    let monitor = Monitor::start(&segment);
    let mut nodes = BTreeSet::new();
    let both = wait_for(SOON, || {
        send_through_both(&segment);
        nodes.extend(monitor.nodes());
        (nodes.len() == 2).then_some(())
    });
    let output = monitor.end();
    assert!(both.is_some(), "{nodes:?}: {output:?}\n{}", segment.logs());
}

#[test]
fn kubectl_monitor_prefixes_events_with_their_node() {
    let segment = with_agents();
    put_shop(&segment.server);
    segment.server.set_exec("lb-agent-2", PodExec::Forbidden);
    let monitor = Monitor::start(&segment);
    segment.client.ip("route add 10.96.0.0/16 via 192.0.2.1").unwrap();
    // The backend does not answer, so each attempt is a new flow.
    let vip: SocketAddr = "10.96.0.7:80".parse().unwrap();
    let node = wait_for(SOON, || {
        let _late = segment.client.run(|| TcpStream::connect_timeout(&vip, Duration::from_millis(100)));
        monitor.nodes().next()
    });
    let output = monitor.end();
    let node = node.unwrap_or_else(|| panic!("{output:?}\n{}", segment.logs()));
    assert_eq!(node, "n1");
    let errors = text(&output.stderr);
    assert!(errors.starts_with("n2: no more events: you may not run commands in Pod lb-agent-2"), "{errors}");
}
