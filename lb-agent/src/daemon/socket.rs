//! The status socket: who connects gets the agent's [`Report`] as JSON. A path in the file system, so that it can be
//! reached from any network namespace, named after the folder of pins, so that it belongs to one data plane.

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

use super::state::{Report, State};
use crate::kubernetes::NodeInfo;

/// Where the sockets are. The chart mounts a writable volume there.
pub const FOLDER: &str = "/run/lb-agent";
/// A socket younger than this may belong to an agent that is just about to listen.
const YOUNG: Duration = Duration::from_secs(60);
/// How long to wait for an agent that does not answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The socket of the agent that works in `bpffs`. Named by device and inode of the folder of pins: the path of a
/// BPF file system means another one in another mount namespace.
fn path(bpffs: &Path) -> io::Result<PathBuf> {
    let pins = fs::metadata(bpffs.join("lb"))?;
    Ok(Path::new(FOLDER).join(format!("{:x}-{:x}.sock", pins.dev(), pins.ino())))
}

/// Serves reports for ever. Where that is impossible, such as on a read-only file system, it is said once and only
/// `status` is poorer for it.
pub(super) async fn serve(
    bpffs: PathBuf,
    state: Arc<State>,
    node_info: watch::Receiver<NodeInfo>,
) -> anyhow::Result<Infallible> {
    let listener = match bind(&bpffs) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(folder = FOLDER, %error, "no status socket: `lb-agent status` will not see this agent");
            return std::future::pending().await;
        }
    };
    loop {
        match listener.accept().await {
            Ok((mut stream, _)) => {
                let node_eligible = node_info.borrow().eligible;
                let report = serde_json::to_vec(&state.report(node_eligible))?;
                tokio::spawn(async move {
                    match time::timeout(PATIENCE, stream.write_all(&report)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!(%error, "a client of the status socket went away"),
                        Err(_) => debug!("a client of the status socket does not read"),
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

/// The lock of the folder of pins makes sure that a socket found here has no living owner.
fn bind(bpffs: &Path) -> io::Result<UnixListener> {
    let path = path(bpffs)?;
    fs::create_dir_all(FOLDER)?;
    remove_dead();
    remove(&path)?;
    UnixListener::bind(path)
}

/// Removes what agents left behind that were killed and never started again.
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
    for path in paths.filter(|path| is_dead(path)) {
        if let Err(error) = remove(&path) {
            debug!(path = %path.display(), %error, "the socket of a dead agent stays behind");
        }
    }
}

/// Removes the socket of an agent that stops, or has been killed.
pub fn unbind(bpffs: &Path) {
    let Ok(path) = path(bpffs) else { return };
    if let Err(error) = remove(&path) {
        debug!(path = %path.display(), %error, "the status socket stays behind");
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Asks the agent that works in `bpffs`; `None` when there is none.
///
/// # Errors
/// An agent is there but does not answer, or with something else than a report.
pub fn ask(bpffs: &Path) -> anyhow::Result<Option<Report>> {
    let mut stream = match path(bpffs).and_then(UnixStream::connect) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(Some(serde_json::from_str(&text)?))
}
