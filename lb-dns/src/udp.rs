//! Queries over UDP.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use hickory_proto::op::{Message, ResponseCode};
use rustix::net::sockopt;
use tokio::{
    net::UdpSocket,
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::debug;

use crate::{
    clients::Admission,
    query::{self, Query, Refusal},
    server::{Begun, PAUSE, Server},
};

/// The largest query that is read over UDP.
const LARGEST_QUERY: usize = 4096;

/// Size in bytes of the receive buffer, where queries wait for the server. The kernel doubles the value; the buffer
/// then has room for about 10,000 short queries. The default buffer has room for about 250 queries, and the kernel
/// drops all others.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Size in bytes of the send buffer, which holds answers that the kernel has not sent yet. The kernel keeps answers for
/// neighbours whose MAC address it does not know: by default 212,992 bytes for each neighbour, which is also the
/// default size of the whole buffer.
const SEND_BUFFER: usize = 4 << 20;

/// Interval in which the server notices that time passes.
const TICK: Duration = Duration::from_millis(500);
/// A longer pause means that the server's process was stopped: the clients of the queries that have waited meanwhile
/// have given up or asked again, and the server's names may be old.
const STOPPED: Duration = Duration::from_secs(2);
/// Maximum number of queries that are discarded after a pause: more than [`RECEIVE_BUFFER`] has room for.
const MOST_WAITING: usize = 20_000;

/// Enlarges the buffers. Without `CAP_NET_ADMIN`, they get as large as `net.core.rmem_max` and `wmem_max` allow.
pub(crate) fn enlarge_buffers(socket: &UdpSocket) {
    use sockopt::{
        set_socket_recv_buffer_size, set_socket_recv_buffer_size_force, set_socket_send_buffer_size,
        set_socket_send_buffer_size_force,
    };

    let received = set_socket_recv_buffer_size_force(socket, RECEIVE_BUFFER)
        .or_else(|_| set_socket_recv_buffer_size(socket, RECEIVE_BUFFER));
    let sent = set_socket_send_buffer_size_force(socket, SEND_BUFFER)
        .or_else(|_| set_socket_send_buffer_size(socket, SEND_BUFFER));
    for (buffer, result) in [("receive", received), ("send", sent)] {
        if let Err(error) = result {
            debug!("cannot enlarge the {buffer} buffer of the DNS server: {error}");
        }
    }
}

/// Answers the queries that come to the socket. Discards those that have waited while the process was stopped.
pub(crate) async fn serve(server: Arc<Server>, socket: UdpSocket) -> Infallible {
    let own = socket.local_addr().ok().map(|address| address.ip());
    let socket = Arc::new(socket);
    let mut buffer = vec![0; LARGEST_QUERY];
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Instant::now();
    loop {
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => Some(received),
            _ = ticks.tick() => None,
        };
        let before = std::mem::replace(&mut last, Instant::now());
        if last.duration_since(before) > STOPPED {
            let discarded = usize::from(received.is_some()) + discard(&socket, &mut buffer);
            server.stats.dropped.inc_by(discarded as u64);
            debug!("discarded {discarded} DNS queries that waited while this process was stopped");
            continue;
        }
        match received {
            None => {}
            Some(Ok((length, client))) => {
                server.stats.count_query("udp");
                if server.clients.is_allowed(client.ip()) {
                    server.count_received(client.ip(), own);
                }
                answer(&server, &socket, client, buffer.get(..length).unwrap_or_default());
            }
            Some(Err(error)) => {
                debug!("cannot receive a DNS query: {error}");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Discards the datagrams that wait in the socket; returns their number.
fn discard(socket: &UdpSocket, buffer: &mut [u8]) -> usize {
    (0..MOST_WAITING).take_while(|_| socket.try_recv_from(buffer).is_ok()).count()
}

/// Answers a query, or begins to ask upstream servers.
fn answer(server: &Arc<Server>, socket: &Arc<UdpSocket>, client: SocketAddr, bytes: &[u8]) {
    let admission = server.clients.admit_from(client, Instant::now());
    server.stats.refused_clients.inc_by((admission == Admission::Refuse).into());
    server.stats.rate_limited.inc_by([Admission::Slip, Admission::Drop].contains(&admission).into());
    // No client has port 0, so such a query is forged: its answer would go to a victim, or nowhere.
    let is_dropped = admission == Admission::Drop || client.port() == 0;
    let read = if is_dropped { Err(Refusal::Drop) } else { query::read(bytes) };
    let limit = read.as_ref().map_or(u16::MAX, Query::udp_limit);
    let begun = match (&read, admission) {
        (Ok(query), Admission::Refuse) => server.refused(query.reply(ResponseCode::Refused)),
        (Ok(query), Admission::Slip) => {
            let mut reply = query.reply(ResponseCode::NoError);
            reply.metadata.truncation = true;
            server.refused(reply)
        }
        _ => server.begin(&read, limit),
    };
    match begun {
        Begun::Dropped => _ = server.stats.dropped.inc(),
        Begun::Answered(reply) => send(server, socket, client, &reply, limit),
        Begun::Outside(reply, name) => {
            let (server, socket) = (Arc::clone(server), Arc::clone(socket));
            let Ok(query) = read else { return };
            tokio::spawn(async move {
                let reply = server.complete(&query, reply, name).await;
                send(&server, &socket, client, &reply, limit);
            });
        }
    }
}

/// Sends an answer. Drops it if the send buffer is full, and does not wait: answers to forged addresses of neighbours
/// that do not exist stay in the buffer for three seconds, and queries of other clients must not wait for these
/// answers.
fn send(server: &Server, socket: &UdpSocket, client: SocketAddr, reply: &Message, limit: u16) {
    let Some(bytes) = server.encode(reply, limit) else { return };
    if let Err(error) = socket.try_send_to(&bytes, client) {
        server.stats.dropped.inc_by((error.kind() == io::ErrorKind::WouldBlock).into());
        debug!("cannot send a DNS answer to {client}: {error}");
    }
}
