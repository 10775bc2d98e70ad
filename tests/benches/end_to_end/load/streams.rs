//! The workloads `stream` and `streams`: TCP connections at full speed.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread::{Scope, ScopedJoinHandle, scope},
    time::{Duration, Instant},
};

use lb_tests::netns::Netns;

use super::{Burst, PATIENCE, join};
use crate::cpu::{Cpus, Meter, Usage, claim};

/// Number of bytes per write and per read.
const PIECE: usize = 128 * 1024;

pub(super) fn run(
    client: &Netns,
    listener: &TcpListener,
    to: SocketAddr,
    cpus: Cpus,
    time: Duration,
    connections: usize,
) -> io::Result<Burst> {
    scope(|scope| {
        let server = scope.spawn(move || serve(scope, listener, cpus, connections));
        let usage = client.run(|| send_all(to, cpus, time, connections))?;
        let done = join(server)?;
        Ok(Burst { done, usage, latencies: Vec::new() })
    })
}

/// Receives on all connections until they end; returns the number of bytes.
fn serve<'scope>(
    scope: &'scope Scope<'scope, '_>,
    listener: &TcpListener,
    cpus: Cpus,
    connections: usize,
) -> io::Result<u64> {
    let accepted = (0..connections).map(|_| listener.accept());
    let threads = accepted.map(|stream| {
        let (stream, _) = stream?;
        Ok(scope.spawn(move || read_all(stream, cpus)))
    });
    let threads = threads.collect::<io::Result<Vec<_>>>()?;
    threads.into_iter().map(join).sum()
}

fn read_all(mut stream: TcpStream, cpus: Cpus) -> io::Result<u64> {
    claim(cpus.server)?;
    let mut buffer = vec![0; PIECE];
    let mut bytes = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(bytes),
            len => bytes += len as u64,
        }
    }
}

/// Sends on all connections. New threads inherit the namespace of the calling thread.
fn send_all(to: SocketAddr, cpus: Cpus, time: Duration, connections: usize) -> io::Result<Usage> {
    let connect = || TcpStream::connect_timeout(&to, PATIENCE);
    let streams = (0..connections).map(|_| connect()).collect::<io::Result<Vec<_>>>()?;
    let meter = Meter::start()?;
    scope(|scope| {
        let send = |stream| scope.spawn(move || send(stream, cpus, time));
        let threads: Vec<ScopedJoinHandle<'_, _>> = streams.into_iter().map(send).collect();
        threads.into_iter().try_for_each(join)
    })?;
    meter.stop()
}

/// Sends on one connection for `time`; returns when the other end has read all bytes.
fn send(mut stream: TcpStream, cpus: Cpus, time: Duration) -> io::Result<()> {
    claim(cpus.client)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let piece = vec![0; PIECE];
    let start = Instant::now();
    while start.elapsed() < time {
        stream.write_all(&piece)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let _end = stream.read(&mut [0])?;
    Ok(())
}
