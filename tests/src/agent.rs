//! Runs the agent as a process inside a node's namespace.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread::panicking,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::{cleanup::Cleanup, netns::Netns, wait_for};

/// How long to wait until `/healthz` answers 200, and until a stopping agent has exited.
const PATIENCE: Duration = Duration::from_secs(60);

/// Address of the agent's `/healthz` inside its namespace.
const HEALTHZ: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10256);

/// Path of the agent's executable: `$LB_AGENT`, else `debug/lb-agent` in Cargo's target folder.
pub fn binary() -> PathBuf {
    binary_at("LB_AGENT", "debug/lb-agent")
}

/// Path of an agent whose maps have another layout: `$LB_NEXT_AGENT`, else `next-layout/lb-agent` in Cargo's target
/// folder. `cargo xtask test` copies this agent there.
pub fn next_binary() -> PathBuf {
    binary_at("LB_NEXT_AGENT", "next-layout/lb-agent")
}

fn binary_at(variable: &str, in_target: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return path.into();
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
    let path = target.join(in_target);
    path.canonicalize().unwrap_or(path)
}

/// Arguments and files with which an agent runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Value of `--node-name`.
    pub node_name: String,
    /// Value of `--manifests`: the folder of manifests.
    pub manifests: PathBuf,
    /// Value of `--bpffs`, where the agent mounts a BPF file system.
    pub bpffs: PathBuf,
    /// Value of `--cgroup`; `None` leaves the agent's default.
    pub cgroup: Option<PathBuf>,
    /// File that receives the agent's standard output and error.
    pub log: PathBuf,
    /// Further arguments of `lb-agent run`.
    pub arguments: Vec<String>,
    /// Executable to run instead of [`binary`].
    pub binary: Option<PathBuf>,
}

/// A running agent. Dropping it kills the agent, and prints its log if the thread is panicking.
#[derive(Debug)]
pub struct Agent {
    netns: Netns,
    settings: Settings,
    child: Child,
    cleanup: Option<Cleanup>,
}

impl Agent {
    /// Starts the agent in `netns` and waits until `/healthz` answers 200.
    pub fn start(netns: &Netns, settings: Settings) -> Result<Self> {
        let agent = Self::spawn(netns, settings)?;
        agent.wait_until_healthy()?;
        Ok(agent)
    }

    /// Starts the agent in `netns` without waiting for its `/healthz`.
    pub fn spawn(netns: &Netns, settings: Settings) -> Result<Self> {
        Self::spawn_by(netns, settings, &[])
    }

