//! The workload `connect`: connects, sends and receives one byte, and closes.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread::scope,
    time::{Duration, Instant},
};

use lb_tests::netns::Netns;

use super::{Burst, join, nanoseconds};
use crate::cpu::{Cpus, Meter, claim};

/// The byte that the client sends on each connection except the last one.
const MORE: u8 = 1;
/// The byte that the client sends on its last connection; the server ends after this byte.
const LAST: u8 = 0;

pub(super) fn run(
    client: &Netns,
    listener: &TcpListener,
    to: SocketAddr,
    cpus: Cpus,
    time: Duration,
) -> io::Result<Burst> {
    scope(|scope| {
        let server = scope.spawn(|| serve(listener, cpus));
        let burst = client.run(|| ask(to, cpus, time))?;
        join(server)?;
        Ok(burst)
    })
}

pub(super) fn serve(listener: &TcpListener, cpus: Cpus) -> io::Result<()> {
    claim(cpus.server)?;
    loop {
        let (mut stream, _) = listener.accept()?;
        let mut byte = [MORE];
        if stream.read(&mut byte)? > 0 {
            stream.write_all(&byte)?;
        }
        if byte == [LAST] {
            return Ok(());
        }
        // Waits for the client to close first, so that TIME_WAIT is on the client's side.
        let _end = stream.read(&mut byte)?;
    }
}

pub(super) fn ask(to: SocketAddr, cpus: Cpus, time: Duration) -> io::Result<Burst> {
    claim(cpus.client)?;
    let transaction = |byte| {
        let mut stream = TcpStream::connect(to)?;
        stream.write_all(&[byte])?;
        stream.read_exact(&mut [0])
    };
    (0..3).try_for_each(|_| transaction(MORE))?;
    let mut latencies = Vec::with_capacity(1 << 14);
    let meter = Meter::start()?;
    let start = Instant::now();
    let mut now = start;
    while now - start < time {
        transaction(MORE)?;
        let then = Instant::now();
        latencies.push(nanoseconds(then - now));
        now = then;
    }
    let usage = meter.stop()?;
    transaction(LAST)?;
    Ok(Burst { done: latencies.len() as u64, usage, latencies })
}
