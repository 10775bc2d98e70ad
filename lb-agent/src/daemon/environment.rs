//! The environment socket: a client sends the name of a namespace, and receives the environment variables of the
//! Services in that namespace as JSON.

use std::{convert::Infallible, io::Read as _, io::Write as _, net::Shutdown, path::Path, path::PathBuf};

use anyhow::{Context as _, bail};
use lb_core::environment::Environment;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::{mpsc, oneshot},
    time,
};
use tracing::{debug, warn};

use super::socket::{self, PATIENCE, Socket};

/// Maximum length of a namespace's name, in bytes: that of an RFC 1123 label.
const MAX_NAMESPACE: u64 = 63;

/// A request from the socket to the writer, which knows the Services.
#[derive(Debug)]
pub(super) struct VariablesRequest {
    pub(super) namespace: String,
    /// Where the writer sends the variables; it sends `None` until the agent has read all Services.
    pub(super) reply: oneshot::Sender<Option<Environment>>,
}

/// The socket's answer: the environment variables of the Services in a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Variables {
    /// Whether the agent has read all Services; if not, `variables` is empty.
    pub is_complete: bool,
    /// Names and values of the variables.
    pub variables: Vec<(String, String)>,
    /// One sentence for each variable that two Services define.
    pub collisions: Vec<String>,
}

impl From<Option<Environment>> for Variables {
    fn from(environment: Option<Environment>) -> Self {
        let is_complete = environment.is_some();
        let Environment { variables, collisions } = environment.unwrap_or_default();
        let collisions = collisions.iter().map(ToString::to_string).collect();
        Self { is_complete, variables, collisions }
    }
}

/// Serves the environment socket. If it cannot be created, the agent logs the error and runs without it.
pub(super) async fn serve(
    bpffs: PathBuf,
    requests: mpsc::Sender<VariablesRequest>,
) -> anyhow::Result<Infallible> {
    let listener = match socket::bind(&bpffs, Socket::Environment) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(folder = socket::FOLDER, %error, "cannot create the environment socket: `lb-agent service env` and `lb-agent exec` will not work; make the folder writable");
            return std::future::pending().await;
        }
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let requests = requests.clone();
                tokio::spawn(async move {
                    match time::timeout(PATIENCE, answer(stream, &requests)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!(%error, "a client of the environment socket got no answer"),
                        Err(_) => debug!("a client of the environment socket was too slow"),
                    }
                });
            }
            Err(error) => {
                warn!(%error, "cannot accept on the environment socket");
                time::sleep(PATIENCE).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, requests: &mpsc::Sender<VariablesRequest>) -> anyhow::Result<()> {
    let mut namespace = String::new();
    (&mut stream).take(MAX_NAMESPACE + 1).read_to_string(&mut namespace).await?;
    let (reply, environment) = oneshot::channel();
    requests.send(VariablesRequest { namespace, reply }).await?;
    let variables = Variables::from(environment.await?);
    Ok(stream.write_all(&serde_json::to_vec(&variables)?).await?)
}

/// Requests the variables of a namespace from the agent of `bpffs`.
///
/// # Errors
/// No agent listens, the agent has not read all Services yet, or the exchange with it fails.
pub fn ask(bpffs: &Path, namespace: &str) -> anyhow::Result<Variables> {
    let stream = socket::connect(bpffs, Socket::Environment).context("cannot ask the agent")?;
    let Some(mut stream) = stream else {
        bail!(
            "no agent of {} runs on this node: start it, or give the --bpffs of the one that runs",
            bpffs.display()
        );
    };
    stream.write_all(namespace.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("the agent does not answer")?;
    let variables: Variables = serde_json::from_str(&text).context("the agent sends no valid answer")?;
    if !variables.is_complete {
        bail!("the agent does not know all Services yet: try again in a moment");
    }
    Ok(variables)
}
