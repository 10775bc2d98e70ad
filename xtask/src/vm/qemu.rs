//! Boots a kernel in qemu.

use std::fmt;
use std::fs;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use lb_tests::daemon::Daemon;

use super::folders::folder;
use super::kernel::Kernel;
use super::report::{Record, Report};
use super::wire::{self, Wires};

/// The emulator.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
/// Memory of a guest.
const MEMORY: &str = "3072M";
/// How long a guest may report nothing before it counts as hung: longer than a test may print nothing.
const SILENCE: Duration = Duration::from_secs(super::guest::LIMIT.as_secs() + 120);
/// How long a kernel may take until it panics because it has no root file system.
const PROBE: Duration = Duration::from_secs(30);
/// The message of a kernel that panics because it has no root file system.
const NO_ROOT: &str = "Kernel panic - not syncing: VFS";
/// Console messages of a kernel error.
const KERNEL_ERRORS: [&str; 6] =
    ["Kernel panic", "Oops:", "BUG: ", "general protection fault", "kernel BUG at", "soft lockup"];

/// How the guest's instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// By the CPU itself, with hardware virtualization.
    Kvm,
    /// In qemu's emulator, at least ten times slower.
    Tcg,
}

impl Accelerator {
    const fn arguments(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // With one thread per virtual CPU, a CPU may forever run the old version of code that another CPU has
            // patched: seen once in many hours, when the kernel enabled a static branch (qemu 7.2,
            // `__inet_stream_connect` of Linux 6.1).
            Self::Tcg => ["-accel", "tcg,thread=single", "-cpu", "max"],
        }
    }

    /// Number of guests that run at once: an emulated one uses one CPU of this machine.
    pub(super) fn guests_at_once(self) -> usize {
        match self {
            Self::Kvm => 1,
            Self::Tcg => cpus(),
        }
    }

    /// Factor for time limits, compared with a real machine.
    pub(super) const fn patience(self) -> u32 {
        match self {
            Self::Kvm => 2,
            Self::Tcg => 20,
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "with KVM",
            Self::Tcg => "emulated (KVM does not boot an ordinary guest on this machine)",
        })
    }
}

fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Finds the accelerator by booting a guest with KVM: `/dev/kvm` may exist and still be unable to run an ordinary
/// guest.
pub(crate) fn accelerator(kernel: &Kernel) -> anyhow::Result<Accelerator> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(Accelerator::Tcg);
    }
    let console = folder(&kernel.release)?.join("kvm-probe.log");
    remove_old(&console)?;
    let mut command = Command::new(PROGRAM);
    configure(&mut command, kernel, Accelerator::Kvm, &console, "", None);
    let mut guest = start(command)?;
    let start = Instant::now();
    while start.elapsed() < PROBE && guest.is_running()? {
        sleep(Duration::from_millis(100));
    }
    drop(guest);
    let boots = fs::read(&console).is_ok_and(|text| String::from_utf8_lossy(&text).contains(NO_ROOT));
    Ok(if boots { Accelerator::Kvm } else { Accelerator::Tcg })
}

/// Removes the output of an earlier boot.
fn remove_old(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Adds the arguments of every guest.
pub(crate) fn configure(
    command: &mut Command,
    kernel: &Kernel,
    accelerator: Accelerator,
    console: &Path,
    parameters: &str,
    image: Option<&Path>,
) {
    let cpus = cpus().min(4).to_string();
    command.args(accelerator.arguments()).args(["-smp", &cpus, "-m", MEMORY]);
    // A panic reboots, and a reboot ends qemu.
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.arg("-kernel").arg(&kernel.image);
    command.args(["-append", &format!("console=ttyS0 panic=-1 oops=panic loglevel=5 {parameters}")]);
    command.arg("-serial").arg(format!("file:{}", console.display()));
    if let Some(image) = image {
        command.arg("-initrd").arg(image);
    }
}

/// Starts qemu, which ends when the returned value is dropped.
pub(crate) fn start(mut command: Command) -> anyhow::Result<Daemon> {
    Daemon::start(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// The result of a boot.
pub(super) struct Outcome {
    records: Vec<Record>,
    /// File with the console's output.
    console: PathBuf,
    hung: bool,
}

/// Boots the kernel with the image, and with network cards if there are `wires` for them, and waits until the guest
/// ends or hangs. Calls `show` with each new record.
pub(super) fn boot(
    kernel: &Kernel,
    image: &Path,
    folder: &Path,
    accelerator: Accelerator,
    wires: Option<&Wires>,
    show: impl Fn(&Record),
) -> anyhow::Result<Outcome> {
    let (console, channel) = (folder.join("console.log"), folder.join("report.jsonl"));
    // The kernel passes unknown parameters to process 1 as environment variables, and those after `--` as arguments.
    let init = format!("PATH=/usr/sbin:/usr/bin -- vm-guest --patience {}", accelerator.patience());
    let mut command = wires.map_or_else(|| Command::new(PROGRAM), |wires| wires.command(PROGRAM));
    configure(&mut command, kernel, accelerator, &console, &init, Some(image));
    if wires.is_some() {
        command.args(wire::arguments());
    }
    [&console, &channel].into_iter().try_for_each(|path| remove_old(path))?;
    command.arg("-serial").arg(format!("file:{}", channel.display()));
    let mut guest = start(command)?;
    let (mut shown, mut last, mut size) = (0, Instant::now(), 0);
    loop {
        let ended = !guest.is_running()?;
        let now = fs::metadata(&channel).map_or(0, |file| file.len());
        if now != size {
            (last, size) = (Instant::now(), now);
        }
        let records = if channel.exists() { Report::read(&channel)? } else { Vec::new() };
        records.iter().skip(shown).for_each(&show);
        shown = records.len();
        let hung = last.elapsed() > SILENCE;
        if ended || hung {
            return Ok(Outcome { records, console, hung });
        }
        sleep(Duration::from_millis(500));
    }
}

impl Outcome {
    /// The report if the guest ended properly, else an error with the end of its console output.
    pub(super) fn judge(self) -> anyhow::Result<Report> {
        let text =
            fs::read(&self.console).with_context(|| format!("cannot read {}", self.console.display()))?;
        let text = String::from_utf8_lossy(&text);
        if self.hung {
            bail!("the guest hangs: no output for {} s\n{}", SILENCE.as_secs(), end_of(&text));
        }
        if let Some(line) = kernel_error(&text) {
            bail!("the kernel reported an error: {line}\n{}", end_of(&text));
        }
        Report::new(self.records).with_context(|| format!("end of the console output:\n{}", end_of(&text)))
    }
}

fn kernel_error(console: &str) -> Option<&str> {
    console.lines().find(|line| KERNEL_ERRORS.iter().any(|sign| line.contains(sign)))
}

fn end_of(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error about a guest that ended with this console output.
    fn error(name: &str, console: &str, hung: bool) -> String {
        let path = std::env::temp_dir().join(format!("lb-xtask-console-{}-{name}", std::process::id()));
        fs::write(&path, console).unwrap();
        let result = Outcome { records: Vec::new(), console: path.clone(), hung }.judge();
        fs::remove_file(path).unwrap();
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn panics_hangs_and_incomplete_reports_are_distinguished() {
        let panic = "[ 1.0] Kernel panic - not syncing: Attempted to kill init!";
        assert!(error("panic", panic, false).contains("reported an error: [ 1.0] Kernel panic"));
        assert!(error("hang", "quiet", true).starts_with("the guest hangs"));
        let end = error("end", "last words", false);
        assert!(end.contains("closing line is missing") && end.contains("last words"), "{end}");
    }
}
