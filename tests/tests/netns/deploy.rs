//! Tests of the agent with the capabilities and settings of `deploy/`.

use std::{fs, net::IpAddr, path::Path, process::Command, time::Duration};

use lb_common::LAYOUT_VERSION;
use lb_tests::{
    agent::{Agent, Settings, binary, run},
    cleanup::{self, Cleanup, Resource},
    client::{PATIENCE, ask_http, ask_udp},
    cluster::{CLIENT, ClientLink},
    container::{Container, FirstProcess, setpriv},
    netns::{self, Netns},
    wait_for,
};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::bed::{Bed, WEB, http, udp, vips};

/// The DaemonSet in a file of `deploy/`.
fn daemon_set(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file);
    let text = fs::read_to_string(path).unwrap();
    let mut documents =
        text.split("\n---\n").map(|document| serde_saphyr::from_str::<Value>(document).unwrap());
    documents.find(|document| document["kind"] == "DaemonSet").unwrap()
}

/// The container of the DaemonSet in `deploy/`.
fn container() -> Container {
    Container::new(&daemon_set("lb-agent.yaml"))
}

/// A cluster without a running agent; a BPF file system is mounted, as systemd mounts it.
fn bed() -> Bed {
    let bed = Bed::without_agent(ClientLink::Ethernet, &["pod2", "pod3"]);
    let bpffs = bed.cluster.bpffs(1);
    fs::create_dir_all(&bpffs).unwrap();
    let mut mount = Command::new("mount");
    run(mount.args(["-t", "bpf", "-o", "mode=0700", "none"]).arg(&bpffs)).unwrap();
    bed
}

/// The settings of the agent in node1's container.
fn settings(bed: &Bed) -> Settings {
    let container = container();
    let path = |name| container.variable(name).unwrap().into();
    let settings = bed.cluster.agent_settings(1);
    Settings { bpffs: path("LB_AGENT_BPFFS"), cgroup: Some(path("LB_AGENT_CGROUP")), ..settings }
}

