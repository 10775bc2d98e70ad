//! Queries over UDP.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Instant};

use hickory_proto::op::{Message, ResponseCode};
use rustix::net::sockopt;
use tokio::{net::UdpSocket, time::sleep};
use tracing::debug;

use crate::{
    clients::Admission,
    query::{self, Query, Refusal},
    server::{Begun, PAUSE, Server},
};

/// The largest query that is read over UDP.
const LARGEST_QUERY: usize = 4096;

/// Bytes for queries that wait for the server. The kernel doubles the value and then has room for about 10,000 short
/// queries; its default has room for about 250 and loses the others.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Enlarges the receive buffer. Without `CAP_NET_ADMIN`, it gets as large as `net.core.rmem_max` allows.
pub(crate) fn enlarge_buffer(socket: &UdpSocket) {
    let forced = sockopt::set_socket_recv_buffer_size_force(socket, RECEIVE_BUFFER);
    if let Err(error) = forced.or_else(|_| sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BUFFER)) {
        debug!("cannot enlarge the receive buffer of the DNS server: {error}");
    }
}

/// Answers the queries that come to the socket.
pub(crate) async fn serve(server: Arc<Server>, socket: UdpSocket) -> Infallible {
    let own = socket.local_addr().ok().map(|address| address.ip());
    let socket = Arc::new(socket);
    let mut buffer = vec![0; LARGEST_QUERY];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((length, client)) => {
                server.stats.count_query("udp");
                if server.clients.is_allowed(client.ip()) {
                    server.count_received(client.ip(), own);
                }
                answer(&server, &socket, client, buffer.get(..length).unwrap_or_default()).await;
            }
            Err(error) => {
                debug!("cannot receive a DNS query: {error}");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Answers a query, or begins to ask upstream servers.
async fn answer(server: &Arc<Server>, socket: &Arc<UdpSocket>, client: SocketAddr, bytes: &[u8]) {
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
        Begun::Answered(reply) => send(server, socket, client, &reply, limit).await,
        Begun::Outside(reply, name) => {
            let (server, socket) = (Arc::clone(server), Arc::clone(socket));
            let Ok(query) = read else { return };
            tokio::spawn(async move {
                let reply = server.complete(&query, reply, name).await;
                send(&server, &socket, client, &reply, limit).await;
            });
        }
    }
}

async fn send(server: &Server, socket: &UdpSocket, client: SocketAddr, reply: &Message, limit: u16) {
    let Some(bytes) = server.encode(reply, limit) else { return };
    if let Err(error) = socket.send_to(&bytes, client).await {
        debug!("cannot send a DNS answer to {client}: {error}");
    }
}
