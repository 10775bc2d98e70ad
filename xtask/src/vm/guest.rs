//! Process 1 of the guest: mounts file systems, loads modules, runs the tests, reports the results, and powers off.

use std::convert::Infallible;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

use super::plan::{Binary, PLAN, Plan};
use super::report::{Probe, Record, Test, TestOutcome};
use super::skips::{SKIPS, Skips};

/// How long a test may print nothing before it fails.
pub(super) const LIMIT: Duration = Duration::from_secs(600);
/// The second serial port, which carries the records.
const CHANNEL: &str = "/dev/ttyS1";
/// How many bytes from the end of a test binary's output are reported if tests have failed.
const OUTPUT: usize = 16_384;

/// The folder of the tests and the agents.
pub(super) const TESTS: &str = "/tests";

/// File systems and mount points, in order.
const MOUNTS: [(&str, &str); 7] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// Arguments of `vm-guest`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Factor for time limits, compared with a real machine
    #[arg(long)]
    patience: u32,
}

/// Runs the tests, then powers the machine off instead of returning: the kernel panics when process 1 ends. After an
/// error the report has no closing line.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Err(error) = run_all(args) {
        eprintln!("guest: {error:#}");
    }
    // Leaves the console time to print the error.
    thread::sleep(Duration::from_millis(500));
    let never: Infallible = reboot(RebootMode::RB_POWER_OFF).context("cannot power off")?;
    match never {}
}

fn run_all(args: &Args) -> anyhow::Result<()> {
    for (kind, path) in MOUNTS {
        mount(Some("none"), path, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {kind} at {path}"))?;
    }
    let mut guest = Guest::open()?;
    let plan = fs::read(PLAN).with_context(|| format!("cannot read {PLAN}"))?;
    let plan: Plan = serde_json::from_slice(&plan).with_context(|| format!("in {PLAN}"))?;
    configure_network()?;
    let missing_modules = plan.modules.iter().filter(|module| !load(module)).cloned().collect();
    lb_tests::virtio::name_cards()?;
    guest.report(&Record::Started { missing_modules })?;
    guest.report(&Record::Check(check()?))?;
    for binary in &plan.binaries {
        guest.run(binary, args.patience)?;
    }
    guest.close()
}

/// Sets the sysctls of a node and brings up `lo`.
fn configure_network() -> anyhow::Result<()> {
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        let path = format!("/proc/sys/net/{setting}");
        fs::write(&path, "1").with_context(|| format!("cannot write {path}"))?;
    }
    let status = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("cannot start ip")?;
    anyhow::ensure!(status.success(), "cannot bring lo up: {status}");
    Ok(())
}

/// Loads a module with its dependencies; returns false if that fails, most likely because this kernel lacks the module.
fn load(module: &str) -> bool {
    Command::new("modprobe").args(["--quiet", module]).status().is_ok_and(|status| status.success())
}

fn check() -> anyhow::Result<Vec<Probe>> {
    let agent = format!("{TESTS}/lb-agent");
    let output = Command::new(&agent).args(["check", "-o", "json"]).output();
    let output = output.with_context(|| format!("cannot start {agent}"))?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`lb-agent check -o json` ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// The guest's report and its counts so far.
struct Guest {
    channel: File,
    skips: Skips,
    passed: usize,
    skipped: usize,
    failed: usize,
}

impl Guest {
    fn open() -> anyhow::Result<Self> {
        let channel = OpenOptions::new().write(true).open(CHANNEL);
        let channel = channel.with_context(|| format!("cannot open {CHANNEL}"))?;
        Ok(Self { channel, skips: Skips::open()?, passed: 0, skipped: 0, failed: 0 })
    }

    fn report(&mut self, record: &Record) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        self.channel.write_all(line.as_bytes()).with_context(|| format!("cannot write to {CHANNEL}"))
    }

    fn close(&mut self) -> anyhow::Result<()> {
        let Self { passed, skipped, failed, .. } = *self;
        self.report(&Record::Closing { passed, skipped, failed })?;
        nix::sys::termios::tcdrain(&self.channel).context("cannot wait for the serial port")
    }

    fn done(
        &mut self,
        binary: &Binary,
        name: &str,
        outcome: TestOutcome,
        took: Duration,
    ) -> anyhow::Result<()> {
        match outcome {
            TestOutcome::Passed { .. } => self.passed += 1,
            TestOutcome::Skipped { .. } => self.skipped += 1,
            TestOutcome::Failed => self.failed += 1,
        }
        let name = binary.full_name(name);
        self.report(&Record::Test(Test { name, outcome, seconds: took.as_secs_f64() }))
    }

    /// Runs the tests of a binary one after the other in one process; starts another process after a crash or a hang.
    fn run(&mut self, binary: &Binary, patience: u32) -> anyhow::Result<()> {
        for (name, reason) in &binary.skipped {
            self.done(binary, name, TestOutcome::Skipped { reason: reason.clone() }, Duration::ZERO)?;
        }
        let mut left = binary.tests.as_slice();
        while !left.is_empty() {
            let ran = self.run_process(binary, left, patience)?;
            left = &left[ran..];
        }
        Ok(())
    }

    /// Runs tests in one process until all have run, or one crashes or hangs; returns the number of tests that ran, at
    /// least one.
    fn run_process(&mut self, binary: &Binary, tests: &[String], patience: u32) -> anyhow::Result<usize> {
        let mut process = Process::start(binary, tests, patience)?;
        for (ran, name) in tests.iter().enumerate() {
            let start = Instant::now();
            let outcome = match process.next_result()? {
                Next::Passed => self.skips.outcome_of(name)?,
                Next::Failed => TestOutcome::Failed,
                Next::Ended => {
                    self.done(binary, name, TestOutcome::Failed, start.elapsed())?;
                    let said = format!("the test ended the process; end of its output:\n{}", process.output);
                    self.report(&Record::Output { name: binary.full_name(name), output: said })?;
                    return Ok(ran + 1);
                }
                Next::Silence => {
                    self.done(binary, name, TestOutcome::Failed, start.elapsed())?;
                    let output = format!("the test printed nothing for {} s", LIMIT.as_secs());
                    self.report(&Record::Output { name: binary.full_name(name), output })?;
                    return Ok(ran + 1);
                }
            };
            self.done(binary, name, outcome, start.elapsed())?;
        }
        let output = process.rest()?;
        if output.contains("\nfailures:\n") {
            let from = output.len().saturating_sub(OUTPUT);
            let from = (from..).find(|at| output.is_char_boundary(*at)).unwrap_or_default();
            self.report(&Record::Output { name: binary.name.clone(), output: output[from..].to_owned() })?;
        }
        Ok(tests.len())
    }
}

