//! Node-local DNS under a constant rate of queries, while the agent is killed or hangs.

use std::{
    fs,
    net::IpAddr,
    process::{Output, Stdio},
    time::Duration,
};

use lb_tests::{dnsperf::Statistics, snmp, wait_for};
use nix::sys::signal::Signal;

use super::intercept::{NodeDns, WEB};
use crate::bed::vips;

/// Queries per second.
const RATE: u64 = 1_000;
/// How long dnsperf sends queries, and how long it waits for each answer, in seconds.
const TIME: &str = "4";
const PATIENCE: &str = "2";
/// Queries that arrive while the kernel ends the agent's process, up to the moment when it closes the sockets: it frees the
/// memory first, which takes some 20 ms on an idle machine.
const OF_EXIT: u64 = RATE / 4;
/// Queries of a lease of the agent, 300 ms.
const OF_LEASE: u64 = RATE * 3 / 10;

/// Runs dnsperf in `pod1`, and `event` while the agent answers dnsperf's queries.
fn asked_during(dns: &NodeDns, vip: IpAddr, event: impl FnOnce()) -> Statistics {
    let queries = dns.bed.cluster.folder().join("queries");
    fs::write(&queries, format!("{WEB} A\n")).unwrap();
    let mut command = dns.bed.netns("pod1").command("dnsperf");
    command.args(["-s", &vip.to_string(), "-Q", &RATE.to_string(), "-q", &RATE.to_string()]);
    command.args(["-c", "4", "-T", "1", "-l", TIME, "-t", PATIENCE]).arg("-d").arg(&queries);
    let before = dns.led();
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for(Duration::from_secs(10), || (dns.led() > before + RATE / 2).then_some(())).unwrap();
    event();
    let Output { stdout, status, .. } = child.wait_with_output().unwrap();
    let text = String::from_utf8(stdout).unwrap();
    assert!(status.success(), "{text}");
    let statistics = Statistics::read(&text).unwrap();
    println!("{vip}: {statistics:?}");
    assert!(statistics.codes.starts_with("NOERROR") && !statistics.codes.contains(','), "{statistics:?}");
    statistics
}

/// Number of ICMP messages "destination unreachable" that `pod1` has received.
fn unreachables(dns: &NodeDns) -> u64 {
    let of_family =
        |is_ipv6| snmp::counter(dns.bed.netns("pod1"), is_ipv6, "Icmp", "InDestUnreachs").unwrap();
    of_family(false) + of_family(true)
}

#[test]
fn killed_agent_loses_only_queries_that_come_before_its_sockets_are_closed() {
    for vip in vips(53) {
        let mut dns = NodeDns::new();
        let before = unreachables(&dns);
        let agent = dns.bed.agent.take().unwrap();
        let statistics = asked_during(&dns, vip, || agent.kill().unwrap());
        assert!(statistics.lost <= OF_EXIT, "{statistics:?}");
        assert_eq!(unreachables(&dns), before, "ICMP errors");
    }
}

#[test]
fn hung_agent_loses_only_queries_of_its_lease() {
    for vip in vips(53) {
        let dns = NodeDns::new();
        let before = unreachables(&dns);
        let statistics = asked_during(&dns, vip, || dns.signal(Signal::SIGSTOP));
        // dnsperf sends queries late, and then more at once, if it has waited for a CPU.
        assert!(statistics.lost <= 2 * OF_LEASE, "{statistics:?}");
        assert_eq!(unreachables(&dns), before, "ICMP errors");
    }
}
