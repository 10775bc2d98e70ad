//! A virtual address without backends rejects clients at once.

use std::time::Duration;

use lb_tests::client::{REFUSED, ask_http, ask_http_by_first_syn, ask_udp};

use crate::bed::{Bed, WEB, http, udp};

/// Asserts that connections and datagrams from `source` are rejected at once: the first SYN and the only datagram get
/// an answer.
fn assert_rejected(bed: &Bed, source: &str) {
    for vip in WEB {
        let over_tcp = ask_http_by_first_syn(bed.netns(source), http(vip)).unwrap_err();
        assert_eq!(over_tcp.kind(), REFUSED, "TCP from {source} to {vip}: {over_tcp}");
        let over_udp = ask_udp(bed.netns(source), udp(vip), 64).unwrap_err();
        assert_eq!(over_udp.kind(), REFUSED, "UDP from {source} to {vip}: {over_udp}");
    }
}

#[test]
fn service_without_backends_rejects_external_clients_at_once() {
    assert_rejected(&Bed::with_web(&[]), "client");
}

#[test]
fn service_without_backends_rejects_pods_at_once() {
    assert_rejected(&Bed::with_web(&[]), "pod1");
}

#[test]
fn service_with_only_unready_endpoints_rejects_clients() {
    let bed = Bed::with_web(&["pod2"]);
    let mut service = bed.service("web", WEB, &["pod2"]);
    service.endpoints[0].ready = false;
    bed.cluster.manifests.put(&service).unwrap();
    let refused = || ask_http(&bed.cluster.client, http(WEB[0])).is_err().then_some(());
    lb_tests::wait_for(Duration::from_secs(1), refused).unwrap();
    // UDP may take a moment longer only if the agent has not switched the two ports together.
    assert_rejected(&bed, "client");
}

#[test]
fn service_without_backends_rejects_fragmented_datagrams() {
    let bed = Bed::with_web(&[]);
    for vip in WEB {
        let error = ask_udp(&bed.cluster.client, udp(vip), 8_192).unwrap_err();
        assert_eq!(error.kind(), REFUSED, "{vip}: {error}");
    }
}
