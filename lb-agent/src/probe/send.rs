//! Sends one probe.

use std::{io, net::SocketAddr};

use lb_core::probe::{Check, Failure, Kind, Reason, Target};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use super::{dns, grpc, http, tls};

/// Probes a target. The kernel chooses the source address.
pub(super) async fn probe(target: &Target) -> Result<(), Failure> {
    let limit = target.check.timing.timeout;
    match timeout(limit, ask(&target.check, target.socket())).await {
        Ok(result) => result,
        Err(_elapsed) => Err(Failure::new(Reason::Timeout, format!("no answer in {limit:?}"))),
    }
}

async fn ask(check: &Check, server: SocketAddr) -> Result<(), Failure> {
    let connect = || connect(server, check.proxy_header);
    match &check.kind {
        Kind::Tcp => connect().await.map(drop),
        Kind::Http(path) => http::get(connect().await?, server, path).await,
        Kind::Https(path) => http::get(tls::connect(connect().await?, server).await?, server, path).await,
        Kind::Grpc(service) => grpc::check(connect().await?, server, service).await,
        Kind::Dns(name) => dns::ask(server, name).await,
    }
}

/// A PROXY protocol header, version 2, with the command LOCAL: the sender has opened the connection for itself, not for
/// a client.
const LOCAL: [u8; 16] = *b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

/// Connects, and sends a PROXY protocol header if the server expects one. Closing the socket sends a RST: otherwise,
/// the probes could leave many thousands of sockets in TIME_WAIT.
async fn connect(server: SocketAddr, proxy_header: bool) -> Result<TcpStream, Failure> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket
        .and_then(|socket| socket.set_zero_linger().map(|()| socket))
        .map_err(|error| failure(&error))?;
    let mut stream = socket.connect(server).await.map_err(|error| failure(&error))?;
    if proxy_header {
        stream.write_all(&LOCAL).await.map_err(|error| failure(&error))?;
    }
    Ok(stream)
}

/// Converts an error of the kernel to the failure of a probe.
pub(super) fn failure(error: &io::Error) -> Failure {
    let is = |kinds: &[io::ErrorKind]| kinds.contains(&error.kind());
    if is(&[io::ErrorKind::ConnectionRefused]) {
        return Failure::new(Reason::Refused, "connection refused");
    }
    if is(&[io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe]) {
        return Failure::new(Reason::Refused, "connection reset");
    }
    let reason = match is(&[io::ErrorKind::TimedOut]) {
        true => Reason::Timeout,
        false if is_ours(error) => Reason::Local,
        false => Reason::Unreachable,
    };
    Failure::new(reason, error.to_string())
}

