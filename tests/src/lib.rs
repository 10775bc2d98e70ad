//! The testbed: network namespaces, links, servers and clients, for the demo, the benchmarks and the tests that need
//! root.
//!
//! ```text
//! client ── node1 ── node2          the client is external
//!           │   │    │   │          the agent runs on one node or on both
//!        pod1 pod2  pod3 pod4
//! ```
//!
//! The testbed uses plain `ip` commands and standard sockets, so that a test observes what an application would. Guards
//! remove their resources when dropped, also after a panic; see [`cleanup`] for Ctrl-C and for leftovers of killed
//! processes.

pub mod agent;
pub mod bench;
pub mod bird;
pub mod browser;
pub mod cgroup;
pub mod cleanup;
pub mod client;
pub mod cluster;
pub mod container;
pub mod daemon;
pub mod dns;
pub mod dnsperf;
pub mod guest;
pub mod http;
pub mod icmp;
pub mod kube_proxy;
pub mod lan;
pub mod manifests;
pub mod netns;
pub mod offload;
pub mod pattern;
pub mod pump;
pub mod resolver;
pub mod server;
pub mod site;
pub mod skip;
pub mod sniffer;
pub mod snmp;
pub mod socket;
pub mod stopwatch;
pub mod terminal;
pub mod traffic;
pub mod transfers;
pub mod virtio;

use std::{
    fmt::Debug,
    sync::atomic::{AtomicBool, Ordering},
    thread::sleep,
    time::Duration,
};

use self::stopwatch::Stopwatch;

/// Bounds the wall-clock time of [`within`] on a busy machine: at most this factor times the limit, plus [`GRACE`].
const LONGEST: u32 = 10;
/// The constant part of the longest wait, see [`LONGEST`].
const GRACE: Duration = Duration::from_secs(30);
/// Time that [`wait_for`] adds to each limit, for stalls that a [`Stopwatch`] does not see: of a process that waits for
/// a lock, or of the whole machine.
const SLACK: Duration = Duration::from_secs(10);

/// Factor by which time limits are longer on this machine: `$LB_TEST_PATIENCE`, which `cargo xtask vm` sets for an
/// emulated machine; else 1.
pub fn patience() -> u32 {
    let patience = std::env::var("LB_TEST_PATIENCE").ok().and_then(|text| text.parse().ok());
    patience.unwrap_or(1).max(1)
}

/// Calls `probe` every 5 ms until it returns a value; returns `None` after `limit` times [`patience`], plus [`SLACK`].
/// A test that asserts the limit itself calls [`within`], or measures the time.
pub fn wait_for<T>(limit: Duration, probe: impl FnMut() -> Option<T>) -> Option<T> {
    call_for(limit * patience() + SLACK, probe)
}

/// Calls `probe` every 5 ms until it returns a value; returns `None` after `limit` times [`patience`]. Time in which
/// tasks of this machine waited for a CPU, I/O or memory does not count, see [`Stopwatch`].
pub fn within<T>(limit: Duration, probe: impl FnMut() -> Option<T>) -> Option<T> {
    call_for(limit * patience(), probe)
}

fn call_for<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let stopwatch = Stopwatch::start();
    loop {
        if let Some(value) = probe() {
            return Some(value);
        }
        if stopwatch.elapsed() >= limit || stopwatch.wall() >= limit * LONGEST + GRACE {
            return None;
        }
        sleep(Duration::from_millis(5));
    }
}

/// Makes up to three attempts, until `accept` returns `true` for the result of an attempt. For claims about time: a
/// stall of the machine spoils a single attempt, a defect spoils all three.
///
/// # Panics
/// `accept` returns `false` for all three results.
#[track_caller]
pub fn one_of_three<T: Debug>(mut attempt: impl FnMut() -> T, accept: impl Fn(&T) -> bool) {
    let mut spoilt = Vec::new();
    for _ in 0..3 {
        let result = attempt();
        if accept(&result) {
            return;
        }
        eprintln!("a spoilt attempt: {result:?}");
        spoilt.push(result);
    }
    panic!("none of three attempts succeeds: {spoilt:?}");
}

/// Sets a flag when it is dropped, so that a scope's threads, which run until the flag is set, end even if the test
/// fails.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
