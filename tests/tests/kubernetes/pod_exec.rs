//! Mocks the `exec` of Pods as kubelets implement it behind the API server: WebSocket with subprotocol
//! `v5.channel.k8s.io`, in which each message begins with a byte for its channel.

use std::{future, path::PathBuf, process::Output};

use axum::{
    body::Body,
    extract::Request,
    http::{
        StatusCode,
        header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE},
    },
    response::Response,
};
use futures_util::SinkExt as _;
use hyper::upgrade::{self, Upgraded};
use hyper_util::rt::TokioIo;
use lb_tests::{agent::binary, netns::Netns};
use serde_json::{Value, json};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

const PROTOCOL: &str = "v5.channel.k8s.io";
/// Numbers of the channels in the subprotocol.
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
/// Maximum number of bytes in one message.
const MESSAGE: usize = 16 * 1024;

/// How the mock API server treats a command that a client runs in a Pod.
#[derive(Clone)]
pub(crate) enum PodExec {
    /// Runs the command in the namespace of a node, with the pins of that node's agent.
    Runs { netns: Netns, bpffs: PathBuf },
    /// Never answers, like a node that hangs.
    Silent,
    /// Refuses the command, as to a client without the permission.
    Forbidden,
}

type WebSocket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts the WebSocket connection, runs the command, and sends its output and status.
pub(crate) fn answer(pod: PodExec, words: Vec<String>, request: Request) -> Response {
    let accept = derive_accept_key(request.headers()[SEC_WEBSOCKET_KEY].as_bytes());
    tokio::spawn(async move {
        let stream = TokioIo::new(upgrade::on(request).await.unwrap());
        let socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        match pod {
            PodExec::Runs { netns, bpffs } => {
                let run = move || {
                    assert_eq!(words[0], "/usr/local/bin/lb-agent");
                    netns.command(binary()).args(&words[1..]).env("LB_AGENT_BPFFS", bpffs).output().unwrap()
                };
                send(socket, tokio::task::spawn_blocking(run).await.unwrap()).await;
            }
            PodExec::Silent | PodExec::Forbidden => future::pending().await,
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(CONNECTION, "upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_ACCEPT, accept)
        .header(SEC_WEBSOCKET_PROTOCOL, PROTOCOL)
        .body(Body::empty())
        .unwrap()
}

async fn send(mut socket: WebSocket, Output { status, stdout, stderr }: Output) {
    let status = match status.success() {
        true => json!({"metadata": {}, "status": "Success"}),
        false => failure(status.code().unwrap_or(1)),
    };
    let (status, parts) = (status.to_string().into_bytes(), [(STDOUT, stdout), (STDERR, stderr)]);
    for (channel, bytes) in parts {
        for chunk in bytes.chunks(MESSAGE) {
            socket.send(message(channel, chunk)).await.unwrap();
        }
    }
    socket.send(message(STATUS, &status)).await.unwrap();
}

fn message(channel: u8, data: &[u8]) -> Message {
    Message::Binary([&[channel], data].concat().into())
}

fn failure(code: i32) -> Value {
    json!({
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": format!("command terminated with non-zero exit code: exit status {code}"),
        "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
    })
}
