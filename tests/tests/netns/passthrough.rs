//! Packets that belong to no service pass unchanged.

use std::io::ErrorKind;

use lb_tests::{
    client::{Connection, ask_http, ask_udp},
    cluster::CLIENT,
    icmp::ping,
};

use crate::bed::{Bed, WEB, http};

#[test]
fn pings_to_pods_and_nodes_pass() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    for like in CLIENT {
        for source in ["client", "pod1"] {
            for pod in ["pod2", "pod3"] {
                let to = bed.cluster.pod(pod).unwrap().address(like);
                for bytes in [0, 56, 8_192] {
                    assert_eq!(
                        ping(bed.netns(source), to, bytes).unwrap(),
                        to,
                        "{bytes} bytes from {source}"
                    );
                }
            }
        }
        assert_eq!(ping(bed.netns("pod3"), like, 56).unwrap(), like);
    }
    ping(&bed.cluster.client, "198.51.100.1".parse().unwrap(), 56).unwrap();
    ping(&bed.cluster.client, "fd00:198:51:100::1".parse().unwrap(), 56).unwrap();
}

#[test]
fn direct_connections_to_backends_pass_untranslated() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    for like in CLIENT {
        for source in ["client", "pod1"] {
            for pod in &bed.cluster.pods {
                let netns = bed.netns(source);
                let answer = ask_http(netns, pod.http(like)).unwrap();
                assert_eq!((&answer.server, answer.seen), (&pod.name, answer.local));
                assert_eq!(ask_udp(netns, pod.udp(like), 8_192).unwrap().server, pod.name);
            }
        }
    }
}

#[test]
fn one_client_port_connects_directly_and_through_a_service() {
    let bed = Bed::with_web(&["pod1"]);
    for (vip, like) in WEB.into_iter().zip(CLIENT) {
        let pod2 = bed.cluster.pod("pod2").unwrap().http(like);
        let mut direct = Connection::open_from_port(&bed.cluster.client, 41_000, pod2).unwrap();
        let mut served = Connection::open_from_port(&bed.cluster.client, 41_000, http(vip)).unwrap();
        for _ in 0..3 {
            assert_eq!(direct.ask().unwrap().server, "pod2");
            assert_eq!(served.ask().unwrap().server, "pod1");
        }
        assert_eq!(direct.download(8 << 20).unwrap(), "pod2");
        assert_eq!(served.download(8 << 20).unwrap(), "pod1");
    }
}

/// The pod cannot tell the direct connection from the one through the Service: their addresses and ports are the same.
/// (With kube-proxy the direct connection also works: netfilter gives it another source port.)
#[test]
fn direct_connection_from_the_port_of_an_established_flow_fails_and_leaves_the_flow_intact() {
    let bed = Bed::with_web(&["pod2"]);
    let client = &bed.cluster.client;
    client.sysctls(&[("ipv4/tcp_syn_retries", "1")]).unwrap();
    for (vip, like) in WEB.into_iter().zip(CLIENT) {
        let pod = bed.cluster.pod("pod2").unwrap().http(like);
        let mut served = Connection::open_from_port(client, 41_000, http(vip)).unwrap();
        assert_eq!(served.ask().unwrap().server, "pod2");
        let direct = Connection::open_from_port(client, 41_000, pod);
        assert_eq!(direct.err().map(|error| error.kind()), Some(ErrorKind::TimedOut), "{vip}");
        for _ in 0..3 {
            assert_eq!(served.ask().unwrap().server, "pod2");
        }
        assert_eq!(served.download(8 << 20).unwrap(), "pod2");
        drop(served);
        let mut direct = Connection::open_from_port(client, 41_000, pod).unwrap();
        assert_eq!(direct.ask().unwrap().server, "pod2");
    }
}

#[test]
fn pods_reach_external_servers() {
    let bed = Bed::with_web(&["pod1"]);
    let _server = lb_tests::server::http(&bed.cluster.client, "client", 80).unwrap();
    for client in CLIENT {
        for source in ["pod1", "pod3"] {
            let answer = ask_http(bed.netns(source), (client, 80).into()).unwrap();
            assert_eq!((answer.server.as_str(), answer.seen), ("client", answer.local));
        }
    }
}