    /// Starts the agent in `netns` through another program: `starter` with the agent's command appended.
    pub fn spawn_by(netns: &Netns, settings: Settings, starter: &[String]) -> Result<Self> {
        let binary = settings.binary.clone().unwrap_or_else(binary);
        ensure!(binary.exists(), "{} is missing: `cargo xtask test` builds it", binary.display());
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&settings.log)
            .with_context(|| format!("opening {}", settings.log.display()))?;
        let mut command = match starter {
            [] => netns.command(&binary),
            [program, arguments @ ..] => {
                let mut command = netns.command(program);
                command.args(arguments).arg(&binary);
                command
            }
        };
        command.arg("run");
        command.arg("--manifests").arg(&settings.manifests).arg("--bpffs").arg(&settings.bpffs);
        command.args(["--node-name", &settings.node_name, "--healthz-bind-address", &HEALTHZ.to_string()]);
        if let Some(cgroup) = &settings.cgroup {
            command.arg("--cgroup").arg(cgroup);
        }
        command.args(&settings.arguments);
        // The agent gets its own process group, so that Ctrl-C reaches only the test program, which then cleans up.
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let (child, cleanup) =
            Cleanup::spawn(&mut command).with_context(|| format!("starting {}", binary.display()))?;
        Ok(Self { netns: netns.clone(), settings, child, cleanup: Some(cleanup) })
    }

    /// Waits until `/healthz` answers 200.
    pub fn wait_until_healthy(&self) -> Result<()> {
        let pid = self.child.id();
        let probe = || {
            if is_healthy(&self.netns).unwrap_or(false) {
                return Some(Ok(()));
            }
            has_exited(pid).then(|| Err(anyhow!("the agent exited")))
        };
        let result = wait_for(PATIENCE, probe).unwrap_or_else(|| Err(anyhow!("/healthz did not answer 200")));
        result.with_context(|| format!("the agent in {} logged:\n{}", self.netns.name(), self.log()))
    }

    /// The agent's log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.settings.log).unwrap_or_else(|error| format!("(no log: {error})"))
    }

    /// The agent's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the agent with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        self.reap_killed().context("killing the agent")
    }

    /// Sends a signal to the agent. SIGSTOP makes it hang until SIGCONT.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().try_into()?);
        kill(pid, signal).with_context(|| format!("sending {signal} to the agent"))
    }

    /// Sends SIGTERM and returns the exit status.
    pub fn terminate(self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait().context("after SIGTERM")
    }

    /// Waits until the agent exits by itself and returns its status.
    pub fn wait(mut self) -> Result<ExitStatus> {
        let Some(status) = wait_for(PATIENCE, || self.child.try_wait().transpose()) else {
            bail!("the agent did not stop within {PATIENCE:?}")
        };
        self.forget_process();
        Ok(status?)
    }

    /// Runs `lb-agent SUBCOMMAND ARGUMENTS --bpffs DIR` in the namespace of this agent.
    pub fn ask(&self, arguments: &[&str]) -> Result<Output> {
        let binary = self.settings.binary.clone().unwrap_or_else(binary);
        ask_by(&binary, &self.netns, &self.settings.bpffs, arguments)
    }

    /// The output of [`Self::ask`] with `-o json`, parsed.
    ///
    /// # Errors
    /// The command fails, or prints no JSON.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        parse(&self.ask(&[arguments, &["-o", "json"]].concat())?, arguments)
    }

    /// Number of packets that the programs have counted under this outcome.
    ///
    /// # Errors
    /// As [`Self::json`], or there is no such outcome.
    pub fn counted(&self, outcome: &str) -> Result<u64> {
        packets(&self.json(&["status"])?, outcome)
    }

    fn reap_killed(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.forget_process();
        Ok(())
    }

    fn forget_process(&mut self) {
        if let Some(cleanup) = self.cleanup.take() {
            cleanup.disarm();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.cleanup.is_some()
            && let Err(error) = self.reap_killed()
        {
            eprintln!("could not end the agent: {error}");
        }
        if panicking() {
            eprintln!("---- log of the agent in {} ----\n{}----", self.netns.name(), self.log());
        }
    }
}

/// Runs `lb-agent SUBCOMMAND ARGUMENTS --bpffs DIR` in a namespace.
pub fn ask(netns: &Netns, bpffs: &Path, arguments: &[&str]) -> Result<Output> {
    ask_by(&binary(), netns, bpffs, arguments)
}

/// The output of [`ask`] with `-o json`, parsed.
///
/// # Errors
/// The command fails, or prints no JSON.
pub fn ask_json(netns: &Netns, bpffs: &Path, arguments: &[&str]) -> Result<Value> {
    parse(&ask(netns, bpffs, &[arguments, &["-o", "json"]].concat())?, arguments)
}

/// Number of packets that the programs in a namespace have counted under this outcome.
///
/// # Errors
/// As [`ask_json`], or there is no such outcome.
pub fn counted(netns: &Netns, bpffs: &Path, outcome: &str) -> Result<u64> {
    packets(&ask_json(netns, bpffs, &["status"])?, outcome)
}

fn parse(output: &Output, arguments: &[&str]) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| format!("in the output of {arguments:?}"))
}

fn packets(status: &Value, outcome: &str) -> Result<u64> {
    let mut outcomes = status["outcomes"].as_array().into_iter().flatten();
    let found = outcomes.find(|entry| entry["outcome"] == outcome);
    found.and_then(|entry| entry["packets"].as_u64()).with_context(|| format!("no outcome {outcome}"))
}

fn ask_by(binary: &Path, netns: &Netns, bpffs: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = netns.command(binary);
    command.args(arguments).arg("--bpffs").arg(bpffs);
    run(&mut command)
}

/// Runs a command to its end. A non-zero exit is an error that quotes the command's standard error.
pub fn run(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    let reason = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed ({}): {reason}", output.status);
    Ok(output)
}

/// Whether a process has exited; a zombie counts as exited.
fn has_exited(pid: u32) -> bool {
    let mut status = String::new();
    let read = File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read_to_string(&mut status));
    read.is_err() || status.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

/// Whether `/healthz` of the agent in the namespace answers 200.
pub fn is_healthy(netns: &Netns) -> io::Result<bool> {
    let mut stream = netns.run(|| TcpStream::connect(HEALTHZ))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut line = [0; 12];
    stream.read_exact(&mut line)?;
    Ok(&line[9..] == b"200")
}
