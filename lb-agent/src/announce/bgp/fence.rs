//! The fence: a small process that removes the announced routes if the agent hangs, dies or stays unhealthy. Routes
//! outlive the agent that wrote them, and BGP daemons go on announcing them.
//!
//! While the agent is healthy, it sends the fence a heartbeat about once a second, through a socket whose name contains
//! the network namespace and the table.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt as _, net::UnixDatagram},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use lb_datapath::AnnouncedRoutes;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use tracing::warn;

use crate::daemon::socket::FOLDER;

/// While no message arrives, the fence compares the clock with its deadline at this interval; after the deadline, it
/// removes routes at this interval.
const LOOK: Duration = Duration::from_secs(1);
/// Time without a message after which a fence that has got a signal ends. When a Pod ends, its agent also gets the
/// signal. An agent that finds no fence when it stops withdraws the announced routes.
const SILENCE: Duration = Duration::from_secs(4);
/// Time from the signal after which the fence ends even while messages arrive; the fence may take [`LOOK`] longer.
/// Kubernetes kills the containers of the Pod after 10 s.
const LONGEST: Duration = Duration::from_secs(8);
/// The message of a healthy agent.
const HEARTBEAT: &[u8] = b"1";
/// A message that only asks whether a fence listens.
const PROBE: &[u8] = b"0";

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
        let message = if alive { HEARTBEAT } else { PROBE };
        self.socket.send_to(message, &self.path).is_ok()
    }
}

/// Removes the announced routes in a table once `lifetime` has passed since the last heartbeat. After SIGTERM or
/// SIGINT, returns once 4 s have passed since the signal and since the last message of an agent, but at most about 9 s
/// after the signal. Routes that are still in the table when this function returns stay there.
///
/// # Errors
/// Another fence runs, the socket cannot be bound, or signals or heartbeats cannot be received.
pub fn run(table: u32, lifetime: Duration) -> anyhow::Result<()> {
    let mut end = End::on_signals()?;
    let mut socket = Socket::bind(table)?;
    let routes = AnnouncedRoutes::new(table);
    // The fence does not know when the agent last sent a heartbeat, so the whole lifetime begins now.
    let mut deadline = Instant::now() + lifetime;
    let mut is_down = false;
    eprintln!("fence: removes the routes in table {table} {} s after the last heartbeat", lifetime.as_secs());
    while !end.is_due() {
        if !socket.is_reachable() {
            warn!(table, "the socket of the fence has been removed: binding it again");
            socket = Socket::bind(table)?;
        }
        if let Some(message) = socket.receive()? {
            end.heard = Instant::now();
            if message == HEARTBEAT {
                deadline = end.heard + lifetime;
                if std::mem::take(&mut is_down) {
                    warn!(table, "the agent is back");
                }
            }
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
    eprintln!("fence: ended by a signal; the routes in table {table} stay");
    Ok(())
}

/// When a signal ends the fence. The fence handles signals because it is the first process of its container: to such a
/// process the kernel delivers no signal that would end it by default.
struct End {
    /// Whether a signal has arrived.
    signal: Arc<AtomicBool>,
    /// When the fence first saw that a signal has arrived.
    asked: Option<Instant>,
    /// When the last message of an agent arrived.
    heard: Instant,
}

impl End {
    fn on_signals() -> anyhow::Result<Self> {
        let signal = Arc::new(AtomicBool::new(false));
        for number in [SIGTERM, SIGINT] {
            flag::register(number, Arc::clone(&signal)).context("cannot listen for signals")?;
        }
        Ok(Self { signal, asked: None, heard: Instant::now() })
    }

    fn is_due(&mut self) -> bool {
        if !self.signal.load(Ordering::Relaxed) {
            return false;
        }
        let asked = *self.asked.get_or_insert_with(Instant::now);
        asked.max(self.heard).elapsed() >= SILENCE || asked.elapsed() >= LONGEST
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
        if probe.send_to(PROBE, &path).is_ok() {
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

    /// The next message; `None` if none arrives within [`LOOK`], or if a signal ends the wait.
    fn receive(&self) -> anyhow::Result<Option<[u8; 1]>> {
        let mut message = [0];
        match self.datagrams.recv(&mut message) {
            Ok(_) => Ok(Some(message)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(None)
            }
            Err(error) => Err(error).context("cannot receive heartbeats"),
        }
    }

    /// Whether the path still leads to this socket, so that the agent's heartbeats arrive here.
    fn is_reachable(&self) -> bool {
        identity(&self.path).is_ok_and(|file| file == self.file)
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
