//! Serves HTTP/1.1 on the connections of a listener. Clients that send nothing, or send slowly, keep no connection for
//! long: otherwise they would use up the agent's file descriptors.

use std::{pin::pin, time::Duration};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tracing::debug;

/// How long a client may take to send the header of a request, and how long a connection may wait for the next request.
/// Scrapes at intervals of 5, 10 and 15 s keep their connection; it is no multiple of these, so no scrape meets the end
/// of its connection.
const LONGEST_HEADER: Duration = Duration::from_secs(23);

/// Serves `router` on all connections of `listener` until `stop` completes; then waits until all requests that have
/// arrived are answered. Pauses if it cannot accept a connection, for example without a free file descriptor.
pub(crate) async fn serve(mut listener: TcpListener, router: Router, stop: impl Future<Output = ()>) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(LONGEST_HEADER);
    let connections = GracefulShutdown::new();
    let mut stop = pin!(stop);
    loop {
        let stream = tokio::select! {
            (stream, _client) = Listener::accept(&mut listener) => stream,
            () = &mut stop => break,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!("an HTTP connection has ended early: {error}");
            }
        });
    }
    drop(listener);
    connections.shutdown().await;
}

#[cfg(test)]
mod tests {
    use std::{future, net::SocketAddr};

    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        sync::oneshot,
        task::JoinHandle,
        time::Instant,
    };

    use super::*;

    async fn start(stop: impl Future<Output = ()> + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "served" }));
        (address, tokio::spawn(serve(listener, router, stop)))
    }

    /// Sends `request`; returns all that the server sends until it closes the connection, and how long that took.
    async fn exchange(address: SocketAddr, request: &str) -> (String, Duration) {
        let begin = Instant::now();
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        (String::from_utf8(answer).unwrap(), begin.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_whole_request_ends_after_a_while() {
        let (address, _server) = start(future::pending()).await;
        for request in ["", "GET / HTTP/1.1\r\nHost: a\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\r\n"] {
            let (answer, took) = exchange(address, request).await;
            assert_eq!(answer.contains("served"), request.ends_with("\r\n\r\n"), "{request:?}: {answer}");
            assert!(took >= LONGEST_HEADER && took < 2 * LONGEST_HEADER, "{request:?}: {took:?}");
        }
    }

    #[tokio::test]
    async fn server_that_stops_closes_idle_connections_at_once() {
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, server) = start(async move { drop(stopped.await) }).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        idle.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        drop(stop);
        server.await.unwrap();
        idle.read_to_end(&mut Vec::new()).await.unwrap();
        TcpStream::connect(address).await.expect_err("the listener is closed");
    }
}
