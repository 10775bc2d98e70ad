//! Tests of devices that appear after the start of the agent, carry VLAN tags, have no Ethernet header, or also have
//! filters of other software.

use std::{fs, io, time::Duration};

use lb_common::LAYOUT_VERSION;
use lb_tests::{
    client::{Answer, Connection, PATIENCE, ask_http, ask_udp},
    cluster::{ClientLink, veth},
    netns::Netns,
    one_of_three, skip,
    stopwatch::Stopwatch,
    wait_for,
};

use crate::bed::{Bed, WEB, ask_briefly, http, udp, vips};

/// Asserts that the client is served in both families, and that HTTP servers see the client's own address. The pod
/// `pod2` is on node1, `pod3` on node2.
fn assert_works_for_the_client(bed: &Bed) {
    assert_serves_the_client(bed, |answer| answer.seen == answer.local);
}

/// Asserts that the client is served in both families, over TCP and UDP, and that `is_right` accepts each HTTP answer.
fn assert_serves_the_client(bed: &Bed, is_right: impl Fn(&Answer) -> bool) {
    for vip in WEB {
        for _ in 0..10 {
            let answer = ask_http(&bed.cluster.client, http(vip)).unwrap();
            assert!(is_right(&answer), "{answer:?}");
        }
        ask_udp(&bed.cluster.client, udp(vip), 64).unwrap();
        ask_udp(&bed.cluster.client, udp(vip), 8_192).unwrap();
        let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
        connection.download(4 << 20).unwrap();
        connection.upload(4 << 20).unwrap();
    }
}

#[test]
fn new_pod_is_served_within_a_second() {
    let mut bed = Bed::with_web(&["pod2"]);
    let attempt = || {
        remove_pod5(&mut bed);
        bed.cluster.add_pod("pod5", 1, 5).unwrap();
        let stopwatch = Stopwatch::start();
        for vip in WEB {
            let ask = || ask_briefly(bed.netns("pod5"), vip);
            assert_eq!(wait_for(Duration::from_secs(1), ask).as_deref(), Some("pod2"), "{vip}");
        }
        stopwatch.elapsed()
    };
    one_of_three(attempt, |took| *took < Duration::from_secs(1));
    // The new pod can also be a backend.
    bed.put("web", WEB, &["pod5"]);
    for vip in WEB {
        let ask = || ask_briefly(&bed.cluster.client, vip).filter(|server| server == "pod5");
        assert!(wait_for(Duration::from_secs(1), ask).is_some(), "{vip}");
        assert_eq!(ask_http(bed.netns("pod5"), http(vip)).unwrap().server, "pod5", "hairpin of a late pod");
    }
}

#[test]
fn device_that_refuses_programs_is_a_condition_and_delays_no_other() {
    const CONDITIONS: &str = r#"lb_conditions{about="devices"}"#;
    if skip::is_older_than(6, 6) {
        return skip::whole("the kernel has no tcx, whose pins the test blocks");
    }
    let mut bed = Bed::with_web(&["pod2"]);
    let before = bed.metric(CONDITIONS);
    // A folder at the path where the agent pins a link makes the pinning fail.
    let pin = bed.cluster.bpffs(1).join(format!("lb/v{LAYOUT_VERSION}/links/4242-ingress"));
    fs::create_dir(&pin).unwrap();
    let (node, client) = (&bed.cluster.node1, bed.cluster.client.name());
    node.ip(&format!("link add pod9 index 4242 type veth peer name pod9 netns {client}\nlink set pod9 up\n"))
        .unwrap();
    wait_for(PATIENCE, || (bed.metric(CONDITIONS) > before).then_some(())).expect("a condition");
    bed.cluster.add_pod("pod5", 1, 5).unwrap();
    let ask = || ask_briefly(bed.netns("pod5"), WEB[0]);
    assert_eq!(wait_for(PATIENCE, ask).as_deref(), Some("pod2"));
    fs::remove_dir(&pin).unwrap();
    wait_for(PATIENCE, || (bed.metric(CONDITIONS) == before).then_some(())).expect("no condition");
}

#[test]
fn pods_are_served_when_their_devices_reappear() {
    let mut bed = Bed::with_web(&["pod2"]);
    for round in 0..5 {
        bed.cluster.add_pod("pod5", 1, 5).unwrap();
        let ask = || ask_briefly(bed.netns("pod5"), WEB[round % 2]);
        assert!(wait_for(Duration::from_secs(1), ask).is_some(), "round {round}");
        remove_pod5(&mut bed);
    }
    assert_works_for_the_client(&bed);
}

/// Removes pod5, if it exists, and waits until its device is gone: the kernel removes a namespace's devices some time
/// after its last user has ended.
fn remove_pod5(bed: &mut Bed) {
    bed.cluster.pods.retain(|pod| pod.name != "pod5");
    let gone = || (!devices(&bed.cluster.node1).contains("pod5")).then_some(());
    wait_for(Duration::from_secs(5), gone).unwrap();
}

