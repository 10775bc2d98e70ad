//! Datagrams: a batch is sent, then received. One thread does both, so that the one never waits for the other.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use lb_tests::netns::Netns;

use super::Burst;
use crate::cpu::{Cpus, Meter, claim};

/// The smallest Ethernet frame has room for so much.
const PAYLOAD: [u8; 18] = [0; 18];
/// So many fit into the buffer of any socket.
const BATCH: u32 = 64;

pub(super) fn run(
    client: &Netns,
    server: &UdpSocket,
    to: SocketAddr,
    cpus: Cpus,
    time: Duration,
) -> io::Result<Burst> {
    client.run(|| {
        claim(cpus.client)?;
        let any = SocketAddr::new(if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() }, 0);
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        // The first one may wait for a neighbour's address.
        socket.send(&PAYLOAD)?;
        std::thread::sleep(Duration::from_millis(2));
        receive(server)?;
        let meter = Meter::start()?;
        let start = Instant::now();
        let (mut sent, mut done) = (0_u64, 0);
        while start.elapsed() < time {
            for _ in 0..BATCH {
                socket.send(&PAYLOAD)?;
            }
            sent += u64::from(BATCH);
            done += receive(server)?;
        }
        let usage = meter.stop()?;
        // On a veth nothing is lost unless something is wrong.
        if done * 100 < sent * 99 {
            return Err(io::Error::other(format!("{done} of {sent} datagrams have arrived at {to}")));
        }
        Ok(Burst { done, usage, latencies: Vec::new() })
    })
}

/// How many datagrams are there.
fn receive(server: &UdpSocket) -> io::Result<u64> {
    let mut buffer = [0; 64];
    let mut count = 0;
    loop {
        match server.recv(&mut buffer) {
            Ok(_) => count += 1,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(count),
            Err(error) => return Err(error),
        }
    }
}
