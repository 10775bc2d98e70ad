//! Mocks the `exec` of Pods as kubelets implement it behind the API server: WebSocket with subprotocol
//! `v5.channel.k8s.io`, in which each message begins with a byte for its channel.

use std::{future, path::PathBuf, process::Stdio};

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
use tokio::{io::AsyncReadExt as _, process::Command};
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
    /// Refuses the command, as if the client lacked the permission.
    Forbidden,
}

type WebSocket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts the WebSocket connection, runs the command, and sends its output and status; for [`PodExec::Silent`], sends
/// nothing.
pub(crate) fn answer(pod: PodExec, words: Vec<String>, request: Request) -> Response {
    let accept = derive_accept_key(request.headers()[SEC_WEBSOCKET_KEY].as_bytes());
    tokio::spawn(async move {
        let stream = TokioIo::new(upgrade::on(request).await.unwrap());
        let socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        match pod {
            PodExec::Runs { netns, bpffs } => {
                assert_eq!(words[0], "/usr/local/bin/lb-agent");
                let mut command = netns.command(binary());
                command.args(&words[1..]).env("LB_AGENT_BPFFS", bpffs);
                run(socket, command.into()).await;
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

/// Runs the command, sends its output as it comes, then its status. If the client has closed the connection, the next
/// output of the command ends the command.
async fn run(mut socket: WebSocket, mut command: Command) {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (mut output, mut errors) = (vec![0; MESSAGE], vec![0; MESSAGE]);
    let (mut has_output, mut has_errors) = (true, true);
    while has_output || has_errors {
        let (channel, read) = tokio::select! {
            read = stdout.read(&mut output), if has_output => (STDOUT, read.unwrap()),
            read = stderr.read(&mut errors), if has_errors => (STDERR, read.unwrap()),
        };
        let (bytes, has_more) =
            if channel == STDOUT { (&output, &mut has_output) } else { (&errors, &mut has_errors) };
        *has_more = read > 0;
        if read > 0 && socket.send(message(channel, &bytes[..read])).await.is_err() {
            return;
        }
    }
    let status = child.wait().await.unwrap();
    let status = match status.success() {
        true => json!({"metadata": {}, "status": "Success"}),
        false => failure(status.code().unwrap_or(1)),
    };
    // The client may have ended.
    let _sent = socket.send(message(STATUS, status.to_string().as_bytes())).await;
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
