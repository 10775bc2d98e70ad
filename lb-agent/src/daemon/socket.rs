//! The sockets by which commands ask the agent. The sockets have paths in the file system, so that processes in any
//! network namespace can reach them. The paths depend on the directory of pins, so that each data plane has its own.
//!
//! Each connection to the status socket receives the agent's [`Report`] as JSON.

use std::{
    convert::Infallible,
    fs, io,
    io::Read as _,
    os::unix::{fs::MetadataExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{io::AsyncWriteExt as _, net::UnixListener, sync::watch, time};
use tracing::{debug, warn};

use super::{report::Report, state::State};
use crate::kubernetes::NodeInfo;

/// Directory of the agents' sockets and [records](record). The chart mounts a folder of the node there.
pub const FOLDER: &str = "/run/lb-agent";
/// Maximum age of a socket file that may belong to an agent that does not listen yet.
const YOUNG: Duration = Duration::from_secs(60);
/// Pause before the next attempt to create the status socket.
const RETRY: Duration = Duration::from_secs(5);
/// Timeout of one request, for either side.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The Unix sockets on which an agent answers commands.
#[derive(Clone, Copy, Debug)]
pub(super) enum Socket {
    /// The socket that sends the agent's [`Report`].
    Status,
    /// The socket that sends the [environment](super::environment) variables of a namespace.
    Environment,
}

impl Socket {
    const ALL: [Self; 2] = [Self::Status, Self::Environment];

    /// How the name of the socket's file ends.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Status => ".sock",
            Self::Environment => "-environment.sock",
        }
    }
}

/// Path of a socket of the agent of `bpffs`. The path contains device and inode of the directory of pins, because in
/// another mount namespace the same path may be another BPF file system.
fn path(bpffs: &Path, socket: Socket) -> io::Result<PathBuf> {
    Ok(Path::new(FOLDER).join(format!("{}{}", identity(bpffs)?, socket.suffix())))
}

fn identity(bpffs: &Path) -> io::Result<String> {
    let pins = fs::metadata(bpffs.join("lb"))?;
    Ok(format!("{:x}-{:x}", pins.dev(), pins.ino()))
}

/// Path of a file in which the agent of `bpffs` keeps data for the next agent, even if the next agent runs in another
/// Pod. The file stays until an agent or [`remove_all`] removes it or the machine restarts.
///
/// # Errors
/// The directory of pins cannot be read.
pub fn record(bpffs: &Path, name: &str) -> io::Result<PathBuf> {
    Ok(Path::new(FOLDER).join(format!("{}.{name}", identity(bpffs)?)))
}

/// Serves the status socket. While it cannot be created, as on a read-only file system, the agent runs without it.
pub(super) async fn serve(
    bpffs: PathBuf,
    state: Arc<State>,
    node_info: watch::Receiver<NodeInfo>,
) -> anyhow::Result<Infallible> {
    let listener = listen(&bpffs).await;
    loop {
        match listener.accept().await {
            Ok((mut stream, _)) => {
                let node_eligible = node_info.borrow().eligible;
                let report = serde_json::to_vec(&state.report(node_eligible))?;
                tokio::spawn(async move {
                    match time::timeout(PATIENCE, stream.write_all(&report)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!(%error, "a client closed the status socket early"),
                        Err(_) => debug!("a client of the status socket did not read its report"),
                    }
                });
            }
            Err(error) => {
                warn!(%error, "cannot accept on the status socket");
                time::sleep(PATIENCE).await;
            }
        }
    }
}

/// Binds the status socket, as soon as that is possible.
async fn listen(bpffs: &Path) -> UnixListener {
    let mut warned = false;
    loop {
        match bind(bpffs, Socket::Status) {
            Ok(listener) => return listener,
            Err(error) if !warned => {
                warn!(folder = FOLDER, %error, "cannot create the status socket: `lb-agent status` does not show the state of this agent, and `lb-agent ready` fails; make the folder writable; retrying");
                warned = true;
            }
            Err(_) => {}
        }
        time::sleep(RETRY).await;
    }
}

/// Binds a socket. The agent holds the lock of the directory of pins, so no other agent listens at the same path.
pub(super) fn bind(bpffs: &Path, socket: Socket) -> io::Result<UnixListener> {
    let path = path(bpffs, socket)?;
    fs::create_dir_all(FOLDER)?;
    remove_dead();
    remove(&path)?;
    UnixListener::bind(path)
}

/// Removes files of sockets that no agent listens on, except young files.
fn remove_dead() {
    let is_dead = |path: &Path| {
        let age = fs::metadata(path)
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        let refused =
            || UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        age.is_some_and(|age| age > YOUNG) && refused()
    };
    let paths = fs::read_dir(FOLDER).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let is_socket = |path: &PathBuf| path.extension().is_some_and(|end| end == "sock");
    for path in paths.filter(is_socket).filter(|path| is_dead(path)) {
        if let Err(error) = remove(&path) {
            debug!(path = %path.display(), %error, "cannot remove the socket of a killed agent");
        }
    }
}

/// Removes the files of the sockets of the agent of `bpffs`.
pub fn unbind(bpffs: &Path) {
    for path in Socket::ALL.into_iter().filter_map(|socket| path(bpffs, socket).ok()) {
        if let Err(error) = remove(&path) {
            debug!(path = %path.display(), %error, "cannot remove a socket of the agent");
        }
    }
}

/// Removes all files of the data plane at `bpffs`: the sockets of its agent, and the [records](record) for the next
/// agent. The caller has checked that no agent of this data plane runs.
pub fn remove_all(bpffs: &Path) {
    let Ok(identity) = identity(bpffs) else { return };
    let is_own = |name: &str| name.strip_prefix(&identity).is_some_and(|rest| rest.starts_with(['.', '-']));
    let entries = fs::read_dir(FOLDER).into_iter().flatten().filter_map(Result::ok);
    for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(is_own)) {
        if let Err(error) = remove(&entry.path()) {
            warn!(path = %entry.path().display(), %error, "cannot remove a file of the agent: remove it by hand");
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Requests the report of the agent of `bpffs`; `None` if no agent listens.
///
/// # Errors
/// The agent cannot be reached, or sends no valid report.
pub fn ask(bpffs: &Path) -> anyhow::Result<Option<Report>> {
    connect(bpffs, Socket::Status)?.map(read).transpose()
}

/// Requests the report of the only agent that listens in [`FOLDER`], whatever its directory of pins is; `None` if no
/// agent or several agents listen. A node has one agent. If the BPF file system of that agent was unmounted or
/// replaced, the agent still runs, but [`ask`] does not find it.
///
/// # Errors
/// The agent sends no valid report.
pub fn ask_only_one() -> anyhow::Result<Option<Report>> {
    let entries = fs::read_dir(FOLDER).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let is_status = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.ends_with(Socket::Status.suffix()) && !name.ends_with(Socket::Environment.suffix())
    };
    let mut listening = entries.filter(is_status).filter_map(|path| UnixStream::connect(path).ok());
    match (listening.next(), listening.next()) {
        (Some(stream), None) => read(stream).map(Some),
        _ => Ok(None),
    }
}

fn read(mut stream: UnixStream) -> anyhow::Result<Report> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

/// Connects to a socket of the agent of `bpffs`; `None` if no agent listens.
pub(super) fn connect(bpffs: &Path, socket: Socket) -> io::Result<Option<UnixStream>> {
    match path(bpffs, socket).and_then(UnixStream::connect) {
        Ok(stream) => {
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(Some(stream))
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
