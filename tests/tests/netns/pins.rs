//! Removed pins: a running agent restores them, and the first line of `status` lists those that are missing.

use std::{fs, path::PathBuf, process::Command};

use lb_common::LAYOUT_VERSION;
use lb_tests::{
    agent::{self, run},
    client::PATIENCE,
    wait_for,
};

use crate::bed::{Bed, WEB, ask_briefly};

const PODS: [&str; 2] = ["pod2", "pod3"];

/// A file in the folder of pins on node 1.
fn pin(bed: &Bed, name: &str) -> PathBuf {
    bed.cluster.bpffs(1).join(format!("lb/v{LAYOUT_VERSION}/{name}"))
}

/// The pin of the first ingress link of node 1 by name.
fn any_link(bed: &Bed) -> PathBuf {
    let links = fs::read_dir(pin(bed, "links")).unwrap().map(|entry| entry.unwrap().path());
    links.filter(|path| path.to_str().unwrap().ends_with("-ingress")).min().unwrap()
}

/// Whether `status` shows a running agent, and nothing that is missing.
fn misses_nothing(shown: &str) -> bool {
    !shown.starts_with("Missing") && shown.contains("\nAgent      running")
}

/// The output of `status`, or its error.
fn status(bed: &Bed) -> String {
    let asked = agent::ask(&bed.cluster.node1, &bed.cluster.bpffs(1), &["status"]);
    asked.map_or_else(|error| error.to_string(), |output| String::from_utf8(output.stdout).unwrap())
}

fn map_id(path: &PathBuf) -> u64 {
    let output = run(Command::new("bpftool").args(["-j", "map", "show", "pinned"]).arg(path)).unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    shown["id"].as_u64().unwrap()
}

#[test]
fn running_agent_restores_removed_pins_and_logs_it() {
    let bed = Bed::with_web(&PODS);
    let names = ["SERVICES", "FLOWS", "LAYOUT", "CONSTANTS", "programs/tc_ingress", "links/sock_recvmsg4"];
    let ids: Vec<u64> = names[..2].iter().map(|name| map_id(&pin(&bed, name))).collect();
    let traffic = bed.traffic();
    for name in names {
        fs::remove_file(pin(&bed, name)).unwrap();
    }
    let restored = || names.iter().all(|name| pin(&bed, name).exists()).then_some(());
    wait_for(PATIENCE, restored).unwrap();
    let found: Vec<u64> = names[..2].iter().map(|name| map_id(&pin(&bed, name))).collect();
    assert_eq!(found, ids, "the maps that the programs use");
    let shown = status(&bed);
    assert!(misses_nothing(&shown), "{shown}");
    for name in ["Shortage   pins", "SERVICES", "FLOWS", "CONSTANTS", "tc_ingress", "sock_recvmsg4"] {
        assert!(shown.contains(name), "{name} is missing in: {shown}");
    }
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

#[test]
fn status_lists_a_device_without_its_program_until_the_agent_attaches_it_again() {
    let bed = Bed::with_web(&PODS);
    let link = any_link(&bed);
    // The agent may attach the program again before `status` looks.
    let missing = || {
        fs::remove_file(&link).unwrap();
        let shown = status(&bed);
        let is_missing =
            shown.starts_with("Missing    programs on ") && shown.contains(" ingress: the agent");
        if !is_missing {
            wait_for(PATIENCE, || link.exists().then_some(())).unwrap_or_else(|| panic!("{shown}"));
        }
        is_missing.then_some(())
    };
    wait_for(PATIENCE, missing).expect("status lists the device");
    // Any change of a device makes the agent check all links at once.
    bed.cluster.node1.ip("link add other type veth peer name another\n").unwrap();
    wait_for(PATIENCE, || link.exists().then_some(())).unwrap();
    wait_for(PATIENCE, || misses_nothing(&status(&bed)).then_some(())).unwrap();
    wait_for(PATIENCE, || ask_briefly(bed.netns("pod1"), WEB[0])).unwrap();
}

#[test]
fn status_lists_what_is_missing_while_no_agent_runs() {
    let mut bed = Bed::with_web(&PODS);
    bed.agent.take().unwrap().kill().unwrap();
    assert!(status(&bed).starts_with("Agent      not running"), "{}", status(&bed));
    let link = any_link(&bed);
    for (path, what) in [
        (pin(&bed, "EVENTS"), "pins of maps EVENTS"),
        (pin(&bed, "programs/tc_egress"), "pins of programs tc_egress"),
        (link, " ingress"),
        (pin(&bed, "links/sock_connect4"), "programs on sockets: sock_connect4"),
    ] {
        fs::remove_file(path).unwrap();
        let shown = status(&bed);
        let first = shown.lines().next().unwrap_or_default();
        assert!(first.starts_with("Missing    ") && first.contains(what), "{what}: {shown}");
        assert!(first.contains("start the agent"), "{shown}");
    }
    fs::remove_file(pin(&bed, "SERVICES")).unwrap();
    let shown = status(&bed);
    assert!(
        shown.contains("the pins of these maps in ") && shown.contains(" were removed: SERVICES, EVENTS."),
        "{shown}"
    );
    run(Command::new("umount").arg(bed.cluster.bpffs(1))).unwrap();
    let shown = status(&bed);
    assert!(shown.contains("no BPF file system is mounted at"), "{shown}");
    bed.start_agent();
    assert!(misses_nothing(&status(&bed)), "{}", status(&bed));
    wait_for(PATIENCE, || ask_briefly(bed.netns("pod1"), WEB[0])).unwrap();
}
