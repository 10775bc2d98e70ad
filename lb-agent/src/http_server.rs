//! Serves HTTP/1.1 on the connections of a listener. A client that does not finish a request keeps its connection for
//! [`LONGEST_REQUEST`] at most: otherwise such clients would use up the agent's file descriptors.

use std::{convert::Infallible, pin::Pin, time::Duration};

use axum::{
    Router,
    http::{Request, StatusCode},
    response::{IntoResponse as _, Response},
    serve::Listener,
};
use hyper::{body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, time::timeout};
use tracing::debug;

/// How long a client may take to send the header of a request, how long a connection may wait for the next request, and
/// how long the agent may take to read the rest of a request and to begin the response. 23 s is no multiple of common
/// intervals of scrapes, so a connection never ends just when a scrape begins.
const LONGEST_REQUEST: Duration = Duration::from_secs(23);

/// Serves `router` on all connections of `listener`, forever.
pub(crate) async fn serve(mut listener: TcpListener, router: Router) -> Infallible {
    serve_all(&mut listener, &router, LONGEST_REQUEST, &GracefulShutdown::new()).await
}

/// Serves `router` on all connections of `listener` until `stop` completes; then waits until all requests that have
/// arrived are answered.
pub(crate) async fn serve_until(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) {
    serve_limited(listener, router, LONGEST_REQUEST, stop).await;
}

/// Like [`serve_until`], with `longest` in place of [`LONGEST_REQUEST`].
async fn serve_limited(
    mut listener: TcpListener,
    router: Router,
    longest: Duration,
    stop: impl Future<Output = ()>,
) {
    let connections = GracefulShutdown::new();
    tokio::select! {
        never = serve_all(&mut listener, &router, longest, &connections) => match never {},
        () = stop => {}
    }
    drop(listener);
    connections.shutdown().await;
}

/// Accepts connections, and spawns a task for each. Pauses if it cannot accept a connection, for example without a free
/// file descriptor.
async fn serve_all(
    listener: &mut TcpListener,
    router: &Router,
    longest: Duration,
    connections: &GracefulShutdown,
) -> Infallible {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(longest);
    loop {
        let (stream, _client) = Listener::accept(listener).await;
        let service = Limited { service: TowerToHyperService::new(router.clone()), longest };
        let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!("an HTTP connection has ended early: {error}");
            }
        });
    }
}

/// A service whose responses begin within `longest`.
struct Limited {
    service: TowerToHyperService<Router>,
    longest: Duration,
}

impl Service<Request<Incoming>> for Limited {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let response = timeout(self.longest, self.service.call(request));
        Box::pin(async {
            response.await.unwrap_or_else(|_elapsed| Ok(StatusCode::REQUEST_TIMEOUT.into_response()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{future, net::SocketAddr};

    use axum::routing::{get, post};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        sync::oneshot,
        task::JoinHandle,
        time::Instant,
    };

    use super::*;

    async fn start(
        longest: Duration,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/", get(|| async { "served" }))
            .route("/form", post(|body: String| async move { drop(body) }));
        (address, tokio::spawn(serve_limited(listener, router, longest, stop)))
    }

    /// Sends `request` and reads the beginning `answer`. Then waits until the server closes the connection; returns what
    /// the server has sent in that time, and how long it took.
    async fn exchange(address: SocketAddr, request: &str, answer: &str) -> (String, Duration) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut first = vec![0; answer.len()];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(String::from_utf8(first).unwrap(), answer);
        let begin = Instant::now();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        (String::from_utf8(rest).unwrap(), begin.elapsed())
    }

    #[tokio::test]
    async fn connection_without_a_whole_request_ends_after_a_while() {
        let (address, _server) = start(Duration::from_secs(1), future::pending()).await;
        let ok = "HTTP/1.1 200 OK\r\n";
        for (request, answer, last) in [
            ("", "", ""),
            ("GET / HTTP/1.1\r\nHost: a\r\n", "", ""),
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", ok, "served"),
            (
                "POST /form HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab",
                "",
                "HTTP/1.1 408 Request Timeout",
            ),
        ] {
            let (rest, took) = exchange(address, request, answer).await;
            assert_eq!(rest.is_empty(), last.is_empty(), "{request:?}: {rest}");
            assert!(rest.contains(last), "{request:?}: {rest}");
            // Much longer than a second, for a busy machine.
            assert!(took < LONGEST_REQUEST, "{request:?}: {took:?}");
        }
    }

    #[tokio::test]
    async fn server_that_stops_closes_idle_connections_at_once() {
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, server) = start(LONGEST_REQUEST, async move { drop(stopped.await) }).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        idle.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        let begin = Instant::now();
        drop(stop);
        server.await.unwrap();
        idle.read_to_end(&mut Vec::new()).await.unwrap();
        assert!(begin.elapsed() < LONGEST_REQUEST, "{:?}", begin.elapsed());
        TcpStream::connect(address).await.expect_err("the listener is closed");
    }
}
