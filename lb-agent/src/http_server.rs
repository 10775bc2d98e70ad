//! Serves HTTP/1.1 on the connections of a listener. Clients that are idle, slow or do not read would use up the
//! agent's file descriptors and memory. So the server ends a connection on which no whole request header arrives within
//! [`LONGEST_REQUEST`]. If the rest of the request does not arrive within the same time after that, the server answers
//! 408 and ends the connection. The kernel ends a connection whose client does not read the response for
//! [`LONGEST_STALL`].
//!
//! Each server has a maximum number of connections. At the maximum, it ends the oldest connection to serve a new one:
//! so clients that hold connections never keep out a probe, which the server answers within milliseconds.

use std::{collections::VecDeque, convert::Infallible, pin::Pin, time::Duration};

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
use rustix::net::sockopt;
use tokio::{net::TcpListener, task::JoinHandle, time::timeout};
use tracing::{debug, warn};

/// Maximum number of connections of a server whose responses are some hundred bytes long: the server of `/healthz`, and
/// each server of a `healthCheckNodePort`. The probes of many load balancers may keep connections open.
pub(crate) const MOST_OF_PROBES: usize = 256;
/// Maximum number of connections of a server whose responses may be megabytes long: the servers of `/metrics` and of
/// the pages for browsers. The agent keeps a response until the client has read it, and a browser opens up to 6
/// connections.
pub(crate) const MOST_OF_PAGES: usize = 64;

/// How long a client may take to send the header of a request, how long a connection may wait for the next request, and
/// how long the agent may take to read the rest of a request and to begin the response. 23 s is no multiple of common
/// intervals of scrapes, so a connection never ends just when a scrape begins.
const LONGEST_REQUEST: Duration = Duration::from_secs(23);

/// How long a client may neither read nor acknowledge what the agent has sent.
const LONGEST_STALL: Duration = LONGEST_REQUEST;

/// The limits of a server: how many connections it has, and how long a request may take.
#[derive(Clone, Copy)]
struct Limits {
    /// The maximum number of connections.
    most: usize,
    /// See [`LONGEST_REQUEST`].
    longest: Duration,
}

/// Serves `router` on the connections of `listener`, at most `most` at a time, forever.
pub(crate) async fn serve(mut listener: TcpListener, router: Router, most: usize) -> Infallible {
    let limits = Limits { most, longest: LONGEST_REQUEST };
    serve_all(&mut listener, &router, limits, &GracefulShutdown::new()).await
}

/// Serves `router` on the connections of `listener`, at most `most` at a time, until `stop` completes; then waits until
/// all requests that have arrived are answered.
pub(crate) async fn serve_until(
    listener: TcpListener,
    router: Router,
    most: usize,
    stop: impl Future<Output = ()>,
) {
    serve_limited(listener, router, Limits { most, longest: LONGEST_REQUEST }, stop).await;
}

/// As [`serve_until`], but the caller also sets the time limit for a request; in [`serve_until`], the limit is
/// [`LONGEST_REQUEST`].
async fn serve_limited(
    mut listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
) {
    let stopping = GracefulShutdown::new();
    tokio::select! {
        never = serve_all(&mut listener, &router, limits, &stopping) => match never {},
        () = stop => {}
    }
    drop(listener);
    stopping.shutdown().await;
}

/// Accepts connections, and spawns a task for each. Pauses if it cannot accept a connection, for example without a free
/// file descriptor.
async fn serve_all(
    listener: &mut TcpListener,
    router: &Router,
    Limits { most, longest }: Limits,
    stopping: &GracefulShutdown,
) -> Infallible {
    if let Err(error) = limit_stalls(listener, LONGEST_STALL) {
        warn!(%error, "clients that do not read a response keep their connections");
    }
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(longest);
    let mut connections = Connections { most, tasks: VecDeque::new() };
    loop {
        let (stream, _client) = Listener::accept(listener).await;
        let service = Limited { service: TowerToHyperService::new(router.clone()), longest };
        let connection = stopping.watch(http.serve_connection(TokioIo::new(stream), service));
        connections.spawn(async move {
            if let Err(error) = connection.await {
                debug!("an HTTP connection has ended early: {error}");
            }
        });
    }
}

