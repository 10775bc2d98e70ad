//! Limits on new connections of Services.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{
    client::{self, Connection},
    cluster::{CLIENT, ClientLink},
    manifests::Service,
    netns::Netns,
    wait_for,
};

use crate::bed::{Bed, WEB, http};

const PER_CLIENT: &str = "lb.dev/max-connections-per-client";
const OF_ALL: &str = "lb.dev/max-connections";

fn web(bed: &Bed, annotations: &[(&'static str, &str)]) -> Service {
    let annotations = annotations.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Service { annotations, ..bed.service("web", WEB, &["pod1", "pod2"]) }
}

fn start_with(annotations: &[(&'static str, &str)]) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1", "pod2"]);
    bed.cluster.manifests.put(&web(&bed, annotations)).unwrap();
    bed.start_agent();
    bed
}

/// Whether a SYN gets no answer within 500 ms.
fn is_dropped(netns: &Netns, to: SocketAddr) -> bool {
    let connected = netns.run(|| TcpStream::connect_timeout(&to, Duration::from_millis(500)));
    connected.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

fn limited(bed: &Bed) -> u64 {
    bed.metric("lb_packets_total{outcome=\"connection_limited\"}")
}

#[test]
fn client_beyond_its_limit_waits_and_others_do_not() {
    let bed = start_with(&[(PER_CLIENT, "3/m")]);
    for (source, vip) in CLIENT.into_iter().zip(WEB) {
        let (to, client) = (http(vip), &bed.cluster.client);
        let mut open: Vec<_> = (0..3).map(|_| Connection::open(client, to).unwrap()).collect();
        let before = limited(&bed);
        assert!(is_dropped(client, to), "{vip}: the fourth connection in a minute");
        assert!(limited(&bed) > before, "{vip}");
        // Connections within the limit continue; other clients and processes of the node can still connect.
        open.iter_mut().for_each(|connection| drop(connection.ask().unwrap()));
        client::ask_http_by_first_syn(bed.netns("pod2"), to).unwrap();
        for _ in 0..5 {
            client::ask_http_by_first_syn(&bed.cluster.node1, to).unwrap();
        }
        let (from, target) = (source.to_string(), to.to_string());
        let page = bed.json(&["explain", "--from", &from, "--to", &target]);
        assert_eq!((&page["verdict"], &page["outcome"]), (&"dropped".into(), &"connection_limited".into()));
    }
    let shown = bed.json(&["service", "show", "default/web"]);
    let shown = shown.as_array().map_or(&shown, |ports| &ports[0]);
    assert_eq!(shown["maxConnectionsPerClient"], "3/m", "{shown:#}");

    // Without the annotation, the client connects at once.
    bed.cluster.manifests.put(&web(&bed, &[])).unwrap();
    let connects = || WEB.into_iter().all(|vip| !is_dropped(&bed.cluster.client, http(vip)));
    wait_for(Duration::from_secs(10), || connects().then_some(())).expect("no limit");
}

#[test]
fn pod_whose_sockets_are_translated_is_limited_too() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1", "pod2"]);
    bed.cluster.manifests.put(&web(&bed, &[(PER_CLIENT, "2/m")])).unwrap();
    bed.start_agent_with(&["--socket-lb", "all"]);
    for vip in WEB {
        let pod = bed.netns("pod2");
        for _ in 0..2 {
            client::ask_http_by_first_syn(pod, http(vip)).unwrap();
        }
        assert!(is_dropped(pod, http(vip)), "{vip}");
    }
}

#[test]
fn burst_beyond_the_limit_of_a_service_is_spread_over_time() {
    let bed = start_with(&[(OF_ALL, "4/s")]);
    let before = limited(&bed);
    let begin = Instant::now();
    // A connection whose first SYN is dropped succeeds when TCP retransmits the SYN.
    thread::scope(|scope| {
        let threads: Vec<_> = (0..10)
            .map(|number| {
                let (client, to) = (&bed.cluster.client, http(WEB[number % 2]));
                scope.spawn(move || Connection::open(client, to).unwrap().ask().map(drop))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
    });
    assert!(limited(&bed) > before);
    // 4 at once, then 4 per second: the last one of 10 gets in after 1.5 s.
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[test]
fn invalid_limit_is_reported_and_the_service_is_served_without_it() {
    let bed = start_with(&[(PER_CLIENT, "3")]);
    for vip in WEB {
        for _ in 0..5 {
            client::ask_http_by_first_syn(&bed.cluster.client, http(vip)).unwrap();
        }
    }
    let status = bed.agent.as_ref().unwrap().ask(&["status"]).unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("lb.dev/max-connections-per-client") && status.contains("20/s"), "{status}");
}