/// Starts the agent in node1's container. The tests pass settings as arguments, so the ConfigMap of the container is
/// not mounted.
fn start_in_container(bed: &Bed, arguments: &[&str]) -> Agent {
    let mut settings = settings(bed);
    settings.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let cgroup = bed.cluster.cgroup(1).unwrap().path().to_owned();
    let folder = bed.cluster.folder().join("run");
    fs::create_dir_all(&folder).unwrap();
    let volumes = [("bpffs", bed.cluster.bpffs(1)), ("cgroup", cgroup), ("run", folder)];
    let starter = container().starter(&volumes).unwrap();
    let agent = Agent::spawn_by(&bed.cluster.node1, settings, &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    agent
}

/// Runs lb-agent with `arguments` in the container, through the command `starter`, as `kubectl exec` does; returns the
/// output of lb-agent.
fn exec_by(bed: &Bed, agent: &Agent, starter: &[String], arguments: &[&str]) -> Vec<u8> {
    let container = container();
    let mut command = container.exec(&bed.cluster.node1, agent.pid(), starter);
    command.arg(binary()).args(arguments).arg("--bpffs").arg(container.variable("LB_AGENT_BPFFS").unwrap());
    run(&mut command).unwrap().stdout
}

fn exec(bed: &Bed, agent: &Agent, arguments: &[&str]) -> Vec<u8> {
    exec_by(bed, agent, &setpriv(&container().capabilities()), arguments)
}

#[test]
fn status_in_the_pod_shows_the_sync_state_and_problems() {
    let bed = bed();
    let agent = start_in_container(&bed, &[]);
    fs::write(bed.cluster.manifests.folder().join("bad.yaml"), "kind: [\n").unwrap();
    let status =
        || -> Value { serde_json::from_slice(&exec(&bed, &agent, &["status", "-o", "json"])).unwrap() };
    let shown = wait_for(PATIENCE, || {
        let status = status();
        status["agent"]["problems"].to_string().contains("bad.yaml").then_some(status)
    });
    let status = shown.unwrap_or_else(|| panic!("no problem is shown: {:#}", status()["agent"]));
    assert_eq!(status["agent"]["synchronised"], true, "{status:#}");
    assert_eq!(status["agent"]["silent"], Value::Null, "{status:#}");
}

#[test]
fn probes_of_the_daemon_set_succeed_in_the_pod() {
    let bed = bed();
    let agent = start_in_container(&bed, &[]);
    for (probe, answer) in
        [("startupProbe", "alive"), ("livenessProbe", "alive"), ("readinessProbe", "ready")]
    {
        let output = String::from_utf8(exec(&bed, &agent, &container().probe(probe))).unwrap();
        assert!(output.starts_with(&format!("{answer}: pid {}, ", agent.pid())), "{probe}: {output}");
    }
}

#[test]
fn status_in_the_pod_lists_every_program() {
    let bed = bed();
    let agent = start_in_container(&bed, &["--xdp", "generic"]);
    let status = |starter: &[String]| -> Value {
        serde_json::from_slice(&exec_by(&bed, &agent, starter, &["status", "-o", "json"])).unwrap()
    };
    let (in_pod, with_all) = (status(&setpriv(&container().capabilities())), status(&[]));
    let layers: Vec<&str> = with_all["programs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|program| program["layer"].as_str().unwrap())
        .collect();
    assert!(layers.contains(&"tcx") && layers.iter().any(|layer| layer.starts_with("xdp")), "{with_all:#}");
    assert!(!with_all["socketPrograms"].as_array().unwrap().is_empty(), "{with_all:#}");
    for programs in ["programs", "socketPrograms"] {
        assert_eq!(in_pod[programs], with_all[programs], "{programs}");
    }
}

#[test]
fn next_pod_knows_the_unhealthy_endpoints() {
    let bed = bed();
    let mut web = bed.service("probed", vips(20), &["pod2"]);
    let settings = [("lb.dev/health-check", "tcp://:1"), ("lb.dev/health-check-interval", "500ms")];
    web.annotations = settings.map(|(name, value)| (name, value.to_owned())).to_vec();
    bed.cluster.manifests.put(&web).unwrap();
    let agent = start_in_container(&bed, &[]);
    let recorded = || {
        let files = fs::read_dir(bed.cluster.folder().join("run")).unwrap();
        let mut files = files.map(|file| file.unwrap().path());
        let has_target = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains("10.244"));
        files
            .any(|path| path.extension().is_some_and(|end| end == "unhealthy") && has_target(&path))
            .then_some(())
    };
    wait_for(PATIENCE, recorded).expect("the endpoints are unhealthy");
    agent.kill().unwrap();
    let log = start_in_container(&bed, &[]).log();
    assert!(log.contains("an earlier agent has found endpoints unhealthy"), "{log}");
}

/// Without `CAP_SYS_ADMIN`, explain can read the constants of the loaded programs only from their pin.
#[test]
fn explain_in_the_pod_says_what_it_assumes() {
    let bed = bed();
    let agent = start_in_container(&bed, &[]);
    let question =
        ["explain", "--from", &CLIENT[0].to_string(), "--to", &http(WEB[0]).to_string(), "-o", "json"];
    let steps = |starter: &[String]| {
        let page: Value = serde_json::from_slice(&exec_by(&bed, &agent, starter, &question)).unwrap();
        page["steps"].as_array().unwrap().clone()
    };
    let with_all = steps(&[]);
    assert!(with_all.iter().all(|step| step["step"] != "assumed"), "{with_all:#?}");
    assert_eq!(steps(&setpriv(&container().capabilities())), with_all);
    fs::remove_file(bed.cluster.bpffs(1).join(format!("lb/v{LAYOUT_VERSION}/CONSTANTS"))).unwrap();
    let [assumed, rest @ ..] = &steps(&setpriv(&container().capabilities()))[..] else { panic!("no step") };
    assert_eq!(assumed["step"], "assumed", "{assumed:#}");
    assert!(
        assumed["text"].as_str().unwrap().contains("assume the defaults of --maglev-seed"),
        "{assumed:#}"
    );
    assert_eq!(rest, with_all);
}

#[test]
fn everything_that_the_agent_writes_in_the_pod_is_writable() {
    let bed = bed();
    let agent = start_in_container(&bed, &[]);
    exec(&bed, &agent, &["bugreport", "--output", "report.tar.gz"]);
    let log = agent.log();
    // The agent cannot reserve ports in the container; deploy/README.md says why.
    let refused: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("Read-only") && !line.contains("ip_local_reserved_ports"))
        .collect();
    assert_eq!(refused, [""; 0]);
}

#[test]
fn agent_runs_with_the_capabilities_of_the_daemon_set() {
    let bed = bed();
    let starter = setpriv(&container().capabilities());
    // The second agent takes over the data plane of the first one.
    for _ in 0..2 {
        let settings = bed.cluster.agent_settings(1);
        let agent = Agent::spawn_by(&bed.cluster.node1, settings, &starter).unwrap();
        agent.wait_until_healthy().unwrap();
        for vip in WEB {
            ask_http(&bed.cluster.client, http(vip)).unwrap();
            ask_udp(&bed.cluster.client, udp(vip), 64).unwrap();
            ask_http(bed.netns("pod1"), http(vip)).unwrap();
            ask_http(&bed.cluster.node1, http(vip)).unwrap();
        }
        let log = agent.log();
        assert!(!log.contains("not permitted") && !log.contains("ermission denied"), "{log}");
        bed.put("web", WEB, &["pod3"]);
        wait_for(PATIENCE, || {
            (ask_http(&bed.cluster.client, http(WEB[0])).unwrap().server == "pod3").then_some(())
        })
        .unwrap();
        assert!(agent.terminate().unwrap().success());
        bed.put("web", WEB, &["pod2"]);
    }
}

