//! A virtual address without backends rejects clients at once.

use std::{
    io,
    net::{IpAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{
    client::{REFUSED, ask_http, ask_http_by_first_syn, ask_udp},
    netns::Netns,
    snmp,
};

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
    // The agent changes all frontends of the Service in the same plan. So once one frontend rejects clients, the others
    // do as well.
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

/// By default a kernel limits its own ICMP errors to the same rate (`net.ipv4.icmp_msgs_per_sec`, `icmp_msgs_burst`).
#[test]
fn flood_of_rejected_datagrams_gets_at_most_1000_icmp_errors_per_second() {
    const DATAGRAMS: u32 = 20_000;
    let bed = Bed::with_web(&[]);
    let client = &bed.cluster.client;
    for vip in WEB {
        let limited = || bed.metric("lb_packets_total{outcome=\"icmp_rate_limited\"}");
        let (before, limited_before) = (unreachables(client, vip), limited());
        let started = Instant::now();
        client.run(|| flood(vip, DATAGRAMS)).unwrap();
        // RSTs are not limited: a TCP client is rejected at once.
        let over_tcp = ask_http_by_first_syn(client, http(vip)).unwrap_err();
        assert_eq!(over_tcp.kind(), REFUSED, "{vip}: {over_tcp}");
        let errors = unreachables(client, vip) - before;
        // The clock of the rate limit advances only at timer interrupts, so the limit may allow errors for 10 ms more.
        let allowed = 50 + started.elapsed().as_millis() + 10;
        assert!(errors > 0 && u128::from(errors) <= allowed, "{vip}: {errors} errors, {allowed} allowed");
        let limited = limited() - limited_before;
        assert!(limited > 0 || allowed >= DATAGRAMS.into(), "{vip}: datagrams without an error are counted");
        assert!(limited + errors <= DATAGRAMS.into(), "{vip}: {limited} counted, {errors} errors");
        thread::sleep(Duration::from_millis(100));
        let afterwards = ask_udp(client, udp(vip), 64).unwrap_err();
        assert_eq!(afterwards.kind(), REFUSED, "{vip}: {afterwards}");
    }
}

/// Sends datagrams without waiting for answers.
fn flood(vip: IpAddr, datagrams: u32) -> io::Result<()> {
    let any = if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    for _ in 0..datagrams {
        match socket.send_to(b"?", udp(vip)) {
            // The send may return the error that an earlier datagram has caused.
            Err(error) if error.kind() == REFUSED => {}
            sent => drop(sent?),
        }
    }
    Ok(())
}

/// Number of ICMP messages "destination unreachable" of this family that the kernel of `netns` has received.
fn unreachables(netns: &Netns, like: IpAddr) -> u64 {
    snmp::counter(netns, like.is_ipv6(), "Icmp", "InDestUnreachs").unwrap()
}
