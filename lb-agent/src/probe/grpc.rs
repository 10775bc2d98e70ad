//! Probes by `grpc.health.v1.Health/Check`, as kubelet sends them. This module encodes the messages itself: each
//! message has only one field, so this code is shorter than the input that a code generator would need.

use std::net::SocketAddr;

use http::{HeaderMap, Request, header::CONTENT_TYPE};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Bytes, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lb_core::probe::{Failure, Reason};
use tokio::{net::TcpStream, task::JoinSet};

/// Maximum length of an answer, in bytes.
const LONGEST: usize = 4096;
/// Length in bytes of the prefix of a gRPC message: a flag for compression, and the message's length.
const PREFIX: usize = 5;
/// Value of `HealthCheckResponse.status` for a service that works (`SERVING`).
const SERVING: u8 = 1;

/// Asks the server for the health of a service; an empty name stands for the whole server.
pub(super) async fn check(stream: TcpStream, server: SocketAddr, service: &str) -> Result<(), Failure> {
    let protocol = |error: &dyn std::fmt::Display| Failure::new(Reason::Protocol, error.to_string());
    let request = Request::post(format!("http://{server}/grpc.health.v1.Health/Check"))
        .header(CONTENT_TYPE, "application/grpc")
        .header("te", "trailers")
        .body(Full::new(Bytes::from(request(service))))
        .map_err(|error| protocol(&error))?;
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| super::http::failure(&error))?;
    // The connection's task is aborted when this set is dropped.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let response = sender.send_request(request).await.map_err(|error| super::http::failure(&error))?;
    let (head, body) = response.into_parts();
    if head.status != 200 {
        return Err(Failure::new(Reason::Status, format!("status {}", head.status.as_u16())));
    }
    let body = Limited::new(body, LONGEST).collect().await.map_err(|error| protocol(&error))?;
    // A server that fails without sending a message has put the gRPC status into the response headers.
    let trailers = body.trailers().cloned().unwrap_or(head.headers);
    verdict(&trailers, &body.to_bytes())
}

/// The body of a request: the prefix, then the message, whose field 1 is the name of the service.
fn request(service: &str) -> Vec<u8> {
    // Cuts names longer than a one-byte length can express; no server has such names.
    let name = &service.as_bytes()[..service.len().min(0x7f)];
    let length = u8::try_from(name.len()).unwrap_or(0x7f);
    let message = if name.is_empty() { Vec::new() } else { [&[0x0a, length][..], name].concat() };
    let length = u32::try_from(message.len()).unwrap_or_default();
    [&[0][..], &length.to_be_bytes(), &message].concat()
}

fn verdict(trailers: &HeaderMap, message: &[u8]) -> Result<(), Failure> {
    let of_grpc = |text: String| Err(Failure::new(Reason::Grpc, text));
    let text = |name| trailers.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status") {
        Some("0") => {}
        Some(code) => {
            let message = text("grpc-message").map_or_else(String::new, |message| format!(" {message}"));
            return of_grpc(format!("gRPC status {code}{message}"));
        }
        None => return Err(Failure::new(Reason::Protocol, "the answer has no gRPC status")),
    }
    // Field 1 of the message is the status, a small number; without the field it is 0.
    match message.get(PREFIX..).unwrap_or_default() {
        [0x08, SERVING, ..] => Ok(()),
        [0x08, 2, ..] => of_grpc("not serving".to_owned()),
        [0x08, 3, ..] => of_grpc("service unknown".to_owned()),
        [] | [0x08, ..] => of_grpc("unknown health".to_owned()),
        _ => Err(Failure::new(Reason::Protocol, "the answer is no HealthCheckResponse")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_names_the_service() {
        assert_eq!(request(""), [0, 0, 0, 0, 0]);
        assert_eq!(request("ab"), [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
    }

    #[test]
    fn only_a_serving_server_is_healthy() {
        let trailers = |status: &str| {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", status.parse().unwrap());
            trailers
        };
        let ok = trailers("0");
        assert_eq!(verdict(&ok, &[0, 0, 0, 0, 2, 0x08, 1]), Ok(()));
        for (message, why) in [
            (&[0, 0, 0, 0, 2, 0x08, 2][..], "not serving"),
            (&[0, 0, 0, 0, 2, 0x08, 3], "service unknown"),
            (&[0, 0, 0, 0, 0], "unknown health"),
            (&[], "unknown health"),
            (&[0, 0, 0, 0, 1, 0x12], "the answer is no HealthCheckResponse"),
        ] {
            assert_eq!(verdict(&ok, message).unwrap_err().text, why);
        }
        let failure = verdict(&trailers("12"), &[]).unwrap_err();
        assert_eq!((failure.reason, failure.text.as_str()), (Reason::Grpc, "gRPC status 12"));
        assert_eq!(verdict(&HeaderMap::new(), &[]).unwrap_err().reason, Reason::Protocol);
    }
}
