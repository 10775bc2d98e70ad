//! What it ran on.

use std::{fs, thread};

use anyhow::Context as _;
use serde::Serialize;

/// The machine and its kernel.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    /// Model of the first CPU.
    pub(crate) cpu: String,
    /// Number of CPUs.
    pub(crate) cpus: usize,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Load of the last minute when the benchmark began; anything near the number of CPUs disturbs the figures.
    pub(crate) load_before: f64,
}

impl Machine {
    /// This machine.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let cpu = field(&read("/proc/cpuinfo")?, "model name");
        Ok(Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: thread::available_parallelism()?.get(),
            memory: kibibytes(&read("/proc/meminfo")?, "MemTotal")?,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            load_before: load()?,
        })
    }
}

/// Processes that ran or wanted to, on average over the last minute.
pub(crate) fn load() -> anyhow::Result<f64> {
    let text = read("/proc/loadavg")?;
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().with_context(|| format!("the load in /proc/loadavg: {text}"))
}

/// The value of a line `NAME: N kB`, in bytes.
pub(crate) fn kibibytes(text: &str, name: &str) -> anyhow::Result<u64> {
    let value = field(text, name).with_context(|| format!("{name} is missing"))?;
    let number = value.trim_end_matches("kB").trim();
    Ok(1024 * number.parse::<u64>().with_context(|| format!("{name} is {value}"))?)
}

/// The value of a line `NAME: VALUE`.
pub(crate) fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim().to_owned())
}

fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {path}"))
}
