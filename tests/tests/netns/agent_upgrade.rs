//! Tests of restarts, kills, upgrades and configuration errors of the agent under traffic: no transaction may fail.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use lb_tests::{
    agent::{self, Agent, Settings, run},
    client::{Connection, PATIENCE, udp_socket},
    traffic::{Kind, Traffic},
    wait_for,
};
use nix::fcntl::{Flock, FlockArg};

use crate::{
    bed::{Bed, WEB, http, udp},
    lan::{EVERY, Frontend, Frontend::NodePort, Lan, Protocol},
    xdp::wires,
};

/// The pods that are backends: on both nodes, so that node1 forwards some packets to node2.
const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];

/// How long the kernel may take to verify the programs under traffic.
const VERIFIED: Duration = Duration::from_secs(30);

#[test]
fn restart_under_load_breaks_nothing() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    traffic.progresses().unwrap();
    bed.start_agent();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// The test kills the agent, and then the next agent halfway through its start.
#[test]
fn kill_under_load_breaks_nothing() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    bed.agent.take().unwrap().kill().unwrap();
    traffic.progresses().unwrap();
    let settings = bed.cluster.agent_settings(1);
    let half_started = Agent::spawn(&bed.cluster.node1, settings).unwrap();
    let begun = || (half_started.log().matches("opened the data plane").count() == 2).then_some(());
    wait_for(VERIFIED, begun).unwrap();
    half_started.kill().unwrap();
    traffic.progresses().unwrap();
    bed.start_agent();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// For each link pinned in the folder `links` of node 1: the ids of the link and of its program, as bpftool reports
/// them.
fn links(bpffs: &Path) -> BTreeMap<String, (u64, u64)> {
    let mut links = BTreeMap::new();
    let folder = current(bpffs).join("links");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let output = run(Command::new("bpftool").args(["-j", "link", "show", "pinned"]).arg(&path)).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let shown: serde_json::Value = serde_json::from_str(&text).unwrap();
        let shown = shown.get(0).unwrap_or(&shown);
        let number = |name: &str| shown[name].as_u64().unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        links.insert(name, (number("id"), number("prog_id")));
    }
    links
}

/// Path of the folder with the data plane's pins; asserts that there is only one.
fn current(bpffs: &Path) -> PathBuf {
    let entries = fs::read_dir(bpffs.join("lb")).unwrap();
    let is_version = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with('v');
    let versions: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(is_version).collect();
    assert_eq!(versions.len(), 1, "{versions:?}");
    versions[0].clone()
}

/// The second agent has another `--syn-retries`, so its programs differ in a constant, like those of another build with
/// the same maps. Links stay and get the new programs.
#[test]
fn upgrade_with_the_same_layout_replaces_programs_in_their_links() {
    let mut bed = Bed::with_web(&PODS);
    let bpffs = bed.cluster.bpffs(1);
    let before = links(&bpffs);
    let traffic = bed.traffic();
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    bed.start_agent_with(&["--syn-retries", "3"]);
    traffic.progresses().unwrap();
    let after = links(&bpffs);
    assert!(!before.is_empty() && before.keys().eq(after.keys()), "{before:?} {after:?}");
    for (name, (link, program)) in before {
        assert_eq!(after[&name].0, link, "{name} is the link that it was");
        assert_ne!(after[&name].1, program, "{name} has a new program");
    }
    traffic.stop().assert_unharmed();
}

/// Ends the agent of node 1 and starts another executable.
fn change_agent(bed: &mut Bed, binary: Option<PathBuf>) {
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    let settings = Settings { binary, ..bed.cluster.agent_settings(1) };
    bed.agent = Some(Agent::start(&bed.cluster.node1, settings).unwrap());
}

/// Ids of the Service ports on node 1, by the names of Service and port.
fn service_ids(bed: &Bed) -> BTreeMap<String, u64> {
    let list = bed.json(&["service", "list"]);
    let id = |entry: &serde_json::Value| {
        (format!("{}:{}", entry["name"], entry["portName"]), entry["id"].as_u64().unwrap())
    };
    list.as_array().unwrap().iter().map(id).collect()
}

