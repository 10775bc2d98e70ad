//! Tests of `sessionAffinity: ClientIP` through every kind of address.

use std::{
    collections::BTreeSet,
    thread::sleep,
    time::{Duration, Instant},
};

use lb_tests::manifests::Service;

use crate::lan::{CLUSTER_CIDR, EVERY, FRONTENDS, Frontend::NodePort, Lan, names};

const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];

fn sticky(lan: &Lan, number: u8, pods: &[&str], seconds: u32) -> Service {
    let mut service = lan.service(number, pods);
    service.exposure.affinity = Some(seconds);
    service
}

/// The server that answers, for each protocol and family; asserts that it is the same in five requests.
fn chosen(lan: &Lan, source: &str, number: u8, frontend: crate::lan::Frontend) -> Vec<String> {
    let of = |how| {
        let servers: BTreeSet<String> = (0..5).map(|_| lan.server(source, number, frontend, how)).collect();
        assert_eq!(servers.len(), 1, "{source} → {frontend:?} {how:?}: {servers:?}");
        servers.into_iter().next().unwrap()
    };
    EVERY.into_iter().map(of).collect()
}

#[test]
fn affinity_pins_a_client_to_one_backend_through_every_kind_of_address() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let local = {
        let mut service = sticky(&lan, 2, &["pod1", "pod2", "pod3"], 600);
        service.exposure.external_local = true;
        service
    };
    lan.apply(&[sticky(&lan, 1, &PODS, 600), local]);
    for source in ["client", "client2", "pod1"] {
        // Affinity applies to a Service port as a whole, at all its addresses.
        let all: BTreeSet<_> = FRONTENDS.iter().map(|frontend| chosen(&lan, source, 1, *frontend)).collect();
        assert_eq!(all.len(), 1, "{all:?}");
        // Affinity on another node is independent.
        chosen(&lan, source, 1, NodePort(2));
    }
    for server in chosen(&lan, "client", 2, NodePort(1)) {
        assert!(["pod1", "pod2"].contains(&&*server), "{server} is on the other node");
    }
}

#[test]
fn affinity_selects_a_new_backend_after_removal_and_follows_edits() {
    let lan = Lan::with(&[]);
    lan.apply(&[sticky(&lan, 1, &PODS, 600)]);
    let first = chosen(&lan, "client", 1, NodePort(1));
    let left: Vec<&str> = PODS.into_iter().filter(|pod| !first.iter().any(|gone| gone == pod)).collect();
    let left = if left.is_empty() { vec!["pod1"] } else { left };
    lan.apply(&[sticky(&lan, 1, &left, 600)]);
    let second = chosen(&lan, "client", 1, NodePort(1));
    assert!(second.iter().all(|pod| left.contains(&&**pod)), "{second:?} of {left:?}");
    // The other endpoints are back; no client moves to them.
    lan.apply(&[sticky(&lan, 1, &PODS, 600)]);
    assert_eq!(chosen(&lan, "client", 1, NodePort(1)), second);
    lan.apply(&[lan.service(1, &PODS)]);
    assert_eq!(lan.servers("client", 1, NodePort(1)), names(&PODS));
    lan.apply(&[sticky(&lan, 1, &PODS, 600)]);
    chosen(&lan, "client", 1, NodePort(1));
}

#[test]
fn affinity_expires_after_its_timeout_and_connections_refresh_it() {
    let lan = Lan::with(&[]);
    // Each of the four Services has a choice of its own for each protocol and family: 16 choices among four backends.
    // The probability that all of them have the same results again is one in 4^16.
    let services = [1, 2, 3, 4];
    let all = || services.map(|number| chosen(&lan, "client", number, NodePort(1)));
    let with_timeout =
        |seconds| lan.apply(&services.map(|number| sticky(&lan, number, &PODS, u32::from(seconds))));
    with_timeout(2_u16);
    let begun = Instant::now();
    all();
    // The timeout must be long compared with a round of requests on this machine at this moment.
    let seconds = 2 + 4 * u16::try_from(begun.elapsed().as_secs()).unwrap();
    with_timeout(seconds);
    let timeout = Duration::from_secs(seconds.into());
    let mut before = Instant::now();
    let (mut first, mut since) = (all(), Instant::now());
    // Connects for longer than the timeout in total, with pauses shorter than the timeout.
    while since.elapsed() < timeout * 2 {
        sleep(timeout / 3);
        let begun = Instant::now();
        let now = all();
        if before.elapsed() < timeout {
            assert_eq!(now, first);
        } else {
            // After a pause that may have exceeded the timeout, the answers prove nothing, so the test starts again.
            (first, since) = (now, begun);
        }
        before = begun;
    }
    sleep(timeout * 7 / 4);
    assert_ne!(all(), first);
}
