//! The machine that a benchmark ran on.

use std::{fmt, fs, process::Command, thread};

use anyhow::Context as _;
use serde::Serialize;

/// The machine and the kernel that a benchmark ran on.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Model of the first CPU; the architecture if `/proc/cpuinfo` names no model.
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// Size of the memory in bytes.
    pub memory: u64,
    /// Release of the running kernel.
    pub kernel: String,
    /// Git commit of the working tree, with "-dirty" if files differ from the commit; "unknown" outside a repository.
    pub commit: String,
    /// Load average of the last minute, read at the start of the benchmark. A load near the number of CPUs disturbs the
    /// results.
    pub load_before: f64,
}

impl Machine {
    /// Reads the properties of this machine.
    pub fn read() -> anyhow::Result<Self> {
        let cpu = field(&read("/proc/cpuinfo")?, "model name");
        Ok(Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: thread::available_parallelism()?.get(),
            memory: kibibytes(&read("/proc/meminfo")?, "MemTotal")?,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            commit: commit().unwrap_or_else(|| "unknown".to_owned()),
            load_before: load()?,
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cpus, memory, kernel, commit, load_before } = self;
        let gigabytes = *memory as f64 / 1e9;
        write!(
            f,
            "{cpus} x {cpu}, {gigabytes:.1} GB, Linux {kernel}; commit {commit}; load {load_before} before"
        )
    }
}

/// The commit as `git describe` shows it; `None` outside a repository.
fn commit() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let output = git.current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?;
    Some(name.trim().to_owned()).filter(|name| output.status.success() && !name.is_empty())
}

/// The machine's load average of the last minute.
pub fn load() -> anyhow::Result<f64> {
    let text = read("/proc/loadavg")?;
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().with_context(|| format!("the load in /proc/loadavg: {text}"))
}

/// The value, in bytes, of a line `NAME: N kB` in the text of a file of `/proc`.
pub fn kibibytes(text: &str, name: &str) -> anyhow::Result<u64> {
    let value = field(text, name).with_context(|| format!("{name} is missing"))?;
    let number = value.trim_end_matches("kB").trim();
    Ok(1024 * number.parse::<u64>().with_context(|| format!("{name} is {value}"))?)
}

/// The value of a line `NAME: VALUE` in the text of a file of `/proc`.
pub fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim().to_owned())
}

fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {path}"))
}
