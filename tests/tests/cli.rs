//! The command line that users and scripts depend on: exit codes, output streams, formats.
//!
//! Needs root and `target/debug/lb-agent`, and fails without them.
#![expect(clippy::unwrap_used, reason = "a test panics when the testbed fails")]

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use clap::CommandFactory as _;
use lb_agent::cli::Cli;
use lb_common::{
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags, seen},
    protocol,
};
use lb_datapath::{Capacities, Conntrack, Datapath, Options, Pinned};
use lb_tests::{
    agent::{Agent, Settings, binary},
    cleanup::{Cleanup, Resource},
    netns::{Netns, unique_prefix},
    server, wait_for,
};
use serde_json::Value;

/// Time limit of an agent or command; only one that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(120);

/// Manifest of a Service `web` with two ports and two endpoints, of which one has a Pod as its target.
const WEB: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  sessionAffinity: ClientIP
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: dns, port: 53, targetPort: 5353, protocol: UDP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, port: 5353, protocol: UDP}]
endpoints:
- {addresses: [198.51.100.1], nodeName: a, zone: z1, targetRef: {kind: Pod, name: web-0}}
- {addresses: [198.51.100.2]}
";

/// A network namespace with a veth device, and a folder for manifests, BPF file system and log.
struct Bed {
    netns: Netns,
    folder: PathBuf,
    _cleanup: Cleanup,
}