/// The content of `/proc/net/dev` in a namespace.
fn devices(netns: &Netns) -> String {
    netns.run(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap()
}

/// Whether the kernel supports VLAN devices; if not, reports that the test is skipped.
fn has_vlan_devices() -> bool {
    let probe = lb_tests::cluster::Cluster::for_test(ClientLink::Ethernet).unwrap();
    // `ip` makes the kernel load the module for VLANs, if it exists.
    let made = probe.client.ip("link add link eth0 name probe type vlan id 100\n");
    if let Err(error) = &made {
        skip::whole(&format!("no 802.1Q devices (priority tags are tested all the same): {error:#}"));
    }
    made.is_ok()
}

#[test]
fn vlan_device_is_served() {
    if has_vlan_devices() {
        assert_works_for_the_client(&Bed::with_link_and_web(ClientLink::Vlan(100), &["pod2", "pod3"]));
    }
}

#[test]
fn vlan_device_on_a_served_parent_device_is_served() {
    if !has_vlan_devices() {
        return;
    }
    for masquerade in [false, true] {
        let arguments = ["--forwarding", "direct", "--masquerade-all"];
        let mut bed = Bed::without_agent(ClientLink::Vlan(100), &["pod2", "pod3"]);
        // The agent serves the parent as a wire device because the parent has an address. At ingress, the parent's
        // programs run before those of the VLAN device, but the kernel has already taken the tag out of the frame.
        bed.cluster.node1.ip("address add 192.0.2.77/24 dev eth0\n").unwrap();
        bed.start_agent_with(&arguments[..if masquerade { 3 } else { 2 }]);
        assert_serves_the_client(&bed, |answer| (answer.seen == answer.local) != masquerade);
    }
}

#[test]
fn priority_tagged_frames_are_served() {
    assert_works_for_the_client(&Bed::with_link_and_web(ClientLink::PriorityTagged, &["pod2", "pod3"]));
}

#[test]
fn device_without_ethernet_header_is_served() {
    let bed = Bed::with_link_and_web(ClientLink::Layer3, &["pod2", "pod3"]);
    assert_works_for_the_client(&bed);
    bed.put("empty", vips(11), &[]);
    for vip in vips(11) {
        let refused = |error: &io::Error| error.kind() == lb_tests::client::REFUSED;
        let ask = || ask_http(&bed.cluster.client, http(vip)).err().filter(refused);
        assert!(wait_for(Duration::from_secs(1), ask).is_some(), "{vip}");
        assert!(ask_udp(&bed.cluster.client, udp(vip), 64).is_err_and(|error| refused(&error)), "{vip}");
    }
}

/// As with WireGuard, xfrm or BGP unnumbered, routes lead through the device, but the node's addresses are on another
/// device.
#[test]
fn tunnel_without_address_is_served() {
    let mut bed = Bed::without_agent(ClientLink::Layer3, &["pod2", "pod3"]);
    bed.cluster
        .node1
        .ip("address flush dev eth0\n\
             address add 198.51.100.1/32 dev lo\naddress add fd00:198:51:100::1/128 dev lo nodad\n\
             route add 198.51.100.0/24 dev eth0 src 198.51.100.1\n\
             route add fd00:198:51:100::/64 dev eth0 src fd00:198:51:100::1\n")
        .unwrap();
    bed.start_agent_with(&[]);
    assert_works_for_the_client(&bed);
}

/// Number of packets that a device has sent, from `/proc/net/dev`.
fn sent_packets(netns: &Netns, device: &str) -> u64 {
    let devices = devices(netns);
    let line = devices.lines().find_map(|line| line.trim().strip_prefix(&format!("{device}:"))).unwrap();
    line.split_whitespace().nth(9).unwrap().parse().unwrap()
}

#[test]
fn foreign_tc_filters_keep_working() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    let node1 = &bed.cluster.node1;
    // Mirrors all IPv4 packets in both directions, as a monitoring tool would.
    veth((node1, "mirror0"), (node1, "mirror1")).unwrap();
    node1.ip("link set mirror0 up\nlink set mirror1 up\n").unwrap();
    tc(node1, "qdisc replace dev eth0 clsact");
    for hook in ["ingress", "egress"] {
        tc(
            node1,
            &format!(
                "filter add dev eth0 {hook} protocol ip u32 match u32 0 0 action mirred egress mirror dev mirror0"
            ),
        );
    }
    let before = sent_packets(node1, "mirror0");
    for _ in 0..10 {
        ask_udp(&bed.cluster.client, udp(WEB[0]), 64).unwrap();
    }
    // The mirror must have got at least one packet for each datagram and each reply.
    let mirrored = sent_packets(node1, "mirror0") - before;
    assert!(mirrored >= 20, "only {mirrored} packets reached the other filters");
    assert_works_for_the_client(&bed);
}

fn tc(netns: &Netns, arguments: &str) {
    lb_tests::agent::run(netns.command("tc").args(arguments.split(' '))).unwrap();
}
