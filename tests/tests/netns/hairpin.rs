//! Tests of a pod that reaches itself through its Service.

use lb_tests::{
    client::{Connection, ask_http, ask_udp},
    pattern,
};

use crate::bed::{Bed, WEB, http, udp};

#[test]
fn hairpin_tcp_connections_work() {
    let bed = Bed::with_web(&["pod1"]);
    for vip in WEB {
        let mut connection = Connection::open(bed.netns("pod1"), http(vip)).unwrap();
        let answer = connection.ask().unwrap();
        assert_eq!(answer.server, "pod1");
        assert_ne!(
            answer.seen.ip(),
            answer.local.ip(),
            "replies to its own address would never leave the pod"
        );
        assert_eq!(connection.download(16 << 20).unwrap(), "pod1");
        assert_eq!(connection.upload(16 << 20).unwrap().server, "pod1");
        for _ in 0..20 {
            assert_eq!(ask_http(bed.netns("pod1"), http(vip)).unwrap().server, "pod1");
        }
    }
}

#[test]
fn hairpin_udp_works_also_in_fragments() {
    let bed = Bed::with_web(&["pod1"]);
    for vip in WEB {
        for bytes in [0, 100, 8_192] {
            assert_eq!(ask_udp(bed.netns("pod1"), udp(vip), bytes).unwrap().server, "pod1", "{bytes}");
        }
    }
}

#[test]
fn pod_that_is_a_backend_reaches_itself_and_the_other_backends() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3"]);
    for vip in WEB {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..100 {
            let mut connection = Connection::open(bed.netns("pod1"), http(vip)).unwrap();
            seen.insert(connection.ask().unwrap().server);
            connection.upload(pattern::MAX_PIECE as u64).unwrap();
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }
}
