//! Keeps BIRD's configuration file up to date, and makes BIRD read it.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{self, Path, PathBuf},
};

use lb_core::announce::bgp::{Configuration, session_count};
use tracing::info;

use super::control::{Refusal, ask};

/// After a failed attempt, this many updates do not try the same configuration text again.
const RETRY: u32 = 5;

/// BIRD's configuration file and control socket, and what the agent knows about the file: its content, and whether BIRD
/// uses it.
#[derive(Debug)]
pub(super) struct Bird {
    file: PathBuf,
    socket: PathBuf,
    /// The content of the configuration file; `None` until it is first read.
    content: Option<String>,
    /// Whether BIRD has parsed the present content of the configuration file without errors.
    is_accepted: bool,
    /// Whether BIRD runs with the present content of the configuration file.
    is_in_use: bool,
    /// Why the last update failed: the agent could not read the configuration file, or could not make BIRD use a new
    /// text. `None` if the update succeeded, or if BIRD already uses the wanted text.
    failed: Option<Failure>,
}

/// How many BGP sessions are established, and how many are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sessions {
    pub(crate) established: usize,
    pub(crate) down: usize,
}

#[derive(Debug)]
struct Failure {
    text: String,
    why: String,
    wait: u32,
}

impl Bird {
    pub(super) const fn new(file: PathBuf, socket: PathBuf) -> Self {
        Self { file, socket, content: None, is_accepted: false, is_in_use: false, failed: None }
    }

    /// The text that the configuration file should have. The sessions of the peers in [`Configuration::held_back`],
    /// and all sessions unless `is_complete`, stay as they are in the present content.
    pub(super) fn text(&self, configuration: &Configuration, is_complete: bool) -> String {
        configuration.text(self.content.as_deref().unwrap_or_default(), is_complete)
    }

    /// Brings the configuration file and BIRD up to date; returns the error, if any. `is_complete`: the agent has read
    /// every object that it can read.
    pub(super) async fn update(
        &mut self,
        configuration: &Configuration,
        is_complete: bool,
    ) -> Option<String> {
        if self.content.is_none() {
            match read(&self.file) {
                Ok(content) => self.content = Some(content),
                Err(error) => {
                    let (name, error) = (self.file.display(), with_hint(&error));
                    let why = format!("cannot read BIRD's configuration {name}: {error}");
                    self.failed = Some(Failure { text: String::new(), why: why.clone(), wait: 0 });
                    return Some(why);
                }
            }
        }
        let text = self.text(configuration, is_complete);
        if self.is_in_use && self.content.as_ref() == Some(&text) {
            // A failed attempt was for another text, which is no longer wanted.
            self.failed = None;
            return None;
        }
        if let Some(Failure { text: failed, why, wait: wait @ 1.. }) = &mut self.failed
            && *failed == text
        {
            *wait -= 1;
            return Some(why.clone());
        }
        let failure = self.use_text(&text).await.err();
        self.failed = failure.map(|why| Failure { text, why, wait: RETRY });
        self.failed.as_ref().map(|failed| failed.why.clone())
    }

    /// Whether the last attempt to make BIRD use the wanted configuration has failed.
    pub(super) const fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Counts the BGP sessions of the configuration text: those that are established, and the others. If BIRD does not
    /// answer, none counts as established.
    pub(super) async fn sessions(&self, configuration: &Configuration, is_complete: bool) -> Sessions {
        let wanted = session_count(&self.text(configuration, is_complete));
        let answer = ask(&self.socket, "show protocols").await;
        let established = answer.map(|answer| established(&answer.lines)).unwrap_or_default();
        Sessions { established: established.min(wanted), down: wanted.saturating_sub(established) }
    }

