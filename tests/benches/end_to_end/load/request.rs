//! The workloads `request` and `paced`: one byte there and back over one connection, repeatedly.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use lb_tests::netns::Netns;

use super::{Burst, PATIENCE, join, nanoseconds};
use crate::cpu::{Cpus, Meter, claim};

/// Number of requests that a paced client sends between two sleeps.
const BATCH: u32 = 4;

pub(super) fn run(
    client: &Netns,
    listener: &TcpListener,
    to: SocketAddr,
    cpus: Cpus,
    time: Duration,
    pace: Option<u32>,
) -> io::Result<Burst> {
    scope(|scope| {
        let server = scope.spawn(|| serve(listener, cpus));
        let burst = client.run(|| ask(to, cpus, time, pace))?;
        join(server)?;
        Ok(burst)
    })
}

/// Echoes bytes on one connection until it ends. Skips connections without a request, which an earlier burst may have
/// left.
fn serve(listener: &TcpListener, cpus: Cpus) -> io::Result<()> {
    claim(cpus.server)?;
    let mut answered = 0_u64;
    while answered == 0 {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        while stream.read(&mut byte)? > 0 {
            stream.write_all(&byte)?;
            answered += 1;
        }
    }
    Ok(())
}

fn ask(to: SocketAddr, cpus: Cpus, time: Duration, pace: Option<u32>) -> io::Result<Burst> {
    claim(cpus.client)?;
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut transaction = || {
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])
    };
    // Before the measurement, some requests resolve neighbours and grow TCP windows.
    (0..10).try_for_each(|_| transaction())?;
    let mut latencies = Vec::with_capacity(1 << 16);
    let meter = Meter::start()?;
    let start = Instant::now();
    let mut now = start;
    while now - start < time {
        transaction()?;
        let then = Instant::now();
        latencies.push(nanoseconds(then - now));
        now = then;
        if let Some(pace) = pace {
            now = wait(start, latencies.len() as u64, pace);
        }
    }
    let usage = meter.stop()?;
    Ok(Burst { done: latencies.len() as u64, usage, latencies })
}

/// If `done` requests complete a batch, sleeps until the next batch is due. Always returns the current time.
fn wait(start: Instant, done: u64, pace: u32) -> Instant {
    if done.is_multiple_of(u64::from(BATCH)) {
        let due = start + Duration::from_secs_f64(done as f64 / f64::from(pace));
        sleep(due.saturating_duration_since(Instant::now()));
    }
    Instant::now()
}
