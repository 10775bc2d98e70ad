//! Runs `lb-agent` in the Pod of one agent.

use std::{io, time::Duration};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Status};
use kube::{
    Api,
    api::{AttachParams, AttachedProcess},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    time,
};

/// The container of the agent, and the program in it.
const CONTAINER: &str = "lb-agent";
const PROGRAM: &str = "/usr/local/bin/lb-agent";
/// Size of the buffers between the connection and the reader, in bytes.
const BUFFER: usize = 64 * 1024;

/// Why a node has not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NodeError {
    /// The node has no Pod of an agent.
    #[error("no agent's Pod runs on the node; check its taints and the DaemonSet with `kubectl describe`")]
    NoPod,
    /// The agent's Pod does not run.
    #[error("Pod {pod} is {phase}; look at it with `kubectl describe pod {pod}`")]
    NotRunning {
        /// Name of the Pod.
        pod: String,
        /// The phase of the Pod, such as `Pending`.
        phase: String,
    },
    /// The user may not run commands in the Pod.
    #[error(
        "you may not run commands in Pod {pod}: {message}; ask for a Role with the verbs create and get on pods/exec"
    )]
    Forbidden {
        /// Name of the Pod.
        pod: String,
        /// The answer of the API server.
        message: String,
    },
    /// The command has not ended in time, for example because the node is slow, or the API server cannot reach the
    /// node.
    #[error(
        "Pod {pod} has not answered within {seconds} s; check that the node is Ready, or set a longer --timeout"
    )]
    Timeout {
        /// Name of the Pod.
        pod: String,
        /// How long the plugin has waited, in seconds.
        seconds: u64,
    },
    /// The API server could not run the command, or the connection to it has failed.
    #[error(
        "cannot run commands in Pod {pod}: {message}; check that the API server reaches the node's kubelet"
    )]
    Connection {
        /// Name of the Pod.
        pod: String,
        /// What has failed.
        message: String,
    },
    /// The command has failed.
    #[error("`lb-agent {command}` has failed in Pod {pod}: {message}")]
    Failed {
        /// Name of the Pod.
        pod: String,
        /// Arguments of the command.
        command: String,
        /// The error that the command printed, or else its exit status.
        message: String,
    },
    /// The output of the command is no JSON of the expected form.
    #[error("cannot read the answer of Pod {pod}: {message}; does it run another version of lb-agent?")]
    Unreadable {
        /// Name of the Pod.
        pod: String,
        /// The error in the output.
        message: String,
    },
}

