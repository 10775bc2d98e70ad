//! Opens listening sockets for one address family only.

use std::{io, net::SocketAddr};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};

/// Maximum number of connections that wait to be accepted: the default of `net.core.somaxconn`, which kube-proxy uses
/// through Go.
const BACKLOG: u32 = 4096;

/// Listens on the address. A socket on `::` accepts only IPv6, so that another socket can listen on `0.0.0.0` at the
/// same port.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            sockopt::set_ipv6_v6only(&socket, true)?;
            socket
        }
    };
    // Otherwise `bind` fails while closed connections of the previous server are in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
