//! The workload `datagrams`: one thread sends a batch, then receives it, so that neither side waits for the other. The
//! first datagram gets a reply: flows of real clients have replies, and a load balancer may handle an unreplied flow
//! worse.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use lb_tests::{netns::Netns, wait_for};
use nix::{
    cmsg_space, libc,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg},
};

use super::{Burst, PATIENCE};
use crate::cpu::{Cpus, Meter, claim};

/// Payload of a datagram, which fills the smallest Ethernet frame over IPv4.
const PAYLOAD: [u8; 18] = [0; 18];
/// Number of datagrams per batch; they fit into the receive buffer of any socket.
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
        let socket = connect(to)?;
        socket.send(&PAYLOAD)?;
        let answered = wait_for(PATIENCE, || match answer(server) {
            Err(nix::Error::EAGAIN) => None,
            other => Some(other),
        });
        answered.ok_or_else(|| io::Error::other(format!("no datagram arrived at {to}")))??;
        socket.recv(&mut [0; 64])?;
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
        // A veth should lose no datagrams; more than 1 % of losses is an error.
        if done * 100 < sent * 99 {
            return Err(io::Error::other(format!("only {done} of {sent} datagrams arrived at {to}")));
        }
        Ok(Burst { done, usage, latencies: Vec::new() })
    })
}

fn connect(to: SocketAddr) -> io::Result<UdpSocket> {
    let any = SocketAddr::new(if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() }, 0);
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// Receives a datagram and replies from the address that it was sent to, as the server has many addresses.
fn answer(server: &UdpSocket) -> nix::Result<()> {
    let mut payload = [0; 64];
    let mut iov = [IoSliceMut::new(&mut payload)];
    let mut space = cmsg_space!(libc::in6_pktinfo);
    let message =
        recvmsg::<SockaddrStorage>(server.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::empty())?;
    let send = |from: &[ControlMessage<'_>]| {
        let iov = [IoSlice::new(&PAYLOAD)];
        sendmsg(server.as_raw_fd(), &iov, from, MsgFlags::empty(), message.address.as_ref())
    };
    for control in message.cmsgs()? {
        if let ControlMessageOwned::Ipv4PacketInfo(info) = control {
            send(&[ControlMessage::Ipv4PacketInfo(&libc::in_pktinfo { ipi_ifindex: 0, ..info })])?;
        } else if let ControlMessageOwned::Ipv6PacketInfo(info) = control {
            send(&[ControlMessage::Ipv6PacketInfo(&libc::in6_pktinfo { ipi6_ifindex: 0, ..info })])?;
        }
    }
    Ok(())
}

/// Receives all datagrams that wait; returns their number.
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
