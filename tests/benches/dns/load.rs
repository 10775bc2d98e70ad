//! Load by dnsperf, and what it reports.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lb_tests::{agent::run, bench::cpu_time, dnsperf::Statistics, netns::Netns};
use serde::Serialize;

use crate::workload::Kind;

/// One burst of queries to one server.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Burst {
    /// Answered queries per second.
    pub(crate) rate: f64,
    /// CPU seconds of the server for each query.
    pub(crate) cpu: f64,
    /// Mean size of an answer in bytes.
    pub(crate) size: f64,
}

/// Sends queries of one kind to a server, as fast as it answers, from 4 sockets with up to 100 open queries in all.
pub(crate) fn burst(
    netns: &Netns,
    (server, pid): (SocketAddr, u32),
    queries: &Path,
    kind: Kind,
    time: Duration,
) -> Result<Burst> {
    let mut command = netns.command("dnsperf");
    command.args(["-e", "-c", "4", "-T", "1", "-q", "100", "-s", &server.ip().to_string()]);
    command.args(["-p", &server.port().to_string(), "-l", &time.as_secs_f64().to_string()]);
    command.arg("-d").arg(queries);
    let before = cpu_time(pid)?;
    let text = String::from_utf8(run(&mut command)?.stdout)?;
    let cpu = cpu_time(pid)?.saturating_sub(before);
    read(&text, kind, cpu).with_context(|| format!("{server}, {kind}: dnsperf printed:\n{text}"))
}

/// Reads what dnsperf has printed. Fails if a query was lost, or if an answer has another response code than expected
/// for this kind of query.
fn read(text: &str, kind: Kind, cpu: Duration) -> Result<Burst> {
    let Statistics { completed, lost, codes, rate, answer_size } = Statistics::read(text)?;
    ensure!(completed > 0 && lost == 0, "queries were lost");
    ensure!(codes.starts_with(kind.code()) && !codes.contains(','), "answers are {codes}");
    Ok(Burst { rate, cpu: cpu.as_secs_f64() / completed as f64, size: answer_size })
}
