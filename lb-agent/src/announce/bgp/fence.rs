//! The fence: a small process that removes the announced routes if the agent hangs, dies or stays unhealthy. Routes
//! outlive the agent that wrote them, and BGP daemons go on announcing them.
//!
//! While the agent is healthy, it sends the fence a heartbeat about once a second, through a socket whose name contains
//! the network namespace and the table.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt as _, net::UnixDatagram},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use lb_datapath::AnnouncedRoutes;
use tracing::warn;

use crate::daemon::socket::FOLDER;

/// While no message arrives, the fence compares the clock with its deadline at this interval; after the deadline, it
/// removes routes at this interval.
const LOOK: Duration = Duration::from_secs(1);

/// Path of the Unix socket of the fence that watches over a routing table in this network namespace.
fn path(table: u32) -> io::Result<PathBuf> {
    let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(Path::new(FOLDER).join(format!("fence-{namespace:x}-{table}.sock")))
}

/// The agent's side of the fence's socket: sends heartbeats.
#[derive(Debug)]
pub(super) struct Heart {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Heart {
    pub(super) fn new(table: u32) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path: path(table)? })
    }

    /// Sends a heartbeat if `alive`, else a probe, which does not extend the fence's deadline. Returns whether a fence
    /// listens.
    pub(super) fn beat(&self, alive: bool) -> bool {
        let message: &[u8] = if alive { b"1" } else { b"0" };
        self.socket.send_to(message, &self.path).is_ok()
    }
}

/// Removes the announced routes in a table once `lifetime` has passed since the last heartbeat. Runs until a signal
/// ends the process.
///
/// # Errors
/// Another fence runs, the socket cannot be bound, or heartbeats cannot be received.
pub fn run(table: u32, lifetime: Duration) -> anyhow::Result<()> {
    let mut socket = Socket::bind(table)?;
    let routes = AnnouncedRoutes::new(table);
    // The fence does not know when the agent last sent a heartbeat, so the whole lifetime begins now.
    let mut deadline = Instant::now() + lifetime;
    let mut is_down = false;
    eprintln!("fence: removes the routes in table {table} {} s after the last heartbeat", lifetime.as_secs());
    loop {
        if !socket.is_reachable() {
            warn!(table, "the socket of the fence has been removed: binding it again");
            socket = Socket::bind(table)?;
        }
        let mut message = [0];
        match socket.datagrams.recv(&mut message) {
            Ok(_) if message == *b"1" => {
                deadline = Instant::now() + lifetime;
                if std::mem::take(&mut is_down) {
                    warn!(table, "the agent is back");
                }
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error).context("cannot receive heartbeats"),
        }
        if Instant::now() < deadline {
            continue;
        }
        match routes.clear() {
            Ok(0) => {}
            Ok(removed) => {
                warn!(removed, table, "no heartbeat of an agent: removed the announced routes");
            }
            Err(error) => warn!("no heartbeat of an agent, and {error}; retrying"),
        }
        is_down = true;
    }
}

/// The Unix socket at which the fence receives heartbeats.
struct Socket {
    datagrams: UnixDatagram,
    path: PathBuf,
    /// Device and inode number of the socket's file, to notice that the file has been removed or replaced.
    file: (u64, u64),
}

impl Socket {
    /// Binds the socket. Replaces a socket file that no process listens to; fails if another fence listens.
    fn bind(table: u32) -> anyhow::Result<Self> {
        let path = path(table).context("cannot identify the network namespace")?;
        fs::create_dir_all(FOLDER).with_context(|| format!("cannot create {FOLDER}"))?;
        let probe = UnixDatagram::unbound()?;
        if probe.send_to(b"0", &path).is_ok() {
            bail!("another fence watches over table {table} here ({})", path.display());
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", path.display()));
            }
            Ok(()) | Err(_) => {}
        }
        let datagrams =
            UnixDatagram::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        datagrams.set_read_timeout(Some(LOOK))?;
        let file = identity(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { datagrams, path, file })
    }

    /// Whether the path still leads to this socket, so that the agent's heartbeats arrive here.
    fn is_reachable(&self) -> bool {
        identity(&self.path).is_ok_and(|file| file == self.file)
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
