//! Tests of the agent with the capabilities and settings of `deploy/`.

use std::{fs, path::Path, process::Command};

use lb_tests::{
    agent::{Agent, Settings, binary, run},
    client::{PATIENCE, ask_http, ask_udp},
    cluster::ClientLink,
    wait_for,
};
use serde_json::Value;

use crate::bed::{Bed, WEB, http, udp};

/// The Pod template of the DaemonSet in `deploy/`.
fn pod() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/lb-agent.yaml");
    let text = fs::read_to_string(path).unwrap();
    let documents = text.split("\n---\n").map(|document| serde_saphyr::from_str::<Value>(document).unwrap());
    let daemon_set = documents.into_iter().find(|document| document["kind"] == "DaemonSet").unwrap();
    daemon_set["spec"]["template"]["spec"].clone()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// The value of an environment variable in the DaemonSet's container.
fn variable(name: &str) -> String {
    let pod = pod();
    let variables = pod["containers"][0]["env"].as_array().unwrap();
    let variable = variables.iter().find(|variable| variable["name"] == name).unwrap();
    text(&variable["value"]).to_owned()
}

/// Names of the capabilities that the DaemonSet's container has.
fn capabilities() -> Vec<String> {
    let pod = pod();
    let added = pod["containers"][0]["securityContext"]["capabilities"]["add"].as_array().unwrap();
    let names: Vec<_> = added.iter().map(|name| text(name).to_lowercase()).collect();
    assert!(!names.is_empty());
    names
}

/// Start of a command that runs a program with only these capabilities, as container runtimes do.
fn setpriv(capabilities: &[String]) -> Vec<String> {
    let kept: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    ["setpriv", "--no-new-privs", "--inh-caps=-all"]
        .into_iter()
        .map(str::to_owned)
        .chain([format!("--bounding-set=-all{kept}")])
        .collect()
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

/// A shell script that turns its mount namespace into that of the container on node1, and then runs its arguments. The
/// root file system is this machine's, read-only, with an empty /run.
fn mounts(bed: &Bed) -> String {
    let pod = pod();
    assert_eq!(pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"], true);
    // Creates mount points that the image does not have, as container runtimes also do.
    let mut mounts: Vec<&Value> = pod["containers"][0]["volumeMounts"].as_array().unwrap().iter().collect();
    mounts.sort_by_key(|mount| text(&mount["mountPath"]).split('/').count());
    let volumes = pod["volumes"].as_array().unwrap();
    let (mut points, mut filled) = (String::new(), String::new());
    for mount in mounts {
        let (name, point) = (text(&mount["name"]), text(&mount["mountPath"]));
        let volume = volumes.iter().find(|volume| volume["name"] == name).unwrap();
        let on_node = match volume["hostPath"]["path"].as_str() {
            Some("/sys/fs/bpf") => Some(bed.cluster.bpffs(1)),
            Some("/sys/fs/cgroup") => Some(bed.cluster.cgroup(1).unwrap().path().to_owned()),
            Some(other) => panic!("node1 has no {other}"),
            // Skips the ConfigMap: the tests pass settings as arguments.
            None if volume.get("configMap").is_some() => continue,
            None => None,
        };
        points.push_str(&format!("mkdir -p {point}\n"));
        filled.push_str(&format!("mkdir -p {point}\n"));
        filled.push_str(&match on_node {
            Some(path) => format!("mount --bind {} {point}\n", path.display()),
            None => format!("mount -t tmpfs {name} {point}\n"),
        });
        let mode = if mount["readOnly"] == true { "ro" } else { "rw" };
        filled.push_str(&format!("mount -o remount,bind,{mode} {point}\n"));
    }
    format!(
        "set -eu\n\
         mount --make-rprivate /\n\
         mount -t tmpfs image /run\n\
         {points}\
         mount --bind /proc/sys /proc/sys\n\
         for point in $(cut -d ' ' -f 5 /proc/self/mountinfo); do\n\
           case $point in\n\
             /proc|/dev|/dev/*|/run/*) ;;\n\
             *) mount -o remount,bind,ro $point ;;\n\
           esac\n\
         done\n\
         {filled}\
         exec \"$@\"\n"
    )
}

/// The settings of the agent in node1's container.
fn settings(bed: &Bed) -> Settings {
    let settings = bed.cluster.agent_settings(1);
    Settings {
        bpffs: variable("LB_AGENT_BPFFS").into(),
        cgroup: Some(variable("LB_AGENT_CGROUP").into()),
        ..settings
    }
}

/// Starts the agent in node1's container.
fn start_in_container(bed: &Bed, arguments: &[&str]) -> Agent {
    let mut settings = settings(bed);
    settings.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let mut starter: Vec<String> =
        ["unshare", "--mount", "sh", "-c", &mounts(bed), "container"].map(str::to_owned).to_vec();
    starter.extend(setpriv(&capabilities()));
    let agent = Agent::spawn_by(&bed.cluster.node1, settings, &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    agent
}

/// Runs lb-agent with `arguments` in the container, through the command `starter`, as `kubectl exec` does; returns the
/// output of lb-agent.
fn exec_by(bed: &Bed, agent: &Agent, starter: &[String], arguments: &[&str]) -> Vec<u8> {
    let pod = pod();
    let dir = pod["containers"][0]["workingDir"].as_str().unwrap_or("/");
    let mut command = bed.cluster.node1.command("nsenter");
    command.args(["--mount", "--target", &agent.pid().to_string(), "env", &format!("--chdir={dir}")]);
    command.args(starter).arg(binary()).args(arguments).arg("--bpffs").arg(variable("LB_AGENT_BPFFS"));
    run(&mut command).unwrap().stdout
}

fn exec(bed: &Bed, agent: &Agent, arguments: &[&str]) -> Vec<u8> {
    exec_by(bed, agent, &setpriv(&capabilities()), arguments)
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
    let pod = pod();
    for (probe, answer) in
        [("startupProbe", "alive"), ("livenessProbe", "alive"), ("readinessProbe", "ready")]
    {
        let command = pod["containers"][0][probe]["exec"]["command"].as_array().unwrap();
        let [_program, arguments @ ..] = &command[..] else { panic!("{probe}: {command:?}") };
        let arguments: Vec<&str> = arguments.iter().map(text).collect();
        let output = String::from_utf8(exec(&bed, &agent, &arguments)).unwrap();
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
    let (in_pod, with_all) = (status(&setpriv(&capabilities())), status(&[]));
    let layers: Vec<&str> =
        with_all["programs"].as_array().unwrap().iter().map(|program| text(&program["layer"])).collect();
    assert!(layers.contains(&"tcx") && layers.iter().any(|layer| layer.starts_with("xdp")), "{with_all:#}");
    assert!(!with_all["socketPrograms"].as_array().unwrap().is_empty(), "{with_all:#}");
    for programs in ["programs", "socketPrograms"] {
        assert_eq!(in_pod[programs], with_all[programs], "{programs}");
    }
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
    let starter = setpriv(&capabilities());
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
    let all = capabilities();
    for without in 0..all.len() {
        let mut kept = all.clone();
        let name = kept.remove(without);
        let settings = bed.cluster.agent_settings(1);
        let agent = Agent::spawn_by(&bed.cluster.node1, settings, &setpriv(&kept)).unwrap();
        assert!(agent.wait_until_healthy().is_err(), "it runs without {name}");
    }
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