/// Whether this node has caused the error, and not the endpoint: the node lacks descriptors, ports or memory.
fn is_ours(error: &io::Error) -> bool {
    use libc::{EADDRINUSE, EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    // Without a free port, `connect` of TCP fails with EADDRNOTAVAIL, and `bind` of UDP with EADDRINUSE.
    let errors = [EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL, EADDRINUSE];
    error.raw_os_error().is_some_and(|error| errors.contains(&error))
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use lb_core::probe::{Timing, check::Probe};
    use rustls::{ServerConfig, pki_types::PrivatePkcs8KeyDer};
    use tokio::{
        io::{AsyncRead, AsyncReadExt as _, AsyncWrite},
        net::{TcpListener, UdpSocket},
    };
    use tokio_rustls::TlsAcceptor;

    use super::*;

    async fn result(check: &str, server: SocketAddr) -> Result<(), (Reason, String)> {
        result_in(Duration::from_secs(60), check, server).await
    }

    async fn result_in(timeout: Duration, check: &str, server: SocketAddr) -> Result<(), (Reason, String)> {
        let Probe { kind, port } = check.parse().unwrap();
        let timing = Timing { timeout, ..Timing::default() };
        let check = Arc::new(Check { kind, port, timing, proxy_header: false });
        let target = Target { address: server.ip(), port: server.port(), check };
        probe(&target).await.map_err(|failure| (failure.reason, failure.text))
    }

    #[test]
    fn lack_of_a_port_is_no_result() {
        for error in [libc::EADDRNOTAVAIL, libc::EADDRINUSE] {
            let error = io::Error::from_raw_os_error(error);
            assert_eq!(failure(&error).reason, Reason::Local, "{error}");
        }
    }

    async fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Reads a request and answers with `answer`. Returns the request.
    async fn answer<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, answer: &str) -> String {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            request.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        String::from_utf8(request).unwrap()
    }

    #[tokio::test]
    async fn tcp_needs_a_listener() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).await.unwrap();
            let server = listener.local_addr().unwrap();
            assert_eq!(result("tcp", server).await, Ok(()));
            drop(listener);
            assert_eq!(result("tcp", server).await, Err((Reason::Refused, "connection refused".to_owned())));
        }
    }

    #[tokio::test]
    async fn http_status_decides() {
        for (status, expected) in [
            (200, Ok(())),
            (399, Ok(())),
            (400, Err((Reason::Status, "status 400".to_owned()))),
            (503, Err((Reason::Status, "status 503".to_owned()))),
        ] {
            let (listener, server) = listen().await;
            let text = format!("HTTP/1.1 {status} x\r\nContent-Length: 9999\r\n\r\nbegin");
            let served = tokio::spawn(async move { answer(listener.accept().await.unwrap().0, &text).await });
            assert_eq!(result("http:///a?b=c", server).await, expected);
            let request = served.await.unwrap();
            assert!(request.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{request}");
            assert!(request.contains(&format!("host: {server}\r\n")), "{request}");
        }
    }

    #[tokio::test]
    async fn answer_of_another_protocol_is_a_failure() {
        let (listener, server) = listen().await;
        tokio::spawn(async move { answer(listener.accept().await.unwrap().0, "SSH-2.0-x\r\n").await });
        assert_eq!(result("http", server).await.unwrap_err().0, Reason::Protocol);
        let (listener, server) = listen().await;
        tokio::spawn(async move { answer(listener.accept().await.unwrap().0, "").await });
        let closed = Err((Reason::Refused, "connection closed without an answer".to_owned()));
        assert_eq!(result("http", server).await, closed);
    }

    #[tokio::test]
    async fn silent_server_is_a_timeout() {
        let (_listener, server) = listen().await;
        for check in ["http", "https", "grpc"] {
            let expected = Err((Reason::Timeout, "no answer in 50ms".to_owned()));
            assert_eq!(result_in(Duration::from_millis(50), check, server).await, expected);
        }
    }

    /// A TLS server with a self-signed certificate. Its private key is public, in this test.
    fn acceptor() -> TlsAcceptor {
        let certificate = include_bytes!("testdata/certificate.der").to_vec().into();
        let key = PrivatePkcs8KeyDer::from(include_bytes!("testdata/key.der").to_vec());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_no_client_auth().with_single_cert(vec![certificate], key.into()).unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    #[tokio::test]
    async fn https_verifies_no_certificate() {
        let (listener, server) = listen().await;
        tokio::spawn(async move {
            let stream = acceptor().accept(listener.accept().await.unwrap().0).await.unwrap();
            answer(stream, "HTTP/1.1 204 x\r\n\r\n").await
        });
        assert_eq!(result("https", server).await, Ok(()));
        let (listener, server) = listen().await;
        tokio::spawn(async move {
            let mut stream = listener.accept().await.unwrap().0;
            stream.write_all(b"HTTP/1.1 400 plain\r\n\r\n").await
        });
        assert_eq!(result("https", server).await.unwrap_err().0, Reason::Tls);
    }

    /// Serves one gRPC call `Health/Check`, and answers with the status `health`.
    async fn serve_grpc(listener: TcpListener, health: u8) {
        let stream = listener.accept().await.unwrap().0;
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
        let head = ::http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let mut body = respond.send_response(head, false).unwrap();
        body.send_data(vec![0, 0, 0, 0, 2, 0x08, health].into(), false).unwrap();
        let mut trailers = ::http::HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        body.send_trailers(trailers).unwrap();
        while connection.accept().await.is_some() {}
    }

    #[tokio::test]
    async fn grpc_server_says_how_it_is() {
        for (health, expected) in [(1, Ok(())), (2, Err((Reason::Grpc, "not serving".to_owned())))] {
            let (listener, server) = listen().await;
            tokio::spawn(serve_grpc(listener, health));
            assert_eq!(result("grpc", server).await, expected);
        }
    }

    #[tokio::test]
    async fn dns_response_code_decides() {
        for (code, expected) in [
            (0, Ok(())),
            (3, Ok(())),
            (2, Err((Reason::Dns, "response code Server Failure".to_owned()))),
            (5, Err((Reason::Dns, "response code Query Refused".to_owned()))),
        ] {
            let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let server = socket.local_addr().unwrap();
            tokio::spawn(async move {
                let mut message = [0; 512];
                let (length, peer) = socket.recv_from(&mut message).await.unwrap();
                (message[2], message[3]) = (0x80, code);
                socket.send_to(&message[..length], peer).await.unwrap();
            });
            assert_eq!(result("dns:///a.example", server).await, expected);
        }
        let closed = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        assert_eq!(result("dns", closed).await.unwrap_err().0, Reason::Refused);
    }
}
