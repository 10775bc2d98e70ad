//! Tests of the testbed itself, without an agent.

use std::{fs, time::Duration};

use lb_tests::{
    client::{Connection, PATIENCE, ask_http, ask_udp},
    cluster::{CLIENT, ClientLink, Cluster, PodLink, Wiring},
    icmp::ping,
    stopwatch::Stopwatch,
    wait_for,
};

#[test]
fn clients_and_pods_reach_every_pod_in_each_tested_wiring() {
    let links = [
        ClientLink::Ethernet,
        ClientLink::Routed,
        ClientLink::PriorityTagged,
        ClientLink::Layer3,
        ClientLink::Lan,
    ];
    let bridged = Wiring { link: ClientLink::Lan, pods: PodLink::Bridge, strict: true };
    for wiring in links.into_iter().map(Wiring::from).chain([bridged]) {
        let cluster = Cluster::for_test(wiring).unwrap();
        for pod in &cluster.pods {
            for like in CLIENT {
                let answer = ask_http(&cluster.client, pod.http(like)).unwrap();
                assert_eq!((&answer.server, answer.seen, answer.seen.ip()), (&pod.name, answer.local, like));
                assert_eq!(ask_udp(&cluster.client, pod.udp(like), 8000).unwrap().server, pod.name);
                assert_eq!(ask_http(&cluster.pods[0].netns, pod.http(like)).unwrap().server, pod.name);
                assert_eq!(
                    ping(&cluster.client, pod.address(like), 56).unwrap(),
                    pod.address(like),
                    "{wiring:?}"
                );
            }
        }
    }
}

#[test]
fn transfers_are_verified_in_both_directions() {
    let cluster = Cluster::for_test(ClientLink::Ethernet).unwrap();
    let pod = cluster.pod("pod3").unwrap();
    let mut connection = Connection::open(&cluster.client, pod.http(CLIENT[0])).unwrap();
    assert_eq!(connection.download(10_000_000).unwrap(), "pod3");
    assert_eq!(connection.upload(10_000_000).unwrap().server, "pod3");
    let slow = connection.download_slowly(10_000_000);
    wait_for(PATIENCE, || (slow.received() > 0).then_some(())).unwrap();
    assert!(!slow.is_finished(), "{}", slow.received());
    assert_eq!(slow.join().unwrap(), "pod3");
}

#[test]
fn dropped_cluster_leaves_nothing_behind() {
    let cluster = Cluster::for_test(ClientLink::Ethernet).unwrap();
    let (folder, name) = (cluster.folder().to_owned(), cluster.client.name().to_owned());
    assert!(folder.exists());
    drop(cluster);
    assert!(!folder.exists());
    let left = fs::read_dir("/run/netns").unwrap().any(|entry| entry.unwrap().file_name() == *name);
    assert!(!left);
}

/// Creating a cluster takes about 80 ms on an idle machine.
#[test]
fn cluster_is_made_within_a_second() {
    let made = || {
        let stopwatch = Stopwatch::start();
        let _cluster = Cluster::for_test(ClientLink::Ethernet).unwrap();
        stopwatch.elapsed()
    };
    // One attempt may wait for locks of the kernel, which other tests hold while they remove their namespaces.
    let fastest = (0..3).map(|_| made()).min().unwrap();
    assert!(fastest < Duration::from_secs(1), "making a cluster took {fastest:?}, without waits");
}

#[test]
fn panic_leaves_nothing_behind() {
    let folder = std::thread::spawn(|| -> () {
        let cluster = Cluster::for_test(ClientLink::Ethernet).unwrap();
        std::panic::panic_any(cluster.folder().to_owned());
    })
    .join()
    .unwrap_err();
    let folder = folder.downcast_ref::<std::path::PathBuf>().unwrap();
    assert!(!folder.exists());
    let prefix = folder.file_name().unwrap().to_str().unwrap();
    let names = fs::read_dir("/run/netns").unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_str().unwrap().starts_with(prefix)).count(), 0);
}
