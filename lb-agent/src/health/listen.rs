//! Sockets that leave the other family alone.

use std::{io, net::SocketAddr};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};

/// Connections that may wait to be accepted: what Go asks for.
const BACKLOG: u32 = 4096;

/// Listens on this address; on `::` for IPv6 only, since another server has IPv4.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            sockopt::set_ipv6_v6only(&socket, true)?;
            socket
        }
    };
    // Not to wait for the last connections of the server before us.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
