//! Probes by an HTTP/1.1 request.

use std::net::SocketAddr;

use http::{
    Request,
    header::{CONNECTION, HOST, USER_AGENT},
};
use http_body_util::Empty;
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use lb_core::probe::{Failure, Reason};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
};

/// Sends `GET`. Every final status from 200 to 399, including a redirect, is good; the body is not read.
pub(super) async fn get<S>(stream: S, server: SocketAddr, path: &str) -> Result<(), Failure>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request = request(server, path)
        .map_err(|error| Failure::new(Reason::Protocol, format!("cannot ask for {path}: {error}")))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failure(&error))?;
    // The connection's task is aborted when this set is dropped.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let status = sender.send_request(request).await.map_err(|error| failure(&error))?.status();
    if (200..400).contains(&status.as_u16()) {
        return Ok(());
    }
    Err(Failure::new(Reason::Status, format!("status {}", status.as_u16())))
}

fn request(server: SocketAddr, path: &str) -> http::Result<Request<Empty<Bytes>>> {
    Request::get(path)
        .header(HOST, server.to_string())
        .header(USER_AGENT, concat!("lb-agent/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Empty::new())
}

/// Converts an error of hyper to the failure of a probe.
pub(super) fn failure(error: &hyper::Error) -> Failure {
    use std::error::Error as _;
    let of_kernel = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    if let Some(error) = of_kernel {
        return super::send::failure(error);
    }
    if error.is_incomplete_message() {
        return Failure::new(Reason::Refused, "connection closed without an answer");
    }
    Failure::new(Reason::Protocol, error.to_string())
}

#[cfg(test)]
mod tests {
    use lb_core::probe::{Kind, check::Probe};

    use super::*;

    #[test]
    fn every_path_that_an_annotation_may_have_can_be_asked_for() {
        let mut accepted = 0;
        for character in '\0'..='\u{ff}' {
            for text in [format!("http://:80/a{character}b"), format!("http://:80/?a{character}b")] {
                let Ok(Probe { kind: Kind::Http(path), .. }) = text.parse() else { continue };
                let request = request("192.0.2.1:80".parse().unwrap(), &path).unwrap();
                assert_eq!(request.uri().to_string(), &*path, "{character:?}");
                accepted += 1;
            }
        }
        assert!(accepted > 100, "{accepted}");
    }
}
