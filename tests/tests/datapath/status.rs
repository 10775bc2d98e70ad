//! Tests of the reports of `status` and `check`, and of the packet counters.

use std::net::UdpSocket;

use lb_common::{Outcome, protocol};
use lb_datapath::{Direction, Pinned, ProbeResult, check};

use super::{
    contents::steps,
    flows::{NOW, flow, insert},
    sandbox::{Sandbox, ip, sync, wire},
};

#[test]
fn status_reports_map_fill_and_attachments() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    datapath.maps().apply(&steps(10, 4).0).unwrap();
    insert(&datapath.conntrack(), &flow(protocol::TCP, 1, NOW));
    sync(&mut datapath.attacher().unwrap(), &[wire("wire0", 50)]);
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
    let fill: Vec<_> =
        pinned.fill().unwrap().iter().map(|map| (map.name, map.entries, map.capacity)).collect();
    let expected = [
        ("SERVICES", 10, 1024),
        ("BACKENDS", 40, 4096),
        ("TABLES", 0, 4096),
        ("FLOWS", 2, 1024),
        ("CONNTRACK", 0, 1024),
        ("AFFINITY", 0, 1024),
        ("SERVICE_NAMES", 10, 1024),
        ("VIPS", 0, 4096),
        ("SOURCE_RANGES", 0, 262_144),
        ("LIMITS", 0, 16_384),
        ("ENDPOINT_NAMES", 40, 4096),
    ];
    assert_eq!(fill, expected);
    let attachments = pinned.attachments().unwrap();
    let hooks: Vec<_> = attachments.iter().map(|at| (at.device.as_str(), at.direction)).collect();
    assert_eq!(hooks, [("wire0", Direction::Ingress), ("wire0", Direction::Egress)]);
}

#[test]
fn packets_without_a_service_are_counted() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    let stats = datapath.stats().unwrap();
    assert_eq!(stats.read().unwrap(), [0; Outcome::COUNT]);
    sync(&mut datapath.attacher().unwrap(), &[wire("wire0", 50)]);
    ip("addr add 192.0.2.1/24 dev wire0");
    let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
    ip("neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev wire0");
    for _ in 0..5 {
        socket.send_to(b"datagram", "192.0.2.2:9").unwrap();
    }
    let counters = stats.read().unwrap();
    assert_eq!(counters[Outcome::NoService as usize], 5, "{counters:?}");
}

#[test]
fn check_finds_no_missing_feature_and_creates_nothing() {
    let sandbox = Sandbox::new();
    let probes = check(&sandbox.bpffs());
    for probe in &probes {
        println!("{:<16} {:<9} {} {}", probe.name, probe.result.as_str(), probe.detail, probe.advice);
    }
    assert!(probes.iter().all(|probe| probe.result != ProbeResult::Missing));
    assert!(!sandbox.bpffs().exists(), "a check creates nothing");
}