/// The next event of a test binary.
enum Next {
    Passed,
    Failed,
    /// The process has ended.
    Ended,
    /// The process has printed nothing for too long.
    Silence,
}

/// A running test binary; killed when dropped.
struct Process {
    child: Child,
    lines: Receiver<String>,
    /// The output of the process so far, without the results of tests.
    output: String,
}

impl Process {
    fn start(binary: &Binary, tests: &[String], patience: u32) -> anyhow::Result<Self> {
        let path = Path::new(TESTS).join(&binary.name);
        let mut command = Command::new(&path);
        // Tests that only a guest runs are marked `#[ignore]`.
        command.args(["--test-threads=1", "--include-ignored", "--exact"]).args(tests);
        command.env("LB_AGENT", format!("{TESTS}/lb-agent")).env("LB_TEST_SKIPS", SKIPS);
        command.env("LB_NEXT_AGENT", format!("{TESTS}/next-lb-agent"));
        command.env("LB_TEST_PATIENCE", patience.to_string()).env("RUST_BACKTRACE", "0");
        command.env("LB_TEST_GUEST", "1");
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| format!("cannot start {}", path.display()))?;
        let Some(stdout) = child.stdout.take() else { bail!("{} has no output", path.display()) };
        Ok(Self { child, lines: read_lines(stdout), output: String::new() })
    }

    fn next_result(&mut self) -> anyhow::Result<Next> {
        loop {
            match self.lines.recv_timeout(LIMIT) {
                Ok(line) => match result_of(&line) {
                    Some(true) => return Ok(Next::Passed),
                    Some(false) => return Ok(Next::Failed),
                    None => self.keep(&line),
                },
                Err(RecvTimeoutError::Timeout) => return Ok(Next::Silence),
                Err(RecvTimeoutError::Disconnected) => return Ok(Next::Ended),
            }
        }
    }

    fn keep(&mut self, line: &str) {
        self.output.push_str(line);
        self.output.push('\n');
    }

    /// Waits until the process ends; returns its output other than test results.
    fn rest(mut self) -> anyhow::Result<String> {
        while let Ok(line) = self.lines.recv_timeout(LIMIT) {
            self.keep(&line);
        }
        self.child.wait().context("cannot wait for the tests")?;
        Ok(std::mem::take(&mut self.output))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended before.
        self.child.kill().unwrap_or_default();
        if let Err(error) = self.child.wait() {
            eprintln!("guest: cannot wait for the tests: {error}");
        }
    }
}

fn read_lines(stdout: ChildStdout) -> Receiver<String> {
    let (to, from) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            if to.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    from
}

/// Whether the test of this libtest line passed; `None` for other lines.
fn result_of(line: &str) -> Option<bool> {
    let (_, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    match result {
        "ok" => Some(true),
        "FAILED" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_distinguished_from_output() {
        assert_eq!(result_of("test sctp::x ... ok"), Some(true));
        assert_eq!(result_of("test sctp::x ... FAILED"), Some(false));
        for line in ["test result: ok. 1 passed", "running 2 tests", "", "test x ... ignored"] {
            assert_eq!(result_of(line), None, "{line}");
        }
    }
}
