//! Tests that changes of the node's devices and addresses, and updates that the kernel refuses, do not disturb other
//! traffic.

use std::{net::SocketAddr, process::Command, thread, time::Duration};

use lb_common::LAYOUT_VERSION;
use lb_tests::{
    agent::run,
    client::PATIENCE,
    cluster::{HTTP_PORT, veth},
    traffic::{Kind, Traffic},
    wait_for,
};

use crate::bed::{Bed, WEB, ask_briefly, http, udp, vips};

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];
const NODE_PORT: u16 = 30_080;
/// How long to wait until a device or an address is served.
const SOON: Duration = Duration::from_secs(2);

/// Starts traffic of the external client and of the node. None of it passes the device of pod1.
fn others(bed: &Bed) -> Traffic {
    let clients = [&bed.cluster.client, &bed.cluster.node1].into_iter().flat_map(|netns| {
        let of = move |vip| {
            let tcp = Kind::TCP.map(|kind| (netns, kind, http(vip)));
            tcp.into_iter().chain(Kind::UDP.map(|kind| (netns, kind, udp(vip))))
        };
        WEB.into_iter().flat_map(of)
    });
    Traffic::start(clients).unwrap()
}

/// Sets the device of pod1 up, with its addresses and routes: the kernel removes routes and IPv6 addresses when a
/// device goes down.
fn wire_pod1(bed: &Bed, device: &str) {
    bed.cluster
        .node1
        .ip(&format!(
            "link set {device} up\naddress replace 10.244.1.1/32 dev {device}\naddress replace fd00:10:244:1::1/128 dev {device} nodad\n\
             route replace 10.244.1.11/32 dev {device}\nroute replace fd00:10:244:1::11/128 dev {device}\n"
        ))
        .unwrap();
}

fn assert_pod1_is_served(bed: &Bed, why: &str) {
    for vip in WEB {
        assert!(wait_for(SOON, || ask_briefly(bed.netns("pod1"), vip)).is_some(), "{why}: {vip}");
    }
}

#[test]
fn renamed_or_recreated_device_is_served_again_and_other_traffic_is_unharmed() {
    let bed = Bed::with_web(&PODS);
    let node1 = &bed.cluster.node1;
    let traffic = others(&bed);
    assert_pod1_is_served(&bed, "at first");

    node1.ip("link set pod1 down\nlink set pod1 name other1\n").unwrap();
    wire_pod1(&bed, "other1");
    assert_pod1_is_served(&bed, "renamed");

    node1.ip("link delete other1\n").unwrap();
    traffic.progresses().unwrap();
    veth((node1, "pod1"), (bed.netns("pod1"), "eth0")).unwrap();
    wire_pod1(&bed, "pod1");
    bed.netns("pod1")
        .ip("address add 10.244.1.11/32 dev eth0\naddress add fd00:10:244:1::11/128 dev eth0 nodad\nlink set eth0 up\n\
             route add 10.244.1.1 dev eth0\nroute add fd00:10:244:1::1 dev eth0\n\
             route add default via 10.244.1.1\nroute add default via fd00:10:244:1::1\n")
        .unwrap();
    assert_pod1_is_served(&bed, "recreated");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

#[test]
fn node_address_changes_break_no_connections() {
    let bed = Bed::with_web(&PODS);
    let node1 = &bed.cluster.node1;
    let mut exposed = bed.service("exposed", vips(20), &["pod2"]);
    exposed.exposure.kind = lb_tests::manifests::Type::NodePort;
    exposed.ports.truncate(1);
    exposed.ports[0].node_port = Some(NODE_PORT);
    assert_eq!(exposed.ports[0].target_port, HTTP_PORT);
    bed.cluster.manifests.put(&exposed).unwrap();
    let traffic = bed.traffic();
    let mut old = None;
    for last in [9, 10, 11] {
        let change = old.map_or_else(String::new, |old: u8| {
            format!(
                "address del 198.51.100.{old}/24 dev eth0\naddress del fd00:198:51:100::{old}/64 dev eth0\n"
            )
        });
        let change = format!(
            "{change}address add 198.51.100.{last}/24 dev eth0\naddress add fd00:198:51:100::{last}/64 dev eth0 nodad\n"
        );
        node1.ip(&change).unwrap();
        for address in [format!("198.51.100.{last}"), format!("fd00:198:51:100::{last}")] {
            let node_port = SocketAddr::new(address.parse().unwrap(), NODE_PORT);
            let connect = || std::net::TcpStream::connect_timeout(&node_port, Duration::from_millis(100));
            let served = || bed.cluster.client.run(connect).ok();
            assert!(wait_for(SOON, served).is_some(), "{node_port}");
        }
        old = Some(last);
        traffic.progresses().unwrap();
    }
    traffic.stop().assert_unharmed();
}

/// A frozen map stands for any update that the kernel keeps refusing.
#[test]
fn refused_updates_are_retried_after_growing_pauses_while_other_services_answer() {
    let bed = Bed::with_web(&PODS);
    let map = bed.cluster.bpffs(1).join(format!("lb/v{LAYOUT_VERSION}/SERVICES"));
    run(Command::new("bpftool").args(["map", "freeze", "pinned"]).arg(map)).unwrap();
    let traffic = others(&bed);
    bed.put("later", vips(12), &["pod3"]);
    let failures = || bed.metric("lb_sync_failures_total");
    wait_for(PATIENCE, || (failures() >= 3).then_some(())).expect("the agent tries again");
    // The pauses double, from 0.1 s to 5 s: the third one takes 0.4 s.
    let before = failures();
    thread::sleep(Duration::from_secs(3));
    let more = failures() - before;
    assert!((1..=3).contains(&more), "{more} attempts in 3 s");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}