impl Bed {
    fn new() -> Self {
        let name = format!("{}cli", unique_prefix());
        let folder = std::env::temp_dir().join(&name);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(folder.join("manifests")).unwrap();
        let netns = Netns::create(&name).unwrap();
        netns.sysctls(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")]).unwrap();
        netns.ip("link add wire0 type veth peer name wire1\nlink set wire0 up\naddress add 192.0.2.1/24 dev wire0").unwrap();
        Self { netns, folder, _cleanup: cleanup }
    }

    fn with_web() -> (Self, Agent) {
        let bed = Self::new();
        fs::write(bed.manifests().join("web.yaml"), WEB).unwrap();
        let agent = Agent::start(&bed.netns, bed.settings("bpf", &[])).unwrap();
        (bed, agent)
    }

    fn manifests(&self) -> PathBuf {
        self.folder.join("manifests")
    }

    fn bpffs(&self) -> PathBuf {
        self.folder.join("bpf")
    }

    fn settings(&self, bpffs: &str, arguments: &[&str]) -> Settings {
        Settings {
            cgroup: None,
            node_name: "a".to_owned(),
            manifests: self.manifests(),
            bpffs: self.folder.join(bpffs),
            log: self.folder.join(format!("{bpffs}.log")),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
            binary: None,
        }
    }

    /// Runs a command with `--bpffs` of the agent under test.
    fn ask(&self, arguments: &[&str]) -> Output {
        self.netns.command(binary()).args(arguments).arg("--bpffs").arg(self.bpffs()).output().unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.ask(&[arguments, &["-o", "json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Adds both flow table entries of an established connection.
    fn add_flow(&self, client_port: u16) {
        self.add_flow_that(client_port, 0, Conntrack::now());
    }

    /// Adds a connection whose client has also sent packets with the [`seen`] flags `has_sent`, the last one at
    /// `last_seen`.
    fn add_flow_that(&self, client_port: u16, has_sent: u8, last_seen: Tick) {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap().into();
        let from = Tuple::new(ip("192.0.2.9"), ip("10.96.0.10"), client_port, 80, protocol::TCP);
        let to = Tuple::new(ip("192.0.2.9"), ip("198.51.100.1"), client_port, 8080, protocol::TCP);
        let service = self.json(&["service", "show", "web"])[1]["id"].as_u64().unwrap();
        let service = u32::try_from(service).unwrap();
        let mut forward = Flow::new(&from, &to, service, 0, last_seen);
        let mut reply = Flow::new(&to.reversed(), &from.reversed(), service, flow_flags::REPLY, last_seen);
        (forward.seen, reply.seen) =
            (seen::PACKET | seen::SYN | seen::ACK, seen::PACKET | seen::SYN | seen::ACK);
        forward.seen |= has_sent;
        let pinned = Pinned::open(&self.bpffs()).unwrap();
        let table = pinned.conntrack().table();
        assert!(table.insert_new(&from, &forward).unwrap());
        assert!(table.insert_new(&to.reversed(), &reply).unwrap());
    }
}

fn lb_agent(arguments: &[&str]) -> Output {
    Command::new(binary()).args(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts the exit code, that standard error contains each of `parts`, and that standard output is empty.
fn assert_fails(arguments: &[&str], code: i32, parts: &[&str]) {
    let output = lb_agent(arguments);
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert_eq!(output.stdout, b"", "{arguments:?}");
    for part in parts {
        assert!(error.contains(part), "{arguments:?}: {part:?} is missing in: {error}");
    }
}

fn write(path: &Path, text: &str) -> String {
    fs::write(path, text).unwrap();
    path.display().to_string()
}

#[test]
fn bad_usage_exits_with_2() {
    assert_fails(&[], 2, &["Usage"]);
    assert_fails(&["fly"], 2, &["fly"]);
    assert_fails(&["run", "--fly"], 2, &["--fly"]);
    assert_fails(&["service", "show"], 2, &["<NAME>"]);
    assert_fails(&["service", "list", "-o", "xml"], 2, &["xml", "json"]);
}

#[test]
fn bad_configuration_exits_with_2_and_advice() {
    let bed = Bed::new();
    let manifests = bed.manifests().display().to_string();
    assert_fails(&["run"], 2, &["--manifests DIR", "--kubeconfig FILE"]);
    let two = ["run", "--manifests", &manifests, "--kubeconfig", "/nowhere"];
    assert_fails(&two, 2, &["--manifests", "--kubeconfig", "one of them"]);
    assert_fails(&["run", "--kubeconfig", "/nowhere"], 2, &["--kubeconfig", "/nowhere", "No such file"]);
    assert_fails(&["run", "--manifests", "/nowhere"], 2, &["--manifests", "/nowhere", "No such file"]);
    let range = ["run", "--manifests", &manifests, "--service-cluster-ip-range", "10.96.0.0/40"];
    assert_fails(&range, 2, &["--service-cluster-ip-range", "10.96.0.0/40", "10.96.0.0/12"]);
    let healthz = ["run", "--manifests", &manifests, "--healthz-bind-address", "everywhere"];
    assert_fails(&healthz, 2, &["--healthz-bind-address", "everywhere", "0.0.0.0:10256"]);
    let cgroup = ["run", "--manifests", &manifests, "--cgroup", "/tmp"];
    assert_fails(&cgroup, 2, &["--cgroup", "/tmp", "cgroup2"]);
}

#[test]
fn bad_configuration_file_exits_with_2_and_is_named() {
    let bed = Bed::new();
    let file = write(&bed.folder.join("a.yaml"), "manifests: /tmp\nnode-nmae: b\n");
    for command in [&["run"][..], &["status"], &["service", "list"], &["cleanup"]] {
        assert_fails(&[command, &["--config", &file]].concat(), 2, &[&file, "node-nmae"]);
    }
    assert_fails(&["status", "--config", "/nowhere"], 2, &["/nowhere", "--config"]);
}

#[test]
fn flag_overrides_environment_overrides_file_overrides_default() {
    let bed = Bed::new();
    let file = write(&bed.folder.join("a.yaml"), "bpffs: /from/file\n");
    let refusal = |environment: Option<&str>, arguments: &[&str]| {
        let mut command = Command::new(binary());
        command.args(["service", "list"]).args(arguments).env_remove("LB_AGENT_BPFFS");
        command.envs(environment.map(|value| ("LB_AGENT_BPFFS", value)));
        stderr(&command.output().unwrap())
    };
    let with_file = ["--config", &file];
    assert!(refusal(None, &with_file).contains("/from/file"));
    assert!(refusal(Some("/from/environment"), &with_file).contains("/from/environment"));
    let with_flag = ["--config", &file, "--bpffs", "/from/flag"];
    assert!(refusal(Some("/from/environment"), &with_flag).contains("/from/flag"));
}

#[test]
fn commands_without_a_data_plane_exit_with_1() {
    let bed = Bed::new();
    for command in
        [&["service", "list"][..], &["service", "show", "web"], &["conntrack", "list"], &["status"]]
    {
        let output = bed.ask(command);
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert!(stderr(&output).contains("no data plane"), "{command:?}: {}", stderr(&output));
    }
    assert!(bed.text(&["cleanup"]).contains("Nothing to remove"));
}

#[test]
fn completions_cover_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = lb_agent(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        let script = String::from_utf8(output.stdout).unwrap();
        for word in ["conntrack", "cleanup", "wire-device"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

/// The file names of the man pages of a command and its subcommands, apart from hidden ones. `parents` is empty, or
/// ends with a hyphen.
fn man_pages(command: &clap::Command, parents: &str) -> BTreeSet<String> {
    let name = format!("{parents}{}", command.get_name());
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    let of_subcommands = shown.flat_map(|command| man_pages(command, &format!("{name}-")));
    of_subcommands.chain([format!("{name}.1")]).collect()
}

#[test]
fn man_pages_cover_every_command() {
    let bed = Bed::new();
    let folder = bed.folder.join("man");
    fs::create_dir(&folder).unwrap();
    let output = lb_agent(&["man-pages", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let files = fs::read_dir(&folder).unwrap();
    let written: BTreeSet<String> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(written, man_pages(&Cli::command(), ""));
    for page in ["lb-agent.1", "lb-agent-run.1", "lb-agent-conntrack-list.1"] {
        assert!(written.contains(page), "{page}");
    }
    for page in written {
        let text = fs::read_to_string(folder.join(&page)).unwrap();
        assert!(text.contains(".SH SYNOPSIS"), "{page}");
    }
}

#[test]
fn check_lists_its_probes() {
    let bed = Bed::new();
    let probes = bed.json(&["check"]);
    let probes = probes.as_array().unwrap();
    assert!(
        probes.iter().any(|probe| probe["name"] == "BPF programs" && probe["result"] == "ok"),
        "{probes:?}"
    );
    assert!(bed.text(&["check"]).starts_with("PROBE"));
}

#[test]
fn service_list_has_the_documented_fields() {
    let (bed, _agent) = Bed::with_web();
    let backend = |address: &str, port: u16, labels: [Value; 3]| {
        let [node, zone, pod] = labels;
        serde_json::json!({"address": address, "port": port, "state": "active",
            "node": node, "zone": zone, "pod": pod})
    };
    let http = &bed.json(&["service", "list"])[1];
    let expected = serde_json::json!({
        "namespace": "default", "name": "web", "port": 80, "protocol": "TCP", "portName": "http",
        "sessionAffinity": "ClientIP", "scheduler": "random",
        "backends": [
            backend("198.51.100.1", 8080, ["a".into(), "z1".into(), "web-0".into()]),
            backend("198.51.100.2", 8080, [Value::Null, Value::Null, Value::Null]),
        ],
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(http[key], *value, "{key}");
    }
    let frontend = &http["frontends"][0];
    assert_eq!((&frontend["address"], &frontend["port"]), (&"10.96.0.10".into(), &80.into()));
    assert_eq!(frontend["kind"], "ClusterIP");
    assert_eq!(bed.json(&["service", "show", "default/web"]).as_array().unwrap().len(), 2);
    assert!(
        bed.text(&["service", "list"]).lines().nth(2).unwrap().starts_with("default    web   80/TCP  http")
    );
    assert!(bed.text(&["service", "list", "-n", "other"]).lines().count() == 1);
    let unknown = bed.ask(&["service", "show", "other/web"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("no Service other/web"), "{}", stderr(&unknown));
}

#[test]
fn flows_are_listed_counted_and_flushed() {
    let (bed, _agent) = Bed::with_web();
    bed.add_flow(40_000);
    bed.add_flow(40_001);
    let flows = bed.json(&["conntrack", "list"]);
    assert_eq!(flows.as_array().unwrap().len(), 2);
    let expected = [
        ("protocol", "TCP"),
        ("client", "192.0.2.9:40000"),
        ("vip", "10.96.0.10:80"),
        ("backend", "198.51.100.1:8080"),
        ("phase", "established"),
        ("service", "default/web"),
    ];
    for (key, value) in expected {
        assert_eq!(flows[0][key], value, "{key}");
    }
    assert!(flows[0]["secondsLeft"].as_u64().unwrap() > 86_000);
    let other = ["conntrack", "list", "--client", "192.0.2.8"];
    assert_eq!(bed.json(&other).as_array().unwrap().len(), 0);
    let shown = bed.json(&["service", "show", "web"]);
    assert_eq!(shown[1]["backends"][0]["flows"], 2);
    assert_eq!(bed.json(&["conntrack", "flush"])["entries"], 4);
    assert_eq!(bed.json(&["conntrack", "list"]).as_array().unwrap().len(), 0);
}

#[test]
fn changing_udp_backends_never_delay_expiry() {
    let (bed, _agent) = Bed::with_web();
    bed.add_flow(40_000);
    // The connection was reset longer ago than the timeout, so the next GC deletes it.
    let idle_ticks = 2 * Phase::Closed.timeout_seconds();
    bed.add_flow_that(40_001, seen::RST, Tick(Conntrack::now().0 - idle_ticks));
    let flows = || bed.json(&["conntrack", "list"]).as_array().unwrap().len();
    assert_eq!(flows(), 2);
    // Each change of a UDP backend wakes the agent's GC task. These changes come every second, more often than GC runs,
    // and must not delay GC.
    let mut others = ["198.51.100.3", "198.51.100.2"].into_iter().cycle();
    let expired = wait_for(LIMIT, || {
        let web = WEB.replace("198.51.100.2", others.next().unwrap());
        fs::write(bed.manifests().join("web.yaml"), web).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        (flows() == 1).then_some(())
    });
    expired.expect("the flow expires");
}

#[test]
fn status_works_with_and_without_the_agent() {
    let (bed, agent) = Bed::with_web();
    let status = bed.json(&["status"]);
    assert_eq!(status["agent"]["running"], true);
    assert_eq!(status["agent"]["pid"], agent.pid());
    assert_eq!(status["agent"]["nodeName"], "a");
    assert_eq!((&status["agent"]["services"], &status["agent"]["endpoints"]), (&2.into(), &4.into()));
    assert_eq!(status["agent"]["problems"], serde_json::json!([]));
    let programs = status["programs"].as_array().unwrap();
    let ingress = programs.iter().find(|program| program["direction"] == "ingress").unwrap();
    assert_eq!((&ingress["device"], &ingress["kind"]), (&"wire0".into(), &"wire".into()));
    let map = |name: &str| {
        status["maps"].as_array().unwrap().iter().find(|map| map["name"] == name).cloned().unwrap()
    };
    assert_eq!(map("SERVICES")["entries"], 2);
    assert!(status["outcomes"].as_array().unwrap().iter().any(|outcome| outcome["outcome"] == "new_flow"));
    let page = bed.text(&["status"]);
    let fits = page.lines().count() <= 40 && page.lines().all(|line| line.chars().count() <= 120);
    assert!(fits, "more than one screen:\n{page}");

    assert!(agent.terminate().unwrap().success());
    let status = bed.json(&["status"]);
    assert_eq!(status["agent"]["running"], false);
    assert_eq!(status["programs"].as_array().unwrap().len(), programs.len(), "the data plane is kept");
    let text = bed.text(&["status"]);
    assert!(text.starts_with("Agent      not running"), "{text}");
    assert!(text.ends_with(" outcomes with 0 packets: --all\n"), "{text}");
    let all = bed.text(&["status", "--all"]);
    assert!(!all.contains("--all") && all.contains("\nno_source_port "), "{all}");
    assert_eq!(bed.json(&["service", "list"]).as_array().unwrap().len(), 2);
}

/// The first block of commands in the section `Stand-alone` of README.md.
fn stand_alone_commands() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = fs::read_to_string(path).unwrap();
    let (_, section) = readme.split_once("\n## Stand-alone\n").unwrap();
    let (_, block) = section.split_once("\n```sh\n").unwrap();
    block.split_once("```").unwrap().0.to_owned()
}

/// A namespace that is connected to that of the bed, and has the addresses of the web servers in README.md.
fn web_servers(bed: &Bed) -> Netns {
    let netns = Netns::create(&format!("{}web", unique_prefix())).unwrap();
    bed.netns.ip(&format!("link set wire1 netns {}", netns.name())).unwrap();
    netns
        .ip("link set wire1 up\naddress add 192.0.2.42/24 dev wire1\naddress add 192.0.2.43/24 dev wire1")
        .unwrap();
    netns
}

#[test]
fn stand_alone_example_of_the_readme_ends_without_a_problem() {
    let bed = Bed::new();
    bed.netns.sysctls(&[("ipv4/ip_forward", "0"), ("ipv6/conf/all/forwarding", "0")]).unwrap();
    let servers = web_servers(&bed);
    let _server = server::http(&servers, "hello", 9376).unwrap();
    fs::create_dir_all(bed.folder.join("target/release")).unwrap();
    std::os::unix::fs::symlink(binary(), bed.folder.join("target/release/lb-agent")).unwrap();
    let script = format!("trap 'kill $!; wait $!' EXIT\n{}", stand_alone_commands());
    let mut shell = bed.netns.command("timeout");
    shell.arg(LIMIT.as_secs().to_string()).args(["bash", "-euc", &script]).current_dir(&bed.folder);
    let output = shell.env("LB_AGENT_BPFFS", bed.bpffs()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    let (answer, status) = text.split_once("Problems   none\n").unwrap_or_else(|| panic!("{text}"));
    assert!(answer.contains("hello"), "{text}");
    assert!(status.contains("\nServices   1 service ports, 2 backends\n"), "{text}");
}

#[test]
fn disabled_forwarding_is_a_problem_only_while_a_backend_is_elsewhere() {
    let bed = Bed::new();
    bed.netns.sysctls(&[("ipv4/ip_forward", "0"), ("ipv6/conf/all/forwarding", "0")]).unwrap();
    let put = |endpoint: &str| {
        let text = WEB.replace("198.51.100.1", "192.0.2.1").replace("198.51.100.2", endpoint);
        fs::write(bed.manifests().join("web.yaml"), text).unwrap();
    };
    put("192.0.2.1");
    let agent = Agent::start(&bed.netns, bed.settings("bpf", &[])).unwrap();
    let problems = || bed.json(&["status"])["agent"]["problems"].to_string();
    put("192.0.2.9");
    let named = || problems().contains("sysctl -w net.ipv4.ip_forward=1").then_some(());
    wait_for(LIMIT, named).unwrap_or_else(|| panic!("{}", problems()));
    assert!(!problems().contains("ipv6"), "no backend has an IPv6 address: {}", problems());
    put("192.0.2.1");
    wait_for(LIMIT, || (problems() == "[]").then_some(())).unwrap_or_else(|| panic!("{}", problems()));
    assert_eq!(agent.log().matches("ip_forward is 0").count(), 1, "not before: {}", agent.log());
}

#[test]
fn bad_manifest_is_a_problem_in_status_until_it_is_fixed() {
    let (bed, _agent) = Bed::with_web();
    let problems = || bed.json(&["status"])["agent"]["problems"].as_array().unwrap().clone();
    fs::write(bed.manifests().join("bad.yaml"), "apiVersion: v1\nkind: Service\nmetadata: {name: X}\n")
        .unwrap();
    let found = wait_for(LIMIT, || problems().first().cloned()).expect("a problem");
    assert!(found.as_str().unwrap().contains("bad.yaml"), "{found}");
    fs::remove_file(bed.manifests().join("bad.yaml")).unwrap();
    wait_for(LIMIT, || problems().is_empty().then_some(())).expect("no problem");
}

#[test]
fn two_agents_never_share_a_data_plane() {
    let (bed, agent) = Bed::with_web();
    let manifests = bed.manifests();
    let second = bed.ask(&["run", "--manifests", manifests.to_str().unwrap()]);
    assert_eq!(second.status.code(), Some(1));
    let error = stderr(&second);
    assert!(error.contains("another lb-agent") && error.contains(&agent.pid().to_string()), "{error}");
    let cleanup = bed.ask(&["cleanup"]);
    assert_eq!(cleanup.status.code(), Some(1), "cleanup under a running agent: {}", stderr(&cleanup));
    assert_eq!(bed.json(&["status"])["agent"]["pid"], agent.pid(), "the first agent still runs");
    assert_eq!(bed.json(&["service", "list"]).as_array().unwrap().len(), 2);
}

#[test]
fn busy_health_port_does_not_stop_the_agent() {
    let (bed, agent) = Bed::with_web();
    let second = Agent::spawn(&bed.netns, bed.settings("bpf2", &[])).unwrap();
    let busy = || second.log().contains("cannot serve /healthz").then_some(());
    wait_for(LIMIT, busy).expect("a warning");
    assert!(agent.terminate().unwrap().success());
    second.wait_until_healthy().unwrap();
    assert!(second.terminate().unwrap().success());
}

/// Manifest of the Service `s<number>`, without endpoints; the agent allocates its cluster IP.
fn empty_service(number: usize) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}}}\nspec: {{ports: [{{port: 80}}]}}\n---\n"
    )
}

#[test]
fn full_map_is_reported_and_recovers() {
    let bed = Bed::new();
    let capacities = Capacities { services: 4, ..Capacities::default() };
    drop(Datapath::open(&Options { capacities, ..Options::new(bed.bpffs()) }).unwrap());
    let services: String = (0..6).map(empty_service).collect();
    fs::write(bed.manifests().join("many.yaml"), services).unwrap();
    let agent = Agent::spawn(&bed.netns, bed.settings("bpf", &[])).unwrap();

    agent.wait_until_healthy().unwrap();
    let status = bed.json(&["status"]);
    assert_eq!(status["agent"]["pending"], 2, "two Services wait for room");
    let problems = status["agent"]["problems"].as_array().unwrap();
    assert!(
        problems.iter().all(|problem| problem.as_str().unwrap().contains("--max-frontends")),
        "{problems:?}"
    );
    assert_eq!(status["agent"]["failures"], serde_json::json!([]));
    assert_eq!(bed.json(&["service", "list"]).as_array().unwrap().len(), 4, "the others are served");
    let warnings = || agent.log().matches("--max-frontends").count();
    wait_for(LIMIT, || (warnings() > 0).then_some(())).expect("a warning");
    assert_eq!(warnings(), 1, "one warning: {}", agent.log());

    fs::write(bed.manifests().join("many.yaml"), empty_service(1)).unwrap();
    let healed = || {
        let problems = &bed.json(&["status"])["agent"]["problems"];
        (*problems == serde_json::json!([])).then_some(())
    };
    wait_for(LIMIT, healed).expect("no problem is left");
    assert_eq!(bed.json(&["service", "list"]).as_array().unwrap().len(), 1);
    assert_eq!(bed.json(&["status"])["agent"]["shortages"], serde_json::json!([]));
}

#[test]
fn backends_that_do_not_fit_wait_until_there_is_room() {
    let bed = Bed::new();
    let capacities = Capacities { backends: 3, ..Capacities::default() };
    drop(Datapath::open(&Options { capacities, ..Options::new(bed.bpffs()) }).unwrap());
    // `web` has two ports, each with two backends.
    fs::write(bed.manifests().join("web.yaml"), WEB).unwrap();
    let agent = Agent::spawn(&bed.netns, bed.settings("bpf", &[])).unwrap();
    wait_for(LIMIT, || agent.log().contains("of 3 slots").then_some(())).expect("a warning");
    // All nodes have the same Services. If a full map made a node unhealthy, all nodes would become so at once.
    agent.wait_until_healthy().unwrap();
    let status = bed.json(&["status"]);
    assert_eq!(status["agent"]["pending"], 1);
    assert!(status["agent"]["problems"][0].as_str().unwrap().contains("of 3 slots"), "{status:#}");
    fs::write(bed.manifests().join("web.yaml"), WEB.replace("- {addresses: [198.51.100.2]}\n", "")).unwrap();
    let solved = || (bed.json(&["status"])["agent"]["problems"] == serde_json::json!([])).then_some(());
    wait_for(LIMIT, solved).expect("no problem is left");
    // New backends need new slots while the old ones are in use; old slots become free after a grace period.
    for last in 3..9 {
        let one =
            WEB.replace("- {addresses: [198.51.100.2]}\n", "").replace("100.1]", &format!("100.{last}]"));
        fs::write(bed.manifests().join("web.yaml"), one.replace("  - {name: dns", "  # {name: dns")).unwrap();
        let switched = || {
            let services = bed.json(&["service", "list"]);
            (services[0]["backends"][0]["address"] == format!("198.51.100.{last}")).then_some(())
        };
        wait_for(LIMIT, switched).unwrap_or_else(|| panic!("{last}: {}", agent.log()));
    }
}

#[test]
fn cleanup_removes_everything() {
    let (bed, agent) = Bed::with_web();
    assert!(agent.terminate().unwrap().success());
    assert!(bed.text(&["cleanup"]).starts_with("Removed "));
    assert!(!bed.bpffs().join("lb").exists());
    assert_eq!(bed.ask(&["status"]).status.code(), Some(1));
    assert!(bed.text(&["cleanup"]).contains("Nothing to remove"));
}

#[test]
fn failing_tool_is_reported_instead_of_no_leftovers() {
    let bed = Bed::new();
    let tool = bed.folder.join("nft");
    fs::write(&tool, "#!/bin/sh\necho 'netlink: Error: cannot allocate memory' >&2\nexit 1\n").unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = bed.netns.command(binary());
    let output =
        command.args(["cleanup", "--kube-proxy", "--dry-run"]).env("PATH", &bed.folder).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("`nft list tables` fails"), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot allocate memory"), "{}", stderr(&output));
}
