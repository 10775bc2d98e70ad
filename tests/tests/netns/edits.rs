//! Tests of edits of manifests: new, changed, removed and malformed files.

use std::{collections::BTreeSet, io, time::Duration};

use lb_tests::{
    client::{Connection, ask_http, udp_socket},
    one_of_three,
    stopwatch::Stopwatch,
    wait_for,
};

use crate::bed::{Bed, WEB, ask_briefly, http, udp, vips};

/// How long a changed file may take from its rename until the kernel has the change.
const PROMPTLY: Duration = Duration::from_secs(1);

/// Names of the servers that answer 40 new connections.
fn answering_servers(bed: &Bed) -> BTreeSet<String> {
    (0..40).map(|_| ask_http(&bed.cluster.client, http(WEB[0])).unwrap().server).collect()
}

#[test]
fn new_service_is_served_within_a_second() {
    let bed = Bed::with_web(&["pod1"]);
    let mut numbers = 11..;
    for source in ["client", "pod1"] {
        let attempt = || {
            let vips = vips(numbers.next().unwrap());
            for vip in vips {
                assert_eq!(ask_briefly(bed.netns(source), vip), None);
            }
            let stopwatch = Stopwatch::start();
            bed.put("new", vips, &["pod2"]);
            for vip in vips {
                let server = wait_for(PROMPTLY, || ask_briefly(bed.netns(source), vip));
                assert_eq!(server.as_deref(), Some("pod2"), "{source} → {vip}");
            }
            stopwatch.elapsed()
        };
        one_of_three(attempt, |took| *took < PROMPTLY);
    }
}

#[test]
fn removed_service_is_no_longer_served() {
    let bed = Bed::with_web(&["pod1"]);
    bed.put("other", vips(11), &["pod2"]);
    let ask_other = || ask_briefly(&bed.cluster.client, vips(11)[0]);
    wait_for(PROMPTLY, ask_other).unwrap();
    bed.cluster.manifests.remove("other").unwrap();
    wait_for(PROMPTLY, || ask_other().is_none().then_some(())).unwrap();
    assert_eq!(ask_http(&bed.cluster.client, http(WEB[0])).unwrap().server, "pod1");
}

#[test]
fn established_flows_survive_the_removal_of_their_backend() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    let mut connections = Vec::new();
    for vip in WEB {
        for source in ["client", "pod1"] {
            let mut connection = Connection::open(bed.netns(source), http(vip)).unwrap();
            let first = connection.ask().unwrap();
            connections.push((connection, first));
        }
    }
    for (_, first) in &connections {
        let others: Vec<&str> =
            ["pod1", "pod2", "pod3", "pod4"].into_iter().filter(|pod| *pod != first.server).collect();
        bed.put("web", WEB, &others);
        wait_for(PROMPTLY, || (!answering_servers(&bed).contains(&first.server)).then_some(())).unwrap();
    }
    for (connection, first) in &mut connections {
        assert_eq!(&connection.ask().unwrap(), first);
    }
    // Removes the last endpoint, then the whole Service.
    bed.put("web", WEB, &[]);
    wait_for(PROMPTLY, || ask_http(&bed.cluster.client, http(WEB[1])).err()).unwrap();
    for (connection, first) in &mut connections {
        assert_eq!(&connection.ask().unwrap(), first);
    }
    bed.cluster.manifests.remove("web").unwrap();
    let gone = |error: &io::Error| error.kind() != lb_tests::client::REFUSED;
    wait_for(PROMPTLY, || ask_http(&bed.cluster.client, http(WEB[1])).err().filter(gone)).unwrap();
    for (mut connection, first) in connections {
        assert_eq!(connection.ask().unwrap(), first);
        assert_eq!(connection.download(1 << 20).unwrap(), first.server);
    }
}

#[test]
fn large_download_survives_the_removal_of_its_backend() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    for vip in WEB {
        bed.put("web", WEB, &["pod2", "pod3"]);
        wait_for(PROMPTLY, || (answering_servers(&bed).len() == 2).then_some(())).unwrap();
        let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
        let server = connection.ask().unwrap().server;
        let transfer = connection.download_slowly(100_000_000);
        let other = if server == "pod2" { "pod3" } else { "pod2" };
        bed.put("web", WEB, &[other]);
        wait_for(PROMPTLY, || (!answering_servers(&bed).contains(&server)).then_some(())).unwrap();
        assert!(!transfer.is_finished(), "the download has ended early");
        assert_eq!(transfer.join().unwrap(), server);
    }
}

#[test]
fn terminating_backend_keeps_its_flows() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    let mut connection = Connection::open(&bed.cluster.client, http(WEB[0])).unwrap();
    let first = connection.ask().unwrap();
    // At least one of 64 flows goes to the connection's backend, except once in 2^64 runs.
    let (socket, datagram) = (0..64)
        .map(|_| {
            let socket = udp_socket(&bed.cluster.client, udp(WEB[0])).unwrap();
            let answer = lb_tests::client::echo(&socket, b"?").unwrap();
            (socket, answer)
        })
        .find(|(_, answer)| answer.server == first.server)
        .unwrap();
    let mut service = bed.service("web", WEB, &["pod2", "pod3"]);
    for endpoint in &mut service.endpoints {
        if endpoint.pod == first.server {
            (endpoint.ready, endpoint.terminating) = (false, true);
        }
    }
    bed.cluster.manifests.put(&service).unwrap();
    wait_for(PROMPTLY, || (!answering_servers(&bed).contains(&first.server)).then_some(())).unwrap();
    assert_eq!(connection.ask().unwrap(), first);
    assert_eq!(lb_tests::client::echo(&socket, b"?").unwrap(), datagram);
}

#[test]
fn malformed_manifest_changes_nothing() {
    let bed = Bed::with_web(&["pod1"]);
    bed.cluster
        .manifests
        .write("web", "apiVersion: v1\nkind: Service\nmetadata: [this is no service\n")
        .unwrap();
    bed.put("other", vips(11), &["pod2"]);
    wait_for(PROMPTLY, || ask_briefly(&bed.cluster.client, vips(11)[0])).unwrap();
    assert_eq!(ask_http(&bed.cluster.client, http(WEB[0])).unwrap().server, "pod1");
}

#[test]
fn malformed_manifest_at_agent_start_keeps_the_service_served() {
    let mut bed = Bed::with_web(&["pod1"]);
    bed.agent.take().unwrap().kill().unwrap();
    bed.cluster.manifests.write("web", "apiVersion: v1\nkind: [\n").unwrap();
    bed.put("other", vips(11), &["pod2"]);
    bed.start_agent();
    assert_eq!(ask_http(&bed.cluster.client, http(vips(11)[0])).unwrap().server, "pod2");
    assert_eq!(ask_http(&bed.cluster.client, http(WEB[0])).unwrap().server, "pod1");
    // If the malformed file is removed, its Service is removed as well.
    bed.cluster.manifests.remove("web").unwrap();
    wait_for(PROMPTLY, || ask_briefly(&bed.cluster.client, WEB[0]).is_none().then_some(())).unwrap();
    assert_eq!(ask_http(&bed.cluster.client, http(vips(11)[1])).unwrap().server, "pod2");
}
