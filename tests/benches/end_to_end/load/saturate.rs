//! A workload of connections from two CPUs at once, each with a client and a server.

use std::{io, net::SocketAddr, sync::Barrier, thread::scope, time::Duration};

use lb_tests::netns::Netns;

use super::{Servers, connect, join};
use crate::cpu::Cpus;

/// The result of a burst on two CPUs.
pub(crate) struct Saturated {
    /// Connections per second of both clients together.
    pub(crate) rate: f64,
    /// Latency of each connection, in seconds.
    pub(crate) latencies: Vec<f64>,
}

/// Runs both clients for `time`. Their servers share one listener, so the server on either CPU may accept a
/// connection.
pub(crate) fn run(
    client: &Netns,
    servers: &Servers,
    to: SocketAddr,
    cpus: [usize; 2],
    time: Duration,
) -> io::Result<Saturated> {
    let barrier = Barrier::new(cpus.len());
    let bursts = scope(|scope| {
        let of_cpu = cpus.map(|cpu| {
            let (cpus, barrier) = (Cpus { client: cpu, server: cpu }, &barrier);
            let server = scope.spawn(move || connect::serve(&servers.tcp, cpus));
            let client = scope.spawn(move || {
                client.run(|| {
                    barrier.wait();
                    connect::ask(to, cpus, time)
                })
            });
            (server, client)
        });
        of_cpu.map(|(server, client)| {
            let burst = join(client);
            join(server)?;
            burst
        })
    });
    let mut saturated = Saturated { rate: 0.0, latencies: Vec::new() };
    for burst in bursts {
        let burst = burst?;
        saturated.rate += burst.done as f64 / burst.usage.wall.as_secs_f64();
        saturated.latencies.extend(burst.latencies.iter().map(|nanoseconds| f64::from(*nanoseconds) / 1e9));
    }
    Ok(saturated)
}
