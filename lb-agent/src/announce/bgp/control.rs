//! BIRD's control socket, at which `birdc` and the agent send commands.

use std::{io, path::Path, time::Duration};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    time,
};

/// Timeout of a conversation with BIRD: shorter than the `--lifetime` of `lb-agent announce fence`, because the agent
/// sends that process no heartbeat during the conversation.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why BIRD did not carry out a command.
#[derive(Debug)]
pub(super) enum Refusal {
    /// BIRD's control socket does not answer.
    Unreachable(io::Error),
    /// BIRD reports an error, for example in a configuration file; this is the last line of its answer.
    Invalid(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Unreachable(error)
    }
}

/// An answer of BIRD.
#[derive(Debug)]
pub(super) struct Answer {
    /// The code of the last line.
    code: String,
    /// All lines, without codes. There is at least one.
    pub(super) lines: Vec<String>,
}

impl Answer {
    /// The text of the last line.
    pub(super) fn last(&self) -> &str {
        self.lines.last().map_or("", String::as_str)
    }
}

/// Sends a command to BIRD's control socket, as `birdc` does; returns BIRD's answer.
pub(super) async fn ask(socket: &Path, command: &str) -> Result<Answer, Refusal> {
    let talk = async {
        let mut stream = BufReader::new(UnixStream::connect(socket).await?);
        answer(&mut stream).await?;
        stream.write_all(format!("{command}\n").as_bytes()).await?;
        answer(&mut stream).await
    };
    let answer =
        time::timeout(PATIENCE, talk).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    if answer.code.starts_with(['8', '9']) {
        return Err(Refusal::Invalid(answer.last().to_owned()));
    }
    Ok(answer)
}

/// Reads an answer of BIRD. In all lines but the last one, a hyphen follows the code, or a space replaces the code.
async fn answer(stream: &mut BufReader<UnixStream>) -> io::Result<Answer> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(text) = line.strip_prefix(' ') {
            lines.push(text.trim_end().to_owned());
            continue;
        }
        let (code, rest) = line.split_at_checked(4).unwrap_or((&line, ""));
        let is_code = code.bytes().all(|byte| byte.is_ascii_digit());
        lines.push(rest.get(1..).unwrap_or_default().trim_end().to_owned());
        if is_code && rest.starts_with(' ') {
            return Ok(Answer { code: code.to_owned(), lines });
        }
    }
}
