//! Tests that the data plane outlives the agent: restarts, SIGTERM, cleanup.

use std::{fs, io, process::Command};

use aya::programs::{SchedClassifier, TcAttachType};
use lb_datapath::AttachMode;
use lb_tests::{
    agent::{self, run},
    cleanup::agent_files,
    client::{Connection, PATIENCE, Transfer, ask_http, ask_udp, udp_socket},
    cluster::ClientLink,
    netns::Netns,
    wait_for,
};

use crate::bed::{Bed, RANGES, WEB, ask_briefly, http, udp, vips};

/// Number of bytes of a transfer that outlives several agents.
const BYTES: u64 = 100_000_000;

/// A running download in each family, with the name of the server that sends it.
fn running_downloads(netns: &Netns) -> Vec<(String, Transfer)> {
    WEB.into_iter()
        .map(|vip| {
            let mut connection = Connection::open(netns, http(vip)).unwrap();
            (connection.ask().unwrap().server, connection.download_slowly(BYTES))
        })
        .collect()
}

fn assert_served(bed: &Bed) {
    for vip in WEB {
        ask_http(&bed.cluster.client, http(vip)).unwrap();
        ask_udp(&bed.cluster.client, udp(vip), 64).unwrap();
        ask_http(bed.netns("pod1"), http(vip)).unwrap();
    }
}

#[test]
fn killed_agent_restarts_under_a_running_transfer() {
    let mut bed = Bed::with_web(&["pod2", "pod3", "pod4"]);
    let client = bed.cluster.client.clone();
    let downloads = running_downloads(&client);
    let mut connection = Connection::open(&client, http(WEB[1])).unwrap();
    let first = connection.ask().unwrap();
    let socket = udp_socket(&client, udp(WEB[0])).unwrap();
    let first_datagram = lb_tests::client::echo(&socket, b"?").unwrap();

    for _ in 0..2 {
        bed.agent.take().unwrap().kill().unwrap();
        assert_served(&bed);
        bed.start_agent();
        assert_eq!(connection.ask().unwrap(), first);
        assert_eq!(lb_tests::client::echo(&socket, b"?").unwrap(), first_datagram);
    }
    assert!(downloads.iter().all(|(_, transfer)| !transfer.is_finished()), "a transfer has ended early");
    for (server, transfer) in downloads {
        assert_eq!(transfer.join().unwrap(), server);
    }
    bed.put("web", WEB, &["pod1"]);
    wait_for(PATIENCE, || (ask_http(&client, http(WEB[0])).unwrap().server == "pod1").then_some(())).unwrap();
}

#[test]
fn sigterm_leaves_the_data_plane_working() {
    let mut bed = Bed::with_web(&["pod2", "pod3"]);
    let downloads = running_downloads(&bed.cluster.client);
    let status = bed.agent.take().unwrap().terminate().unwrap();
    assert!(status.success(), "{status}");
    assert_served(&bed);
    for (server, transfer) in downloads {
        assert_eq!(transfer.join().unwrap(), server);
    }
    assert_served(&bed);
}

/// Number of routes of type `unreachable` on node1.
fn unreachable_routes(bed: &Bed) -> usize {
    let list = |family| {
        let output =
            run(bed.cluster.node1.command("ip").args([family, "route", "show", "type", "unreachable"]))
                .unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    list("-4") + list("-6")
}

/// A pod that starts while no agent runs has a device without programs. Routes of the earlier agent keep the pod's
/// packets to cluster IPs from leaving the node by the default route: routes to the device `lb-catch`, and
/// `unreachable` routes, which apply if that device is missing.
#[test]
fn packets_of_a_pod_that_starts_without_an_agent_do_not_leave_the_node() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    bed.start_agent_with(&RANGES);
    bed.cluster
        .node1
        .ip("route add default via 198.51.100.2\nroute add default via fd00:198:51:100::2\n")
        .unwrap();
    wait_for(PATIENCE, || unreachable_routes(&bed).eq(&2).then_some(())).unwrap();
    let has_catch_device = || bed.cluster.node1.ip("link show lb-catch").ok();
    wait_for(PATIENCE, has_catch_device).unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    bed.cluster.node1.ip("link delete lb-catch").unwrap();
    bed.cluster.add_pod("pod5", 1, 5).unwrap();
    for vip in WEB {
        let error = ask_http(bed.netns("pod5"), http(vip)).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable),
            "{vip}: {error}"
        );
    }
    bed.start_agent_with(&RANGES);
    for vip in WEB {
        let ask = || ask_briefly(bed.netns("pod5"), vip);
        assert_eq!(wait_for(PATIENCE, ask).as_deref(), Some("pod2"), "{vip}");
    }
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    agent::ask(&bed.cluster.node1, &bed.cluster.bpffs(1), &["cleanup"]).unwrap();
    assert_eq!(unreachable_routes(&bed), 0);
    assert!(bed.cluster.node1.ip("link show lb-catch").is_err(), "cleanup removes the catch device");
}

