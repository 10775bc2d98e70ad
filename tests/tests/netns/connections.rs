//! Tests of established connections through node ports and load balancer addresses, masqueraded and not.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    thread::sleep,
    time::Duration,
};

use etherparse::TcpHeader;
use lb_tests::{
    client::{Connection, Transfer},
    netns::Netns,
};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, socket,
};

use crate::lan::{
    CLUSTER_CIDR, Expect,
    Frontend::{LoadBalancer, NodePort},
    Lan, Protocol, Seen,
};

/// Number of bytes of a slow download, see [`Connection::download_slowly`].
const BYTES: u64 = 100_000_000;

/// Opens connections and starts downloads, from the external client and from a pod, through a node port and a load
/// balancer address, in both families.
fn established(lan: &Lan, number: u8) -> Vec<(Connection, String, Transfer)> {
    let mut all = Vec::new();
    for family in [0, 1] {
        for (source, frontend) in [("client", NodePort(1)), ("client", LoadBalancer), ("pod1", NodePort(1))] {
            let to = frontend.of(number, (Protocol::Tcp, family));
            let open = || Connection::open(lan.netns(source), to).unwrap();
            let mut connection = open();
            let server = connection.ask().unwrap().server;
            all.push((connection, server, open().download_slowly(BYTES)));
        }
    }
    all
}

/// Asserts that all connections and downloads still work, then ends them.
fn finish(all: Vec<(Connection, String, Transfer)>) {
    assert!(all.iter().all(|(_, _, transfer)| !transfer.is_finished()), "a transfer has ended early");
    for (mut connection, server, transfer) in all {
        assert_eq!(connection.ask().unwrap().server, server);
        transfer.join().unwrap();
    }
}

#[test]
fn masqueraded_connections_survive_service_edits_service_removal_and_agent_restart() {
    let mut lan = Lan::with(&CLUSTER_CIDR);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let all = established(&lan, 1);
    // In turn, replaces the endpoint, changes the policy, removes the Service, and kills and restarts the agent.
    lan.apply(&[lan.service(1, &["pod4"])]);
    lan.check(&["client"], 1, &[NodePort(1)], Expect::Answer(&["pod4"], Seen::Node(1)));
    let mut local = lan.service(1, &["pod2"]);
    local.exposure.external_local = true;
    lan.apply(&[local]);
    lan.check(&["client"], 1, &[NodePort(1)], Expect::Answer(&["pod2"], Seen::Client));
    lan.remove(1);
    lan.agents[0].take().unwrap().kill().unwrap();
    lan.start_agent(1, &CLUSTER_CIDR);
    lan.settle();
    finish(all);
}

#[test]
fn connections_survive_loss_of_the_last_endpoint_under_a_local_policy() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let service = |pods: &[&str]| {
        let mut service = lan.service(1, pods);
        service.exposure.external_local = true;
        service
    };
    lan.apply(&[service(&["pod2"])]);
    let all = established(&lan, 1);
    lan.apply(&[service(&["pod3"])]);
    lan.check(&["client"], 1, &[NodePort(1)], Expect::Silence);
    finish(all);
}

/// Sends a TCP segment from `netns`, with the source `from` and arbitrary sequence numbers: a RST with `reset`, else
/// data.
fn inject(netns: &Netns, from: SocketAddr, to: SocketAddr, reset: bool) -> io::Result<()> {
    let mut header = TcpHeader::new(from.port(), to.port(), 0x7777_7777, 1024);
    (header.ack, header.psh, header.rst) = (!reset, !reset, reset);
    header.acknowledgment_number = 0x3333_3333;
    let payload: &[u8] = if reset { b"" } else { b"boom!!!" };
    let checksum = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            header.calc_checksum_ipv4_raw(from.octets(), to.octets(), payload)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            header.calc_checksum_ipv6_raw(from.octets(), to.octets(), payload)
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    header.checksum = checksum.map_err(io::Error::other)?;
    let mut segment = header.to_bytes().to_vec();
    segment.extend_from_slice(payload);
    netns.run(|| {
        let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let fd = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp)?;
        let port = if to.is_ipv4() { to.port() } else { 0 };
        let to = SockaddrStorage::from(SocketAddr::new(to.ip(), port));
        sendto(fd.as_raw_fd(), &segment, &to, MsgFlags::empty())?;
        Ok(())
    })
}

/// Under kube-proxy, out-of-window segments break connections: netfilter treats them as INVALID and does not translate
/// them, so a segment reaches the client from the backend's own address, and the client answers with a RST.
#[test]
fn out_of_window_segments_break_no_connections() {
    let lan = Lan::with(&CLUSTER_CIDR);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    for (number, pod) in [(1, "pod2"), (2, "pod3")] {
        for frontend in crate::lan::FRONTENDS {
            for (source, family) in [("client", 0), ("client", 1), ("pod1", 0), ("pod1", 1)] {
                let to = frontend.of(number, (Protocol::Tcp, family));
                let mut connection = Connection::open(lan.netns(source), to).unwrap();
                let answer = connection.ask().unwrap();
                let backend = lan.cluster.pod(pod).unwrap();
                for reset in [false, true] {
                    inject(&backend.netns, backend.http(to.ip()), answer.seen, reset).unwrap();
                    inject(lan.netns(source), answer.local, to, reset).unwrap();
                }
                sleep(Duration::from_millis(20));
                let still = connection.ask();
                assert!(still.as_ref().is_ok_and(|still| *still == answer), "{source} → {to}: {still:?}");
                assert_eq!(connection.download(1 << 20).unwrap(), pod);
            }
        }
    }
}
