//! Creates network namespaces, and runs threads and programs in them.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};

use crate::{
    cgroup::Cgroup,
    cleanup::{Cleanup, NETNS_FOLDER, Resource},
};

/// A prefix, unique on this machine, for names of namespaces of one cluster: `lb-PID-N`.
pub fn unique_prefix() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("lb-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A named network namespace, as `ip netns` creates them. Clones share it. Dropping the last clone removes a namespace
/// that [`Self::create`] has created.
#[derive(Clone, Debug)]
pub struct Netns {
    name: Arc<str>,
    file: Arc<File>,
    cgroup: Option<Cgroup>,
    _cleanup: Option<Arc<Cleanup>>,
}

impl Netns {
    /// Creates a namespace with its loopback device up. Dropping the last clone removes it.
    pub fn create(name: &str) -> Result<Self> {
        let cleanup = Cleanup::of(Resource::Netns(name.to_owned()));
        let output = Command::new("ip").args(["netns", "add", name]).output().context("running `ip`")?;
        let reason = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "could not make network namespace {name} (are you root?): {reason}");
        let netns = Self { _cleanup: Some(Arc::new(cleanup)), ..Self::open(name)? };
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Opens an existing namespace, which stays when the handle is dropped.
    pub fn open(name: &str) -> Result<Self> {
        let path = path(name);
        let file =
            File::open(&path).with_context(|| format!("opening network namespace {}", path.display()))?;
        Ok(Self { name: name.into(), file: Arc::new(file), cgroup: None, _cleanup: None })
    }

    /// The same namespace with a cgroup: threads and commands that this handle starts run in both.
    #[must_use]
    pub fn within(self, cgroup: Option<&Cgroup>) -> Self {
        Self { cgroup: cgroup.cloned(), ..self }
    }

    /// Name of the namespace below `/run/netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the namespace, for `nsenter --net=PATH`.
    pub fn path(&self) -> PathBuf {
        path(&self.name)
    }

    /// Runs `work` on a thread inside the namespace. Sockets opened there stay in it, wherever they are used later.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let enter_and_work = || {
            setns(&*self.file, CloneFlags::CLONE_NEWNET)?;
            self.cgroup.as_ref().map_or(Ok(()), Cgroup::enter)?;
            work()
        };
        thread::scope(|scope| {
            scope.spawn(enter_and_work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A command that will run in the namespace, and in the cgroup of [`Self::within`] if there is one. Unlike
    /// `ip netns exec`, it keeps the mount namespace of this process.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let file = Arc::clone(&self.file);
        let threads = self.cgroup.as_ref().and_then(|cgroup| File::create(cgroup.threads()).ok());
        let mut command = Command::new(program);
        // SAFETY: the closure runs between fork and exec and makes at most two system calls, which are
        // async-signal-safe; it neither allocates nor locks.
        unsafe {
            command.pre_exec(move || {
                setns(&*file, CloneFlags::CLONE_NEWNET)?;
                threads.as_ref().map_or(Ok(()), |mut threads| threads.write_all(b"0"))
            });
        }
        command
    }

    /// Runs `ip` commands in the namespace, one per line, as `ip -batch` does.
    pub fn ip(&self, commands: &str) -> Result<()> {
        self.feed("ip", &BATCH, commands)
    }

    /// Runs a program in the namespace with `input` as its standard input. A failure is an error that quotes the
    /// program's standard error.
    pub fn feed(&self, program: &str, arguments: &[&str], input: &str) -> Result<()> {
        feed(self.command(program).args(arguments), input)
            .with_context(|| format!("in namespace {}", self.name))
    }

    /// Writes a sysctl below `/proc/sys/net`; `key` has slashes, such as `ipv4/ip_forward`.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        self.sysctls(&[(key, value)])
    }

    /// Writes several sysctls below `/proc/sys/net`.
    pub fn sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        let write_all = || {
            settings.iter().try_for_each(|(key, value)| {
                let path = format!("/proc/sys/net/{key}");
                fs::write(&path, value)
                    .map_err(|error| io::Error::other(format!("{value} > {path}: {error}")))
            })
        };
        self.run(write_all).with_context(|| format!("changing settings of namespace {}", self.name))
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(NETNS_FOLDER).join(name)
}

const BATCH: [&str; 2] = ["-batch", "-"];
/// Maximum number of lines of the input that an error quotes.
const SHOWN_LINES: usize = 20;

/// Runs `ip` commands, one per line, in this thread's namespace.
pub fn ip(commands: &str) -> Result<()> {
    feed(Command::new("ip").args(BATCH), commands)
}

fn feed(command: &mut Command, input: &str) -> Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let (mut child, cleanup) =
        Cleanup::spawn(command).with_context(|| format!("starting {command:?} (is it installed?)"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).with_context(|| format!("writing to {command:?}"))?;
    }
    let output = child.wait_with_output().with_context(|| format!("waiting for {command:?}"))?;
    cleanup.disarm();
    let reason = String::from_utf8_lossy(&output.stderr);
    let shown: Vec<&str> = input.lines().take(SHOWN_LINES).collect();
    let shown = shown.join("\n");
    ensure!(output.status.success(), "{command:?} failed: {reason}its input began with:\n{shown}");
    Ok(())
}