/// Changes from one map layout to another under traffic. Connections that transfer data, and idle connections and
/// sockets, must all survive.
fn changes_layout(first: Option<PathBuf>, second: Option<PathBuf>) {
    let mut bed = Bed::without_agent(lb_tests::cluster::ClientLink::Ethernet, &PODS);
    let settings = Settings { binary: first, ..bed.cluster.agent_settings(1) };
    bed.agent = Some(Agent::start(&bed.cluster.node1, settings).unwrap());
    let bpffs = bed.cluster.bpffs(1);
    let (before, ids) = (current(&bpffs), service_ids(&bed));
    let client = bed.cluster.client.clone();
    let mut idle = WEB.map(|vip| Connection::open(&client, http(vip)).unwrap());
    let answers = idle.each_mut().map(|connection| connection.ask().unwrap());
    let sockets = WEB.map(|vip| udp_socket(&client, udp(vip)).unwrap());
    let echoes = sockets.each_ref().map(|socket| lb_tests::client::echo(socket, b"?").unwrap());
    let traffic = bed.traffic();
    change_agent(&mut bed, second);
    assert_ne!(current(&bpffs), before, "the layout has changed");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
    assert_eq!(idle.each_mut().map(|connection| connection.ask().unwrap()), answers);
    assert_eq!(sockets.each_ref().map(|socket| lb_tests::client::echo(socket, b"?").unwrap()), echoes);
    assert_eq!(service_ids(&bed), ids, "connections refer to their service by its id");
}

#[test]
fn upgrade_to_another_layout_keeps_every_connection() {
    changes_layout(None, Some(agent::next_binary()));
}

#[test]
fn downgrade_to_another_layout_keeps_every_connection() {
    changes_layout(Some(agent::next_binary()), None);
}

/// Starts traffic to node ports of service 1 (backend on node 1) and service 2 (backend on node 2): part of it is
/// masqueraded at tc, part by XDP.
fn exposed_traffic(lan: &Lan) -> Traffic {
    let mut clients = Vec::new();
    for (number, source) in [(1, "client"), (2, "client"), (2, "client2"), (2, "pod1")] {
        for how in EVERY {
            let to: SocketAddr = NodePort(1).of(number, how);
            let kinds = if how.0 == Protocol::Tcp { Kind::TCP } else { Kind::UDP };
            clients.extend(kinds.map(|kind| (lan.netns(source), kind, to)));
        }
    }
    Traffic::start(clients).unwrap()
}

#[test]
fn upgrade_to_another_layout_keeps_masqueraded_and_routed_connections() {
    let mut lan = wires("native").lan_and_ends();
    let traffic = exposed_traffic(&lan.0);
    assert!(lan.0.agents[0].take().unwrap().terminate().unwrap().success());
    let mut settings = Settings { binary: Some(agent::next_binary()), ..lan.0.cluster.agent_settings(1) };
    settings.arguments.extend(["--xdp", "native"].map(str::to_owned));
    lan.0.agents[0] = Some(Agent::start(lan.0.cluster.node(1), settings).unwrap());
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
    let served = Frontend::LoadBalancer.of(2, EVERY[0]);
    assert_eq!(lb_tests::client::ask_http(lan.0.netns("client"), served).unwrap().server, "pod3");
}

/// Kills an agent in the middle of an upgrade, soon after it has opened its own data plane. The next agent must
/// complete the upgrade.
#[test]
fn upgrade_killed_halfway_is_completed_by_the_next_agent() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    bed.agent.take().unwrap().kill().unwrap();
    let settings = Settings { binary: Some(agent::next_binary()), ..bed.cluster.agent_settings(1) };
    let half = Agent::spawn(&bed.cluster.node1, settings).unwrap();
    let opened = || (half.log().matches("opened the data plane").count() == 2).then_some(());
    wait_for(VERIFIED, opened).unwrap();
    half.kill().unwrap();
    traffic.progresses().unwrap();
    let settings = Settings { binary: Some(agent::next_binary()), ..bed.cluster.agent_settings(1) };
    bed.agent = Some(Agent::start(&bed.cluster.node1, settings).unwrap());
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
    current(&bed.cluster.bpffs(1));
}

