//! Keeps BIRD's configuration file, and makes BIRD read it.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
    time::Duration,
};

use lb_core::announce::bgp::Configuration;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    time,
};
use tracing::info;

/// Timeout of a conversation with BIRD: much shorter than the lifetime of routes, because heartbeats wait for it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Updates between two attempts to reach BIRD.
const RETRY: u32 = 5;

/// BIRD's files.
#[derive(Debug)]
pub(super) struct Bird {
    file: PathBuf,
    socket: PathBuf,
    /// The content of the file, once it is known.
    written: Option<String>,
    /// Whether BIRD has read the file since it changed.
    is_configured: bool,
    /// Updates to wait before the next attempt, and why the last one failed.
    failed: Option<(u32, String)>,
}

impl Bird {
    pub(super) const fn new(file: PathBuf, socket: PathBuf) -> Self {
        Self { file, socket, written: None, is_configured: false, failed: None }
    }

    /// Brings file and BIRD up to date; returns what failed. A configuration that lacks objects with errors replaces no file, so
    /// that BIRD goes on with the last good one.
    pub(super) async fn update(&mut self, configuration: &Configuration) -> Option<String> {
        if !configuration.errors.is_empty() && (self.written.is_some() || self.file.exists()) {
            return Some(format!("{} stays as it is until the errors are corrected", self.file.display()));
        }
        if self.written.as_ref() != Some(&configuration.text) {
            if let Err(error) = replace(&self.file, &configuration.text) {
                return Some(format!("cannot write BIRD's configuration {}: {error}", self.file.display()));
            }
            self.written = Some(configuration.text.clone());
            (self.is_configured, self.failed) = (false, None);
        }
        if self.is_configured {
            return None;
        }
        if let Some((wait @ 1.., why)) = &mut self.failed {
            *wait -= 1;
            return Some(why.clone());
        }
        match time::timeout(PATIENCE, configure(&self.socket)).await {
            Ok(Ok(answer)) => {
                info!(answer, "BIRD has read its configuration");
                (self.is_configured, self.failed) = (true, None);
            }
            Ok(Err(error)) => self.fail(&error),
            Err(_) => self.fail(&io::ErrorKind::TimedOut.into()),
        }
        self.failed.as_ref().map(|(_, why)| why.clone())
    }

    fn fail(&mut self, error: &io::Error) {
        let why = format!("cannot configure BIRD through {}: {error}; retrying", self.socket.display());
        self.failed = Some((RETRY, why));
    }
}

/// Replaces the file at once, unless it has this content. It keeps its owner and permissions; a new one is readable for its
/// owner only, because it may have passwords.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    let known = match fs::read(file) {
        Ok(content) if content == text.as_bytes() => return Ok(()),
        Ok(_) => Some(fs::metadata(file)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let new = file.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut writer = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    writer.write_all(text.as_bytes())?;
    if let Some(known) = known {
        fchown(&writer, Some(known.uid()), Some(known.gid()))?;
        writer.set_permissions(fs::Permissions::from_mode(known.mode() & 0o7777))?;
    }
    writer.sync_all()?;
    fs::rename(new, file)
}

/// Makes BIRD read its configuration, as `birdc configure` does; returns its answer.
async fn configure(socket: &Path) -> io::Result<String> {
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    answer(&mut stream).await?;
    stream.write_all(b"configure\n").await?;
    let (code, text) = answer(&mut stream).await?;
    if code.starts_with(['8', '9']) {
        Err(io::Error::other(format!("BIRD answers: {text}")))
    } else {
        Ok(text)
    }
}

/// The code and the text of the last line of an answer. A hyphen or a space at the beginning continues it.
async fn answer(stream: &mut BufReader<UnixStream>) -> io::Result<(String, String)> {
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let (Some(code), Some(" "), Some(text)) = (line.get(..4), line.get(4..5), line.get(5..))
            && code.bytes().all(|byte| byte.is_ascii_digit())
        {
            return Ok((code.to_owned(), text.trim_end().to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use tokio::net::UnixListener;

    use super::*;

    fn text(text: &str) -> Configuration {
        Configuration { text: text.to_owned(), ..Configuration::default() }
    }

    fn broken(text: &str) -> Configuration {
        let error = lb_core::convert::ConvertError {
            kind: "BGPPeer",
            object: "a/b".to_owned(),
            field: "spec.bfdProfile".to_owned(),
            why: "no".to_owned(),
        };
        Configuration { text: text.to_owned(), errors: vec![error], ..Configuration::default() }
    }

    /// Answers `configure` as BIRD does.
    async fn serve(listener: UnixListener, answers: &'static [&'static str]) {
        for answer in answers {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            stream.write_all(b"0001 BIRD 2.0.12 ready.\n").await.unwrap();
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert_eq!(line, "configure\n");
            stream.write_all(b"0002-Reading configuration from x\n").await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn file_is_replaced_and_read_once_for_each_change() {
        let folder = TempDir::new().unwrap();
        let (file, socket) = (folder.path().join("bird.conf"), folder.path().join("bird.ctl"));
        let mut bird = Bird::new(file.clone(), socket.clone());
        let why = bird.update(&text("a\n")).await.unwrap();
        assert!(why.contains("bird.ctl"), "{why}");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();

        let answers = &["0003 Reconfigured\n", "8002 bird.conf:1:1 syntax error\n"];
        let server = tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), answers));
        assert_eq!(bird.update(&text("b\n")).await, None);
        assert_eq!(bird.update(&text("b\n")).await, None, "BIRD is asked once");
        assert_eq!(fs::read_to_string(&file).unwrap(), "b\n");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o640, "permissions stay");
        let why = bird.update(&text("c\n")).await.unwrap();
        assert!(why.contains("syntax error"), "{why}");
        server.await.unwrap();
    }

    #[tokio::test]
    async fn configuration_with_errors_replaces_no_file() {
        let folder = TempDir::new().unwrap();
        let (file, socket) = (folder.path().join("bird.conf"), folder.path().join("bird.ctl"));
        let mut bird = Bird::new(file.clone(), socket.clone());
        bird.update(&broken("a\n")).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), "a\n", "there is no last good one");
        let mut bird = Bird::new(file.clone(), socket);
        bird.update(&broken("b\n")).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), "a\n");
        bird.update(&text("c\n")).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), "c\n");
    }
}
