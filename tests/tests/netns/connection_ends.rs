//! Connections of Services with an idle or drain timeout.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use lb_tests::{
    client::{Answer, Connection, PATIENCE, echo, udp_socket},
    cluster::ClientLink,
    manifests::Service,
    patience, wait_for,
};

use crate::bed::{Bed, WEB, http, udp};

const PODS: [&str; 2] = ["pod1", "pod2"];
/// The agent looks for connections to end every 5 s.
const LOOK: Duration = Duration::from_secs(5);

fn web(bed: &Bed, pods: &[&str], annotation: &'static str, value: &str) -> Service {
    Service { annotations: vec![(annotation, value.to_owned())], ..bed.service("web", WEB, pods) }
}

fn start_with(annotation: &'static str, value: &str) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.cluster.manifests.put(&web(&bed, &PODS, annotation, value)).unwrap();
    bed.start_agent();
    bed
}

/// Connections of the external client and of a pod, in both families, with the server of each.
fn connections(bed: &Bed) -> Vec<(String, Connection)> {
    let clients = [&bed.cluster.client, bed.netns("pod2")];
    let connection = |(client, vip)| {
        let mut connection = Connection::open(client, http(vip)).unwrap();
        (connection.ask().unwrap().server, connection)
    };
    clients.into_iter().flat_map(|client| WEB.map(|vip| (client, vip))).map(connection).collect()
}

fn is_reset(asked: &io::Result<Answer>) -> bool {
    let ends = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
    asked.as_ref().is_err_and(|error| ends.contains(&error.kind()))
}

fn tracks_udp(bed: &Bed) -> bool {
    let shown = bed.agent.as_ref().unwrap().ask(&["conntrack", "list", "-o", "json"]).unwrap();
    String::from_utf8(shown.stdout).unwrap().to_lowercase().contains("udp")
}

#[test]
fn idle_connection_is_reset_and_a_busy_one_goes_on() {
    let bed = start_with("lb.dev/idle-timeout", "4s");
    let (mut idle, mut busy) = (connections(&bed), connections(&bed));
    let socket = udp_socket(&bed.cluster.client, udp(WEB[0])).unwrap();
    echo(&socket, b"first").unwrap();
    assert!(tracks_udp(&bed));
    let begin = Instant::now();
    while begin.elapsed() < 2 * LOOK {
        for (_, connection) in &mut busy {
            connection.ask().unwrap();
        }
        thread::sleep(Duration::from_millis(500));
    }
    assert!(!tracks_udp(&bed), "the idle UDP flow");
    for (server, connection) in &mut idle {
        let asked = connection.ask();
        assert!(is_reset(&asked), "{server}: {asked:?}");
    }
    echo(&socket, b"a new flow").unwrap();
}

#[test]
fn connection_to_a_removed_backend_is_reset_after_the_drain_timeout() {
    let bed = start_with("lb.dev/drain-timeout", "4s");
    let mut held: Vec<_> = (0..6).flat_map(|_| connections(&bed)).collect();
    let mut leaving: Vec<_> = held.extract_if(.., |(server, _)| server == "pod1").collect();
    assert!(!leaving.is_empty() && !held.is_empty());
    let removed = Instant::now();
    bed.cluster.manifests.put(&web(&bed, &PODS[1..], "lb.dev/drain-timeout", "4s")).unwrap();
    let mut first_end = None;
    let all_end = || {
        leaving.retain_mut(|(_, connection)| match connection.ask() {
            Ok(answer) => answer.server == "pod1",
            asked => {
                assert!(is_reset(&asked), "{asked:?}");
                first_end.get_or_insert_with(|| removed.elapsed());
                false
            }
        });
        leaving.is_empty().then_some(())
    };
    wait_for(Duration::from_secs(4) + 2 * LOOK + PATIENCE * patience(), all_end).expect("resets");
    let first_end = first_end.expect("a reset");
    assert!(first_end >= Duration::from_secs(4), "{first_end:?}");
    for (server, connection) in &mut held {
        assert_eq!(&connection.ask().unwrap().server, server);
    }
    assert!(connections(&bed).iter().all(|(server, _)| server == "pod2"));
}