#[test]
fn second_agent_fails_with_the_pid_of_the_running_one_and_breaks_nothing() {
    let bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    for binary in [None, Some(agent::next_binary())] {
        let log = bed.cluster.folder().join("second.log");
        let settings = Settings { log: log.clone(), binary, ..bed.cluster.agent_settings(1) };
        let status = Agent::spawn(&bed.cluster.node1, settings).unwrap().wait().unwrap();
        let said = fs::read_to_string(log).unwrap();
        assert!(!status.success(), "{said}");
        let first = format!("pid {} ", bed.agent.as_ref().unwrap().pid());
        assert!(said.contains("another lb-agent") && said.contains(&first), "{said}");
    }
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// If two agents are started at once, one serves; the other exits with an error that names the pid of the serving
/// agent.
#[test]
fn only_one_of_two_simultaneously_started_agents_serves() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    let spawn = |name: &str| {
        let log = bed.cluster.folder().join(name);
        Agent::spawn(&bed.cluster.node1, Settings { log, ..bed.cluster.agent_settings(1) }).unwrap()
    };
    let agents = [spawn("one.log"), spawn("other.log")];
    let loser = || agents.iter().position(|agent| agent.log().contains("another lb-agent"));
    let loser = wait_for(VERIFIED, loser).unwrap();
    let [one, other] = agents;
    let (winner, loser) = if loser == 0 { (other, one) } else { (one, other) };
    assert!(loser.log().contains(&format!("pid {} ", winner.pid())), "{}", loser.log());
    assert!(!loser.wait().unwrap().success());
    winner.wait_until_healthy().unwrap();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

#[test]
fn missing_bpffs_is_mounted_and_mount_errors_name_the_path() {
    let bed = Bed::with_web(&PODS);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let bpffs = bed.cluster.bpffs(1);
    assert!(mounts.lines().any(|line| line.contains(bpffs.to_str().unwrap()) && line.contains(" - bpf ")));
    let traffic = bed.traffic();
    let in_the_way = bed.cluster.folder().join("file");
    fs::write(&in_the_way, "").unwrap();
    let log = bed.cluster.folder().join("second.log");
    let settings = Settings { log: log.clone(), bpffs: in_the_way.clone(), ..bed.cluster.agent_settings(1) };
    let status = Agent::spawn(&bed.cluster.node1, settings).unwrap().wait().unwrap();
    let said = fs::read_to_string(log).unwrap();
    assert!(!status.success() && said.contains(in_the_way.to_str().unwrap()), "{said}");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

#[test]
fn unmounted_bpffs_is_restored_and_breaks_nothing() {
    let mut bed = Bed::with_web(&PODS);
    let bpffs = bed.cluster.bpffs(1);
    let before = links(&bpffs);
    let traffic = bed.traffic();
    let busy = run(Command::new("umount").arg(&bpffs)).unwrap_err().to_string();
    assert!(busy.contains("busy"), "{busy}");
    traffic.progresses().unwrap();
    run(Command::new("umount").arg("--lazy").arg(&bpffs)).unwrap();
    // Restarts the agent, as a supervisor would.
    let agent = bed.agent.take().unwrap();
    wait_for(PATIENCE, || agent.log().contains("was unmounted").then_some(())).unwrap();
    assert!(!agent.wait().unwrap().success());
    assert_eq!(links(&bpffs), before);
    traffic.progresses().unwrap();
    bed.start_agent();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// An agent that cannot pin everything again must keep running, because its exit would end the data plane.
#[test]
fn agent_that_cannot_repin_logs_it_and_keeps_running() {
    let mut bed = Bed::with_web(&PODS);
    let bpffs = bed.cluster.bpffs(1);
    let other = bed.cluster.folder().join("other");
    fs::create_dir(&other).unwrap();
    run(Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&other)).unwrap();
    fs::create_dir(other.join("lb")).unwrap();
    let lock = Flock::lock(fs::File::open(other.join("lb")).unwrap(), FlockArg::LockExclusive).unwrap();
    let traffic = bed.traffic();
    run(Command::new("mount").arg("--bind").arg(&other).arg(&bpffs)).unwrap();
    let agent = bed.agent.take().unwrap();
    let said = || agent.log().contains("the data plane ends when this agent does").then_some(());
    wait_for(PATIENCE, said).unwrap();
    traffic.progresses().unwrap();
    assert_eq!(agent.log().matches("the data plane ends when this agent does").count(), 1, "{}", agent.log());
    drop(lock);
    assert!(!agent.wait().unwrap().success());
    bed.start_agent();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// Replaces a file by a rename, as the kubelet does.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

#[test]
fn configuration_is_reloaded_under_load_and_errors_in_it_change_nothing() {
    let mut bed = Bed::with_web(&PODS);
    bed.agent.take().unwrap().terminate().unwrap();
    let config = bed.cluster.folder().join("config.yaml");
    fs::write(&config, "syn-retries: 1\n").unwrap();
    bed.start_agent_with(&["--config", config.to_str().unwrap()]);
    let traffic = bed.traffic();
    replace(&config, "syn-retires: 2\n");
    let agent = bed.agent.take().unwrap();
    wait_for(PATIENCE, || agent.log().contains("goes on as it was started").then_some(())).unwrap();
    traffic.progresses().unwrap();
    // The agent ends because of this change; the test restarts it, as a supervisor would.
    replace(&config, "syn-retries: 2\n");
    assert!(!agent.wait().unwrap().success());
    bed.start_agent_with(&["--config", config.to_str().unwrap()]);
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}
