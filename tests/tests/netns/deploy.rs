//! The agent as `deploy/` runs it.

use std::{fs, path::Path, process::Command};

use lb_tests::{
    agent::{Agent, run},
    client::{PATIENCE, ask_http, ask_udp},
    cluster::ClientLink,
    wait_for,
};

use crate::bed::{Bed, WEB, http, udp};

/// What the container of the DaemonSet adds after it has dropped all.
fn capabilities() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/lb-agent.yaml");
    let text = fs::read_to_string(path).unwrap();
    let list = text.lines().skip_while(|line| line.trim() != "add:").skip(1);
    let names: Vec<_> =
        list.map_while(|line| line.trim().strip_prefix("- ")).map(str::to_lowercase).collect();
    assert!(!names.is_empty());
    names
}

/// A program that starts another one with these capabilities only, as container runtimes do.
fn setpriv(capabilities: &[String]) -> Vec<String> {
    let kept: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    ["setpriv", "--no-new-privs", "--inh-caps=-all"]
        .into_iter()
        .map(str::to_owned)
        .chain([format!("--bounding-set=-all{kept}")])
        .collect()
}

/// A cluster whose agent is still to be started. Like systemd, not the agent, it mounts the BPF file system.
fn bed() -> Bed {
    let bed = Bed::without_agent(ClientLink::Ethernet, &["pod2", "pod3"]);
    let bpffs = bed.cluster.bpffs(1);
    fs::create_dir_all(&bpffs).unwrap();
    let mut mount = Command::new("mount");
    run(mount.args(["-t", "bpf", "-o", "mode=0700", "none"]).arg(&bpffs)).unwrap();
    bed
}

#[test]
fn agent_runs_with_the_capabilities_of_the_daemon_set() {
    let bed = bed();
    let starter = setpriv(&capabilities());
    // The second one finds what the first one has left.
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

/// Otherwise the DaemonSet would have too many.
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
