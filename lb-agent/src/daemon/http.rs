//! HTTP servers that retry until their address is free.

use std::{
    convert::Infallible,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::Router;
use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpSocket},
    time,
};
use tracing::{info, warn};

use crate::http_server;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Pause before the next attempt to listen on a busy address.
const PAUSE: Duration = Duration::from_secs(5);

/// Serves `router` on `address`, on at most `most` connections at a time. As in kube-proxy, a busy address does not
/// stop the agent: the agent logs one warning and retries until it can listen. `attempted` receives the result of each
/// attempt.
pub(super) async fn serve(
    what: &'static str,
    address: SocketAddr,
    (router, most): (Router, usize),
    attempted: impl Fn(Result<(), &io::Error>),
) -> anyhow::Result<Infallible> {
    let mut warned = false;
    loop {
        let error = match listen(address) {
            Ok(listener) => {
                info!(%address, "serving {what}");
                attempted(Ok(()));
                return Ok(http_server::serve(listener, router, most).await);
            }
            Err(error) => error,
        };
        attempted(Err(&error));
        if !warned {
            warned = true;
            warn!(%address, %error, "cannot serve {what}: free the address or configure another one; retrying");
        }
        time::sleep(PAUSE).await;
    }
}

/// Listens on the address. As in kube-proxy, `0.0.0.0` and `::` both stand for every address of both families.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match address {
        SocketAddr::V4(v4) if *v4.ip() == Ipv4Addr::UNSPECIFIED => {
            match bind((Ipv6Addr::UNSPECIFIED, v4.port()).into()) {
                // Without IPv6 in the kernel, the agent serves IPv4 only. But if another process has the port for IPv6
                // only, the agent serves neither family: that process would answer IPv6 clients in place of the agent.
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => bind(address),
                result => result,
            }
        }
        SocketAddr::V4(_) | SocketAddr::V6(_) => bind(address),
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(v6) => {
            let socket = TcpSocket::new_v6()?;
            sockopt::set_ipv6_v6only(&socket, !v6.ip().is_unspecified())?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use tokio::{net::TcpStream, sync::mpsc};

    use super::*;

    /// The result of the first attempt of [`serve`] to listen at the address.
    async fn first_attempt(address: SocketAddr) -> Result<(), io::ErrorKind> {
        let (sender, mut attempts) = mpsc::unbounded_channel();
        let attempted =
            move |result: Result<(), &io::Error>| sender.send(result.map_err(io::Error::kind)).unwrap();
        tokio::select! {
            served = serve("/test", address, (Router::new(), 1), attempted) => panic!("{served:?}"),
            attempt = attempts.recv() => attempt.unwrap(),
        }
    }

    #[tokio::test]
    async fn each_attempt_to_listen_is_reported() {
        let taken = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = taken.local_addr().unwrap();
        assert_eq!(first_attempt(address).await, Err(io::ErrorKind::AddrInUse));
        drop(taken);
        assert_eq!(first_attempt(address).await, Ok(()));
    }

    #[tokio::test]
    async fn address_that_is_busy_in_one_family_is_not_served_in_the_other() {
        for taken in ["127.0.0.1:0", "[::1]:0"] {
            let taken = listen(taken.parse().unwrap()).unwrap();
            let port = taken.local_addr().unwrap().port();
            for every in
                [SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), (Ipv6Addr::UNSPECIFIED, port).into()]
            {
                let error = listen(every).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{every}, {taken:?}");
            }
        }
    }

    /// Whether a connection to the address succeeds over IPv4, and whether it does over IPv6.
    async fn reached(address: &str) -> [bool; 2] {
        let listener = listen(address.parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        let [v4, v6]: [SocketAddr; 2] =
            [(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()];
        [TcpStream::connect(v4).await.is_ok(), TcpStream::connect(v6).await.is_ok()]
    }

    #[tokio::test]
    async fn unspecified_address_serves_both_families() {
        assert_eq!(reached("0.0.0.0:0").await, [true, true]);
        assert_eq!(reached("[::]:0").await, [true, true]);
        assert_eq!(reached("127.0.0.1:0").await, [true, false]);
        assert_eq!(reached("[::1]:0").await, [false, true]);
    }
}