/// Makes the kernel end connections to this listener whose client neither reads nor acknowledges data for `longest`
/// (`TCP_USER_TIMEOUT`). This also ends the connections of browsers that showed the page Live and are gone, because the
/// stream of that page has data at least every 15 s.
fn limit_stalls(listener: &TcpListener, longest: Duration) -> rustix::io::Result<()> {
    let milliseconds = u32::try_from(longest.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(listener, milliseconds)
}

/// The connections of a server.
struct Connections {
    /// The maximum number of connections.
    most: usize,
    /// The tasks of the connections, the oldest first. Some may have ended.
    tasks: VecDeque<JoinHandle<()>>,
}

impl Connections {
    /// Spawns the task of a new connection. If there are `most` connections already, ends the oldest one.
    fn spawn(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        self.tasks.retain(|task| !task.is_finished());
        if self.tasks.len() >= self.most
            && let Some(oldest) = self.tasks.pop_front()
        {
            oldest.abort();
        }
        self.tasks.push_back(tokio::spawn(connection));
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
    use std::{future, io, net::SocketAddr};

    use axum::routing::{get, post};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        sync::oneshot,
        time::Instant,
    };

    use super::*;

    /// Maximum number of connections of the tests' server.
    const MOST: usize = 3;
    /// A limit that a test can wait for.
    const SHORT: Duration = Duration::from_millis(500);

    async fn start(
        longest: Duration,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/", get(|| async { "served" }))
            .route("/form", post(|body: String| async move { drop(body) }));
        (address, tokio::spawn(serve_limited(listener, router, Limits { most: MOST, longest }, stop)))
    }

    /// Sends `request` and reads the beginning `answer`. Then reads until the server closes the connection. Returns the
    /// text that this last step has read, and its duration.
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
        let (address, _server) = start(SHORT, future::pending()).await;
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
            assert!((SHORT / 2..LONGEST_REQUEST).contains(&took), "{request:?}: {took:?}");
        }
    }

    /// Sends a request, and reads the whole response.
    async fn ask(stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await?;
        let mut response = Vec::new();
        while !response.ends_with(b"served") {
            if stream.read_buf(&mut response).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    #[tokio::test]
    async fn client_beyond_the_maximum_ends_the_oldest_connection() {
        let (address, _server) = start(LONGEST_REQUEST, future::pending()).await;
        let mut held = Vec::new();
        for _ in 0..=MOST {
            let mut stream = TcpStream::connect(address).await.unwrap();
            ask(&mut stream).await.unwrap();
            held.push(stream);
        }
        let mut oldest = held.remove(0);
        let mut rest = Vec::new();
        let ended = timeout(LONGEST_REQUEST / 2, oldest.read_to_end(&mut rest)).await;
        let (Ok(_) | Err(_)) = ended.expect("the server has closed the oldest connection");
        for stream in &mut held {
            ask(stream).await.expect("the others are open");
        }
    }

    #[tokio::test]
    async fn client_that_does_not_read_loses_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        limit_stalls(&listener, Duration::from_millis(300)).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let refused = async {
            loop {
                if let Err(error) = stream.write_all(&[0; 1 << 16]).await {
                    break error.kind();
                }
            }
        };
        let refused =
            timeout(Duration::from_secs(60), refused).await.expect("the kernel ends the connection");
        assert_eq!(refused, io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn server_that_stops_closes_idle_connections_at_once() {
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, server) = start(LONGEST_REQUEST, async move { drop(stopped.await) }).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        ask(&mut idle).await.unwrap();
        drop(stop);
        server.await.unwrap();
        idle.read_to_end(&mut Vec::new()).await.unwrap();
        TcpStream::connect(address).await.expect_err("the listener is closed");
    }
}
