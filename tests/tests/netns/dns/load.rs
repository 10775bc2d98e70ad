//! Node-local DNS under a constant rate of queries, while the agent is killed or hangs.

use std::{
    fs,
    net::IpAddr,
    process::{Output, Stdio},
    time::Duration,
};

use lb_tests::{dnsperf::Statistics, one_of_three, snmp, wait_for};
use nix::sys::signal::Signal;

use super::intercept::{NodeDns, WEB};
use crate::bed::vips;

/// Queries per second.
const RATE: u64 = 1_000;
/// How long dnsperf sends queries, and how long it waits for each answer, in seconds.
const TIME: &str = "4";
const PATIENCE: &str = "2";
/// Number of queries that arrive from the kill of the agent until the kernel closes the agent's sockets. The kernel
/// first frees the memory of the process, which takes some 20 ms on an idle machine.
const OF_EXIT: u64 = RATE / 4;
/// Number of queries that arrive during one lease of the agent, which lasts 300 ms.
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

/// Asserts that one of three attempts loses at most `limit` queries. An attempt loses many more queries if the agent or
/// the endpoint of the Service waits for a CPU.
fn assert_few_are_lost(limit: u64, attempt: impl FnMut() -> Statistics) {
    one_of_three(attempt, |statistics| statistics.lost <= limit);
}

#[test]
fn killed_agent_loses_only_queries_that_come_before_its_sockets_are_closed() {
    for vip in vips(53) {
        assert_few_are_lost(OF_EXIT, || {
            let mut dns = NodeDns::new();
            let before = unreachables(&dns);
            let agent = dns.bed.agent.take().unwrap();
            let statistics = asked_during(&dns, vip, || agent.kill().unwrap());
            assert_eq!(unreachables(&dns), before, "ICMP errors");
            statistics
        });
    }
}

#[test]
fn hung_agent_loses_only_queries_of_its_lease() {
    for vip in vips(53) {
        // dnsperf sends queries late, and then more at once, if it has waited for a CPU.
        assert_few_are_lost(2 * OF_LEASE, || {
            let dns = NodeDns::new();
            let before = unreachables(&dns);
            let statistics = asked_during(&dns, vip, || dns.signal(Signal::SIGSTOP));
            assert_eq!(unreachables(&dns), before, "ICMP errors");
            statistics
        });
    }
}