    /// Writes the text to the configuration file and makes BIRD use it. A text that BIRD refuses never replaces the
    /// content of the file. If BIRD does not answer, content that BIRD has accepted (`self.is_accepted`) stays, and the
    /// text replaces any other content unchecked.
    async fn use_text(&mut self, text: &str) -> Result<(), String> {
        let (file, new) = (self.file.clone(), beside(&self.file));
        let (name, socket) = (file.display(), self.socket.display());
        let cannot_write =
            |error: io::Error| format!("cannot write BIRD's configuration {name}: {}", with_hint(&error));
        if self.content.as_deref() == Some(text) && file.exists() {
            restrict(&file).map_err(cannot_write)?;
        } else {
            write(&new, &file, text).map_err(cannot_write)?;
            let is_accepted = match ask(&self.socket, &check(&new)).await {
                Ok(_) => true,
                // BIRD does not answer, and whether it accepts the old content is unknown as well. So the new content
                // replaces the old one unchecked, and BIRD reads it when it starts.
                Err(Refusal::Unreachable(_)) if !self.is_accepted => false,
                Err(Refusal::Unreachable(error)) => {
                    let (error, new) = (with_hint(&error), new.display());
                    return Err(format!("cannot reach BIRD through {socket}: {error}; {new} waits"));
                }
                Err(Refusal::Invalid(answer)) => {
                    let new = new.display();
                    return Err(format!("BIRD refuses {new}: {answer}; {name} stays as it is, retrying"));
                }
            };
            fs::rename(&new, &file).map_err(cannot_write)?;
            (self.is_accepted, self.is_in_use) = (is_accepted, false);
            self.content = Some(text.to_owned());
        }
        match ask(&self.socket, "configure").await {
            Ok(answer) => {
                info!(answer = answer.last(), "BIRD has read its configuration");
                (self.is_accepted, self.is_in_use) = (true, true);
                Ok(())
            }
            Err(Refusal::Unreachable(error)) => {
                let error = with_hint(&error);
                Err(format!("cannot configure BIRD through {socket}: {error}; retrying"))
            }
            Err(Refusal::Invalid(answer)) => Err(format!("BIRD refuses {name}: {answer}; retrying")),
        }
    }
}

/// The number of established BGP sessions in BIRD's answer to `show protocols`, whose columns are name, kind of
/// protocol, table, state, time, and the state of BGP.
fn established(lines: &[String]) -> usize {
    let is_established = |line: &&String| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(1) == Some(&"BGP") && words.contains(&"Established")
    };
    lines.iter().filter(is_established).count()
}

