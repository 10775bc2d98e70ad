//! All endpoints fail at once, and return: how long the agent takes to find out, and its CPU time until then.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lb_tests::{bench::cpu_time, http, netns::Netns};
use serde::Serialize;

use crate::server::Server;

/// Address at which the agent serves its metrics.
pub(crate) const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
/// Interval at which the benchmark reads the metrics.
const POLL: Duration = Duration::from_millis(250);
/// Number of probe intervals within which the agent must change the verdict of all endpoints.
const PATIENCE: u32 = 12;

/// The time until all endpoints have a new verdict, and the agent's CPU time until then, both in seconds.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Turn {
    pub(crate) seconds: f64,
    pub(crate) cpu: f64,
}

/// Makes all endpoints unreachable, then reachable again; measures how long the agent (process `pid`) takes to notice
/// each change.
pub(crate) fn measure(netns: &Netns, pid: u32, endpoints: u32, interval: Duration) -> Result<[Turn; 2]> {
    let until = |health: &str| turn(netns, pid, (health, endpoints), interval * PATIENCE);
    Server::unplug(netns)?;
    let fall = until("unhealthy")?;
    Server::plug(netns)?;
    Ok([fall, until("healthy")?])
}

fn turn(netns: &Netns, pid: u32, (health, endpoints): (&str, u32), patience: Duration) -> Result<Turn> {
    let (start, before) = (Instant::now(), cpu_time(pid)?);
    loop {
        let found = count(netns, health)?;
        if found == endpoints {
            let cpu = cpu_time(pid)?.saturating_sub(before).as_secs_f64();
            return Ok(Turn { seconds: start.elapsed().as_secs_f64(), cpu });
        }
        ensure!(start.elapsed() < patience, "only {found} endpoints are {health} after {patience:?}");
        sleep(POLL);
    }
}

/// Number of endpoints that the agent has found to be in the state `health`, as its metrics say.
fn count(netns: &Netns, health: &str) -> Result<u32> {
    let metrics = http::get(netns, METRICS, "/metrics").context("reading the metrics of the agent")?;
    let name = format!("lb_probed_endpoints{{health=\"{health}\"}}");
    metrics.metric(&name).with_context(|| format!("the agent has no metric {name}"))
}