/// If the agent did not need one of the capabilities, the DaemonSet would grant too many.
#[test]
fn agent_needs_every_capability_of_the_daemon_set() {
    let bed = bed();
    let all = container().capabilities();
    assert!(!all.is_empty());
    for without in 0..all.len() {
        let mut kept = all.clone();
        let name = kept.remove(without);
        let settings = bed.cluster.agent_settings(1);
        let agent = Agent::spawn_by(&bed.cluster.node1, settings, &setpriv(&kept)).unwrap();
        assert!(agent.wait_until_healthy().is_err(), "it runs without {name}");
    }
}

/// Runs the command of the Pod of `helm test` in pod1, with the programs of the image busybox, as the Pod's user and
/// with the variables that kubelet sets.
fn helm_test(bed: &Bed, programs: &Path, to: IpAddr) -> bool {
    const TEMPLATE: &str = include_str!("../../../deploy/chart/templates/tests/vip.yaml");
    let command = TEMPLATE.lines().find_map(|line| line.trim().strip_prefix("command: ")).unwrap();
    let command: Vec<String> = serde_saphyr::from_str(command).unwrap();
    let mut pod = bed.netns("pod1").command("setpriv");
    pod.args(["--reuid=65534", "--clear-groups", "--bounding-set=-all", "--no-new-privs", "env", "-i"]);
    pod.arg(format!("PATH={}", programs.display())).arg(format!("KUBERNETES_SERVICE_HOST={to}"));
    pod.arg(format!("KUBERNETES_SERVICE_PORT={}", http(to).port())).args(&command);
    pod.status().unwrap().success()
}

#[test]
fn helm_test_succeeds_only_if_a_cluster_ip_answers() {
    let bed = bed();
    let _agent = start_in_container(&bed, &[]);
    let programs = bed.cluster.folder().join("busybox");
    fs::create_dir_all(&programs).unwrap();
    run(Command::new("busybox").args(["--install", "-s"]).arg(&programs)).unwrap();
    for vip in WEB {
        assert!(helm_test(&bed, &programs, vip), "{vip}");
    }
    bed.put("web", WEB, &[]);
    let refused = wait_for(PATIENCE, || (!helm_test(&bed, &programs, WEB[0])).then_some(()));
    assert!(refused.is_some(), "no endpoint is left");
}

/// Kubernetes kills a container that still runs 10 s after SIGTERM.
#[test]
fn container_that_waits_for_the_configuration_of_bird_ends_on_sigterm() {
    let daemon_set = daemon_set("lint/controller.yaml");
    let containers = daemon_set["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    let bird = containers.iter().find(|container| container["name"] == "bird").unwrap();
    let words = bird["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
    cleanup::on_interrupt();
    cleanup::remove_stale().unwrap();
    let prefix = netns::unique_prefix();
    let node = Netns::create(&format!("{prefix}-n")).unwrap();
    let folder = std::env::temp_dir().join(&prefix);
    let _cleanup = Cleanup::of(Resource::Folder(folder.clone()));
    fs::create_dir_all(&folder).unwrap();
    // The folder has no configuration.
    let command: Vec<String> =
        words.map(|word| word.replace("/run/bird", folder.to_str().unwrap())).collect();
    let mut shell = FirstProcess::start(&node, &command[0], &command[1..], &folder.join("log")).unwrap();
    // A signal before the shell has read its command has no effect.
    let ended = || {
        _ = shell.signal(Signal::SIGTERM);
        shell.status().unwrap()
    };
    let status = wait_for(Duration::from_secs(8), ended);
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

#[test]
fn agent_exits_with_code_1_when_its_settings_change() {
    let bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    let file = bed.cluster.folder().join("agent-config.yaml");
    fs::write(&file, "cluster-cidr: 10.0.0.0/8\n").unwrap();
    let mut settings = bed.cluster.agent_settings(1);
    settings.arguments.extend(["--config".to_owned(), file.display().to_string()]);
    let agent = Agent::start(&bed.cluster.node1, settings).unwrap();
    fs::write(&file, "cluster-cidr: 10.0.0.0/9\n").unwrap();
    let status = agent.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    ask_http(&bed.cluster.client, http(WEB[0])).unwrap();
}