#[test]
fn edits_during_agent_downtime_are_served_after_its_restart() {
    let mut bed = Bed::with_web(&["pod2"]);
    bed.put("old", vips(11), &["pod2"]);
    let client = bed.cluster.client.clone();
    wait_for(PATIENCE, || ask_briefly(&client, vips(11)[0])).unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    bed.cluster.manifests.remove("old").unwrap();
    bed.put("new", vips(12), &["pod3"]);
    bed.put("web", WEB, &["pod1"]);
    bed.start_agent();
    assert_eq!(ask_http(&client, http(WEB[0])).unwrap().server, "pod1");
    assert_eq!(ask_http(&client, http(vips(12)[1])).unwrap().server, "pod3");
    assert!(ask_http(&client, http(vips(11)[0])).is_err());
}

/// Names of the programs at tcx hooks of node1's devices; empty on Linux before 6.6, which has no tcx.
fn programs(bed: &Bed) -> Vec<String> {
    let mut names = Vec::new();
    if AttachMode::probe().unwrap() == AttachMode::Clsact {
        return names;
    }
    let query = |device, hook| SchedClassifier::query_tcx(device, hook).map_err(io::Error::other);
    for device in ["eth0", "eth1", "pod1", "pod2"] {
        for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
            let (_, programs) = bed.cluster.node1.run(|| query(device, hook)).unwrap();
            names.extend(programs.iter().map(|program| program.name_as_str().unwrap_or("?").to_owned()));
        }
    }
    names
}

/// Whether a device has a clsact qdisc, to which the agent attaches programs on Linux before 6.6.
fn has_clsact(netns: &Netns) -> bool {
    let output = run(netns.command("tc").args(["qdisc", "show"])).unwrap();
    String::from_utf8(output.stdout).unwrap().contains("clsact")
}

#[test]
fn cleanup_beside_a_running_agent_removes_nothing() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    bed.start_agent_with(&RANGES);
    let (node1, bpffs) = (bed.cluster.node1.clone(), bed.cluster.bpffs(1));
    // The agent adds a route for each family some time after it is healthy.
    let has_routes = || (unreachable_routes(&bed) == 2).then_some(());
    wait_for(PATIENCE, has_routes).expect("unreachable routes");
    let programs_before = programs(&bed);
    // The second path is mistyped: nothing is pinned there.
    for given in [bpffs, bed.cluster.folder().join("elsewhere")] {
        let error = agent::ask(&node1, &given, &["cleanup"]).unwrap_err().to_string();
        assert!(error.contains("another lb-agent"), "{error}");
        assert_eq!(unreachable_routes(&bed), 2);
        assert_eq!(programs(&bed), programs_before);
        assert_served(&bed);
    }
}

#[test]
fn cleanup_leaves_nothing_behind() {
    let mut bed = Bed::with_web(&["pod2"]);
    let node1 = bed.cluster.node1.clone();
    let bpffs = bed.cluster.bpffs(1);
    assert!(has_clsact(&node1) || programs(&bed).len() == 8, "{:?}", programs(&bed));
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    let files = agent_files(&bpffs);
    assert!(!files.is_empty(), "the agent keeps a file for the next one");
    let output = agent::ask(&node1, &bpffs, &["cleanup"]).unwrap();
    assert_eq!(files.iter().find(|file| file.exists()), None);
    // The kernel removes links a little later.
    let gone = || programs(&bed).is_empty().then_some(());
    wait_for(PATIENCE, gone).unwrap_or_else(|| panic!("{:?}", programs(&bed)));
    assert!(!has_clsact(&node1));
    let pins = fs::read_dir(&bpffs).map(|folder| folder.count()).unwrap_or(0);
    assert_eq!(pins, 0, "{output:?}");
    for vip in WEB {
        assert!(ask_http(&bed.cluster.client, http(vip)).is_err());
    }
    // A second cleanup finds nothing, which is no error.
    agent::ask(&node1, &bpffs, &["cleanup"]).unwrap();
    // After a cleanup, an agent can be started again.
    bed.start_agent();
    assert_served(&bed);
}

#[test]
fn service_list_shows_frontends_and_backends() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    let list = bed.json(&["service", "list"]);
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 2, "one entry for each port: {list:?}");
    for entry in list {
        assert_eq!((entry["namespace"].as_str(), entry["name"].as_str()), (Some("default"), Some("web")));
        let addresses: Vec<_> =
            entry["frontends"].as_array().unwrap().iter().map(|f| f["address"].as_str().unwrap()).collect();
        assert_eq!(addresses.len(), 2, "{entry}");
        assert!(WEB.iter().all(|vip| addresses.contains(&vip.to_string().as_str())), "{entry}");
        assert_eq!(entry["backends"].as_array().unwrap().len(), 4, "{entry}");
    }
}

#[test]
fn bpftool_shows_maps_with_named_fields() {
    let bed = Bed::with_web(&["pod2"]);
    let find = run(Command::new("find").arg(bed.cluster.bpffs(1)).args(["-name", "SERVICES"])).unwrap();
    let path = String::from_utf8(find.stdout).unwrap();
    let dump = run(Command::new("bpftool").args(["map", "dump", "pinned", path.trim()])).unwrap();
    let dump = String::from_utf8(dump.stdout).unwrap();
    assert!(dump.contains("backends_count"), "{dump}");
}