/// The content of the file; empty if the file does not exist.
fn read(file: &Path) -> io::Result<String> {
    match fs::read(file) {
        Ok(content) => Ok(String::from_utf8_lossy(&content).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// The text of the error. If the agent lacks a permission, the text also says what to do: in the packaged unit
/// (docs/package.md), root may neither open files of other users, nor give a file to a group that root is not in.
fn with_hint(error: &io::Error) -> String {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return error.to_string();
    }
    format!(
        "{error} (an agent without CAP_CHOWN and CAP_DAC_OVERRIDE must own the file and its folder, and must be in the group \
         that owns the file and BIRD's socket: set `SupplementaryGroups=bird` in its systemd unit)"
    )
}

/// The path `FILE.new`. BIRD checks the next content there, before the agent replaces the file by it.
fn beside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// The mode of a file with passwords: read and write for its owner, and read for its group if `mode` has that
/// permission.
const fn restricted(mode: u32) -> u32 {
    0o600 | mode & 0o040
}

fn restrict(file: &Path) -> io::Result<()> {
    let mode = fs::metadata(file)?.mode();
    fs::set_permissions(file, fs::Permissions::from_mode(restricted(mode)))
}

/// Replaces `file` by a new file with this text. The new file has the owner and group of `like`, and the permissions of
/// `like` as far as [`restricted`] allows. If `like` does not exist, the new file has the mode 0600.
fn write(file: &Path, like: &Path, text: &str) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut writer = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    match fs::metadata(like) {
        Ok(known) => {
            fchown(&writer, Some(known.uid()), Some(known.gid()))?;
            writer.set_permissions(fs::Permissions::from_mode(restricted(known.mode())))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    writer.write_all(text.as_bytes())?;
    writer.sync_all()
}

/// The command by which BIRD parses a file without using it. The command names the absolute path, because BIRD has
/// another working directory.
fn check(file: &Path) -> String {
    let file = path::absolute(file).unwrap_or_else(|_| file.to_owned());
    format!("configure check \"{}\"", file.display())
}

#[cfg(test)]
mod tests {
    use lb_core::{
        announce::{advertisement::Advertised, bgp::Peer},
        load_balancer::Labels,
    };
    use tempfile::TempDir;
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::UnixListener,
    };

    use super::*;

    fn configuration(table: u32) -> Configuration {
        lb_core::announce::bgp::configuration(&Advertised::default(), table, &Labels::default())
    }

    /// A configuration with two sessions.
    fn two_sessions() -> Configuration {
        let mut advertised = Advertised::default();
        for (name, address) in [("a", "192.0.2.1"), ("b", "192.0.2.2")] {
            let metadata = serde_json::json!({"name": name, "namespace": "m"});
            let spec = serde_json::json!({"myASN": 64500, "peerASN": 64501, "peerAddress": address});
            let peer = serde_json::json!({"metadata": metadata, "spec": spec});
            let peer = Peer::new(&serde_json::from_value(peer).unwrap()).unwrap();
            advertised.bgp.peers.insert(peer.name.clone(), peer);
        }
        lb_core::announce::bgp::configuration(&advertised, 1, &Labels::default())
    }

    /// Plays BIRD at the control socket: expects these commands in this order, and sends the answer to each command.
    async fn serve(listener: UnixListener, talks: &[(String, &'static str)]) {
        for (command, answer) in talks {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            stream.write_all(b"0001 BIRD 2.0.12 ready.\n").await.unwrap();
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert_eq!(line.trim_end(), command);
            stream.write_all(b"0002-Reading configuration from x\n").await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    struct Bed {
        _folder: TempDir,
        file: PathBuf,
        socket: PathBuf,
        bird: Bird,
    }

    impl Bed {
        fn new() -> Self {
            let folder = TempDir::new().unwrap();
            let (file, socket) = (folder.path().join("bird.conf"), folder.path().join("bird.ctl"));
            let bird = Bird::new(file.clone(), socket.clone());
            Self { _folder: folder, file, socket, bird }
        }

        /// Updates to the configuration for routing table `table`, while a mock BIRD answers the commands in `talks`.
        async fn update(&mut self, table: u32, talks: &[(&str, &'static str)]) -> Option<String> {
            let check = check(&beside(&self.file));
            let command = |name: &str| if name == "check" { check.clone() } else { name.to_owned() };
            let talks: Vec<_> = talks.iter().map(|(name, answer)| (command(name), *answer)).collect();
            _ = fs::remove_file(&self.socket);
            let listener = UnixListener::bind(&self.socket).unwrap();
            let configuration = configuration(table);
            let (_, why) = tokio::join!(serve(listener, &talks), self.bird.update(&configuration, true));
            _ = fs::remove_file(&self.socket);
            why
        }

        fn has(&self, table: u32) -> bool {
            fs::read_to_string(&self.file).unwrap() == configuration(table).text("", true)
        }

        fn mode(&self) -> u32 {
            fs::metadata(&self.file).unwrap().mode() & 0o777
        }
    }

    const OK: &str = "0020 Configuration OK\n";
    const DONE: &str = "0003 Reconfigured\n";
    const BAD: &str = "8002 bird.conf.new:1:1 syntax error\n";

    #[tokio::test]
    async fn unreadable_file_is_a_failure_until_it_can_be_read() {
        let mut bed = Bed::new();
        fs::create_dir(&bed.file).unwrap();
        let why = bed.bird.update(&configuration(1), true).await.unwrap();
        assert!(why.contains("cannot read BIRD's configuration"), "{why}");
        assert!(bed.bird.has_failed());
        fs::remove_dir(&bed.file).unwrap();
        assert_eq!(bed.update(1, &[("check", OK), ("configure", DONE)]).await, None);
        assert!(!bed.bird.has_failed() && bed.has(1));
    }

    #[tokio::test]
    async fn file_is_checked_before_it_replaces_the_one_in_use() {
        let mut bed = Bed::new();
        assert_eq!(bed.update(1, &[("check", OK), ("configure", DONE)]).await, None);
        assert_eq!(bed.update(1, &[]).await, None, "BIRD is asked once");
        let why = bed.update(2, &[("check", BAD)]).await.unwrap();
        assert!(why.contains("syntax error") && why.contains("stays as it is"), "{why}");
        assert!(bed.has(1) && bed.bird.has_failed());
        assert_eq!(bed.update(1, &[]).await, None, "the user takes the change back");
        assert!(!bed.bird.has_failed());
        bed.update(2, &[("check", BAD)]).await.unwrap();
        // As if the user had corrected the mistake: the next configuration is valid.
        assert_eq!(bed.update(3, &[("check", OK), ("configure", DONE)]).await, None);
        assert!(bed.has(3));
        // BIRD does not run: the file must keep the content that BIRD has accepted, for its next start.
        let why = bed.bird.update(&configuration(4), true).await.unwrap();
        assert!(why.contains("bird.ctl") && why.contains("bird.conf.new waits"), "{why}");
        assert!(bed.has(3));
        for _ in 0..RETRY {
            assert_eq!(bed.update(4, &[]).await, Some(why.clone()));
        }
        assert_eq!(bed.update(4, &[("check", OK), ("configure", DONE)]).await, None);
        assert!(bed.has(4));
    }

    const PROTOCOLS: &str = "2002-Name       Proto      Table      State  Since         Info\n\
        1002-device1    Device     ---        up     2026-11-28    \n\
        \x20bgp_a      BGP        ---        up     2026-11-28    Established   \n\
        \x20bgp_b      BGP        ---        start  2026-11-28    Active        Socket: Connection refused\n\
        1002-bfd1       BFD        ---        up     2026-11-28    \n\
        0000 \n";

    #[tokio::test]
    async fn sessions_that_bird_has_not_established_are_down() {
        let bed = Bed::new();
        let two = two_sessions();
        let none = Sessions { established: 0, down: 2 };
        assert_eq!(bed.bird.sessions(&two, true).await, none, "BIRD does not run");
        let listener = UnixListener::bind(&bed.socket).unwrap();
        let talks = [("show protocols".to_owned(), PROTOCOLS)];
        let (_, sessions) = tokio::join!(serve(listener, &talks), bed.bird.sessions(&two, true));
        assert_eq!(sessions, Sessions { established: 1, down: 1 });
    }

    #[tokio::test]
    async fn first_file_is_written_before_bird_runs() {
        let mut bed = Bed::new();
        let why = bed.bird.update(&configuration(1), true).await.unwrap();
        assert!(why.contains("cannot configure BIRD"), "{why}");
        assert!(bed.has(1) && bed.mode() == 0o600);
        bed.bird.update(&configuration(2), true).await.unwrap();
        assert!(bed.has(2), "BIRD has not accepted the first one");
        assert_eq!(bed.update(3, &[("check", OK), ("configure", DONE)]).await, None);
        // A restarted agent finds the configuration file that the earlier agent wrote, and does not write it again.
        bed.bird = Bird::new(bed.file.clone(), bed.socket.clone());
        assert_eq!(bed.update(3, &[("configure", DONE)]).await, None);
    }

    #[tokio::test]
    async fn file_is_never_readable_for_others() {
        let mut bed = Bed::new();
        for (mode, restricted) in [(0o644, 0o640), (0o666, 0o640), (0o600, 0o600), (0o604, 0o600)] {
            fs::write(&bed.file, configuration(1).text("", true)).unwrap();
            fs::set_permissions(&bed.file, fs::Permissions::from_mode(mode)).unwrap();
            bed.bird = Bird::new(bed.file.clone(), bed.socket.clone());
            assert_eq!(bed.update(1, &[("configure", DONE)]).await, None);
            assert_eq!(bed.mode(), restricted, "{mode:o}, unchanged");
            fs::set_permissions(&bed.file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(bed.update(2, &[("check", OK), ("configure", DONE)]).await, None);
            assert_eq!(bed.mode(), restricted, "{mode:o}, changed");
        }
    }
}
