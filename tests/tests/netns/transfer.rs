//! Large transfers: TCP with segmentation offload, UDP in fragments.

use lb_tests::{
    client::{Connection, ask_udp, echo, udp_socket},
    pattern,
    socket::lengthen_headers,
};

use crate::bed::{Bed, WEB, http, udp};

/// Bytes in each direction.
const LARGE: u64 = 64 << 20;

fn large_transfers(source: &str, backend: &str) {
    let bed = Bed::with_web(&[backend]);
    for vip in WEB {
        let mut connection = Connection::open(bed.netns(source), http(vip)).unwrap();
        assert_eq!(connection.download(LARGE).unwrap(), backend, "from {vip}");
        assert_eq!(connection.upload(LARGE).unwrap().server, backend, "to {vip}");
    }
}

#[test]
fn tcp_transfers_from_an_external_client_to_a_local_backend() {
    large_transfers("client", "pod1");
}

#[test]
fn tcp_transfers_from_an_external_client_to_a_remote_backend() {
    large_transfers("client", "pod3");
}

#[test]
fn tcp_transfers_from_a_pod_to_a_local_backend() {
    large_transfers("pod1", "pod2");
}

#[test]
fn tcp_transfers_from_a_pod_to_a_remote_backend() {
    large_transfers("pod1", "pod3");
}

#[test]
fn udp_datagrams_up_to_60_kilobytes_pass_in_fragments() {
    for backend in ["pod2", "pod3"] {
        let bed = Bed::with_web(&[backend]);
        for source in ["client", "pod1"] {
            for vip in WEB {
                for bytes in [0, 1, 1_500, 8_192, 60_000] {
                    let answer = ask_udp(bed.netns(source), udp(vip), bytes).unwrap();
                    assert_eq!(answer.server, backend, "{bytes} bytes from {source} to {vip}");
                }
            }
        }
    }
}

#[test]
fn udp_with_ip_options_and_extension_headers_passes() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    for source in ["client", "pod1"] {
        for vip in WEB {
            for bytes in [64, 8_192] {
                let socket = udp_socket(bed.netns(source), udp(vip)).unwrap();
                lengthen_headers(&socket).unwrap();
                let answer = echo(&socket, pattern::at(0, bytes)).unwrap();
                assert_eq!(answer.seen, answer.local, "{bytes} bytes from {source} to {vip}");
            }
        }
    }
}
