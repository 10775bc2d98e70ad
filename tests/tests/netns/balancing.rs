//! Tests how connections spread over backends, and which source addresses client and backend see.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{SocketAddr, UdpSocket},
};

use lb_tests::{
    client::{Answer, Connection, PATIENCE, any_address, ask_http, ask_udp},
    netns::Netns,
    patience, wait_for,
};

use crate::bed::{Bed, WEB, http, udp, vips};

const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];

/// Number of answers from each server, in 200 requests.
fn count(ask: impl Fn() -> io::Result<Answer>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for _ in 0..200 {
        *counts.entry(ask().unwrap().server).or_default() += 1;
    }
    counts
}

/// Asserts that every backend gets its share. Of 200 requests, each of 4 backends gets 50 ± 6.1; the limit ± 34 is
/// 5.5 standard deviations, about one false alarm in ten million.
fn assert_even(counts: &BTreeMap<String, u32>) {
    assert_eq!(counts.keys().collect::<Vec<_>>(), PODS.iter().collect::<Vec<_>>(), "{counts:?}");
    assert!(counts.values().all(|count| (16..=84).contains(count)), "{counts:?}");
}

#[test]
fn connections_spread_evenly_over_the_backends() {
    let bed = Bed::with_web(&PODS);
    for source in ["client", "pod1"] {
        for vip in WEB {
            assert_even(&count(|| ask_http(bed.netns(source), http(vip))));
        }
    }
}

#[test]
fn udp_flows_spread_evenly_over_the_backends() {
    let bed = Bed::with_web(&PODS);
    for vip in WEB {
        assert_even(&count(|| ask_udp(&bed.cluster.client, udp(vip), 64)));
    }
}

#[test]
fn flow_stays_with_its_backend() {
    let bed = Bed::with_web(&PODS);
    for vip in WEB {
        let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
        let first = connection.ask().unwrap();
        let socket = lb_tests::client::udp_socket(&bed.cluster.client, udp(vip)).unwrap();
        let first_datagram = lb_tests::client::echo(&socket, b"1").unwrap();
        for _ in 0..50 {
            assert_eq!(connection.ask().unwrap(), first);
            assert_eq!(lb_tests::client::echo(&socket, b"2").unwrap(), first_datagram);
        }
    }
}

#[test]
fn backends_on_both_nodes_receive_the_address_of_internal_and_external_clients() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("far", vips(11), &["pod3"]);
    for source in ["client", "pod1"] {
        for (backend, addresses) in [("pod2", WEB), ("pod3", vips(11))] {
            for vip in addresses {
                let over_tcp = eventually(|| ask_http(bed.netns(source), http(vip)));
                let over_udp = ask_udp(bed.netns(source), udp(vip), 64).unwrap();
                for answer in [over_tcp, over_udp] {
                    assert_eq!(answer.server, backend, "{source} → {vip}");
                    assert_eq!(answer.seen, answer.local, "{source} → {vip}");
                }
            }
        }
    }
}

fn eventually(ask: impl Fn() -> io::Result<Answer>) -> Answer {
    wait_for(PATIENCE, || ask().ok()).unwrap()
}

#[test]
fn pods_of_every_node_reach_services_when_each_node_has_an_agent() {
    let bed = Bed::with_web(&PODS);
    let _agent = bed.cluster.start_agent(2).unwrap();
    for source in ["pod1", "pod3"] {
        for vip in WEB {
            // A request that the pod itself answers is a hairpin, which other tests cover.
            for _ in 0..20 {
                let answer = ask_http(bed.netns(source), http(vip)).unwrap();
                assert!(answer.server == source || answer.seen == answer.local, "{answer:?}");
            }
        }
    }
}

/// Source address of the reply to a datagram. Uses an unconnected socket, which receives replies from any source.
fn answer_source(netns: &Netns, to: SocketAddr) -> SocketAddr {
    let socket = netns.run(|| UdpSocket::bind((any_address(to.ip()), 0))).unwrap();
    socket.set_read_timeout(Some(PATIENCE * patience())).unwrap();
    socket.send_to(b"?", to).unwrap();
    socket.recv_from(&mut [0; 128]).unwrap().1
}

#[test]
fn replies_come_from_the_virtual_address() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    for source in ["client", "pod1"] {
        for vip in WEB {
            for _ in 0..10 {
                assert_eq!(answer_source(bed.netns(source), udp(vip)), udp(vip));
            }
        }
    }
}

#[test]
fn one_client_port_reaches_one_backend_through_two_services() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("also-web", vips(11), &["pod2"]);
    let client = &bed.cluster.client;
    for (one, other) in WEB.into_iter().zip(vips(11)) {
        eventually(|| ask_http(client, http(other)));
        let mut first = Connection::open_from_port(client, 20_001, http(one)).unwrap();
        let mut second = Connection::open_from_port(client, 20_001, http(other)).unwrap();
        for _ in 0..3 {
            assert_eq!(first.ask().unwrap().server, "pod2");
            assert_eq!(second.ask().unwrap().server, "pod2");
        }
        let socket = client.run(|| UdpSocket::bind((any_address(one), 0))).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        for vip in [one, other, one, other] {
            socket.send_to(b"?", udp(vip)).unwrap();
            assert_eq!(socket.recv_from(&mut [0; 128]).unwrap().1, udp(vip));
        }
    }
}

#[test]
fn session_affinity_follows_edits() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    let servers = |source: &str| -> BTreeSet<String> {
        (0..30).map(|_| ask_http(bed.netns(source), http(WEB[0])).unwrap().server).collect()
    };
    assert!(servers("client").len() > 1);
    let yaml = bed.service("web", WEB, &["pod1", "pod2", "pod3", "pod4"]).yaml();
    let sticky = yaml.replacen("spec:\n", "spec:\n  sessionAffinity: ClientIP\n", 1);
    bed.cluster.manifests.write("web", &sticky).unwrap();
    let one = wait_for(PATIENCE, || Some(servers("client")).filter(|servers| servers.len() == 1)).unwrap();
    assert_eq!(servers("client"), one);
    assert_eq!(servers("pod1").len(), 1);
    bed.cluster.manifests.write("web", &yaml).unwrap();
    wait_for(PATIENCE, || (servers("client").len() > 1).then_some(())).unwrap();
}