/// Runs `lb-agent ARGUMENTS` in a Pod. Returns its standard output.
///
/// # Errors
/// The command fails, cannot run, or takes longer than the limit.
pub(crate) async fn run(
    pods: &Api<Pod>,
    pod: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<Vec<u8>, NodeError> {
    let late = |_| NodeError::Timeout { pod: pod.to_owned(), seconds: limit.as_secs() };
    time::timeout(limit, run_unlimited(pods, pod, arguments)).await.map_err(late)?
}

async fn run_unlimited(pods: &Api<Pod>, pod: &str, arguments: &[&str]) -> Result<Vec<u8>, NodeError> {
    let lost = |error: io::Error| NodeError::Connection { pod: pod.to_owned(), message: error.to_string() };
    let mut process = start(pods, pod, arguments).await?;
    let (stdout, stderr) = (process.stdout(), process.stderr());
    let ((output, errors), status) =
        tokio::join!(async { tokio::join!(read(stdout), read(stderr)) }, status(&mut process));
    let (output, errors) = (output.map_err(lost)?, errors.map_err(lost)?);
    end(pod, arguments, status, &errors)?;
    Ok(output)
}

/// Runs `lb-agent ARGUMENTS` in a Pod until it ends, and hands over each line of its standard output and its standard
/// error as it arrives.
///
/// # Errors
/// The command fails or cannot run.
pub(crate) async fn follow(
    pods: &Api<Pod>,
    pod: &str,
    arguments: &[&str],
    line: impl FnMut(&str),
    mut warn: impl FnMut(&str),
) -> Result<(), NodeError> {
    let lost = |error: io::Error| NodeError::Connection { pod: pod.to_owned(), message: error.to_string() };
    let mut process = start(pods, pod, arguments).await?;
    let (stdout, stderr) = (process.stdout(), process.stderr());
    // If the command fails, its last line says why.
    let mut last = String::new();
    let keep = |text: &str| {
        warn(text);
        text.clone_into(&mut last);
    };
    let lines = async { tokio::join!(each_line(stdout, line), each_line(stderr, keep)) };
    let ((done, warned), status) = tokio::join!(lines, status(&mut process));
    done.and(warned).map_err(lost)?;
    end(pod, arguments, status, last.as_bytes())
}

async fn each_line(stream: Option<impl AsyncRead + Unpin>, mut line: impl FnMut(&str)) -> io::Result<()> {
    let Some(stream) = stream else { return Ok(()) };
    let (mut stream, mut bytes) = (BufReader::new(stream), Vec::new());
    while stream.read_until(b'\n', &mut bytes).await? > 0 {
        line(String::from_utf8_lossy(&bytes).trim_end_matches('\n'));
        bytes.clear();
    }
    Ok(())
}

async fn start(pods: &Api<Pod>, pod: &str, arguments: &[&str]) -> Result<AttachedProcess, NodeError> {
    let parameters = AttachParams::default()
        .container(CONTAINER)
        .stdin(false)
        .stdout(true)
        .stderr(true)
        .max_stdout_buf_size(BUFFER)
        .max_stderr_buf_size(BUFFER);
    let command: Vec<&str> = [&[PROGRAM], arguments].concat();
    pods.exec(pod, command, &parameters).await.map_err(|error| refused(pod, &error))
}

/// The exit status; `None` if the connection ends early.
fn status(process: &mut AttachedProcess) -> impl Future<Output = Option<Status>> + use<> {
    let status = process.take_status();
    async {
        match status {
            Some(status) => status.await,
            None => None,
        }
    }
}

fn end(pod: &str, arguments: &[&str], status: Option<Status>, errors: &[u8]) -> Result<(), NodeError> {
    let message = "the connection has ended early".to_owned();
    let status = status.ok_or_else(|| NodeError::Connection { pod: pod.to_owned(), message })?;
    check(pod, arguments, &status, errors)
}

async fn read(stream: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut stream) = stream {
        stream.read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

fn refused(pod: &str, error: &kube::Error) -> NodeError {
    let pod = pod.to_owned();
    if let kube::Error::Api(status) = error
        && status.is_forbidden()
    {
        return NodeError::Forbidden { pod, message: status.message.clone() };
    }
    NodeError::Connection { pod, message: error.to_string() }
}

/// Checks that the command has succeeded. Otherwise the error has what the command wrote to standard error, or else its
/// exit status.
fn check(pod: &str, arguments: &[&str], status: &Status, errors: &[u8]) -> Result<(), NodeError> {
    if status.status.as_deref() == Some("Success") {
        return Ok(());
    }
    let text = String::from_utf8_lossy(errors);
    let text = text.trim().trim_start_matches("error: ");
    let message = match (text, &status.message) {
        ("", Some(message)) => message.clone(),
        ("", None) => "it gives no reason".to_owned(),
        (text, _) => text.to_owned(),
    };
    Err(NodeError::Failed { pod: pod.to_owned(), command: arguments.join(" "), message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_command_shows_its_error_or_else_its_exit_status() {
        let status = |status: &str, message: &str| Status {
            status: Some(status.to_owned()),
            message: Some(message.to_owned()),
            ..Status::default()
        };
        assert_eq!(check("p", &["status"], &status("Success", ""), b"warning"), Ok(()));
        let failed = |errors: &[u8]| {
            check("p", &["status"], &status("Failure", "exit code 1"), errors)
                .expect_err("a failure")
                .to_string()
        };
        assert_eq!(failed(b"error: no pins\n"), "`lb-agent status` has failed in Pod p: no pins");
        assert_eq!(failed(b""), "`lb-agent status` has failed in Pod p: exit code 1");
    }
}
