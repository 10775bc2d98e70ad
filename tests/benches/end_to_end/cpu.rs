//! CPU time of the machine and its processes, and the CPUs that threads are pinned to.

use std::{
    fs, io,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

/// The CPUs that the threads of clients and servers are pinned to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpus {
    pub(crate) client: usize,
    pub(crate) server: usize,
}

impl Cpus {
    /// Chooses the last CPU that this process may use, for both clients and servers. With `apart`, servers get the last
    /// but one of these CPUs, if this process may use more than one.
    pub(crate) fn choose(apart: bool) -> io::Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0))?;
        let is_allowed = |cpu: &usize| allowed.is_set(*cpu).unwrap_or(false);
        let mut cpus = (0..CpuSet::count()).rev().filter(is_allowed);
        let client = cpus.next().unwrap_or(0);
        let server = cpus.next().filter(|_| apart).unwrap_or(client);
        Ok(Self { client, server })
    }

    /// Whether clients and servers share a CPU.
    pub(crate) const fn is_one(self) -> bool {
        self.client == self.server
    }
}

/// Pins this thread to a CPU and gives it the real-time policy `SCHED_FIFO`, so that it has priority over all threads
/// with ordinary policies.
pub(crate) fn claim(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set)?;
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel only reads the structure, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    nix::Error::result(result)?;
    Ok(())
}

/// Duration of a fixed calculation in registers, which shows the machine's present speed: the shortest of three runs.
fn probe() -> Duration {
    const STEPS: u32 = 300_000;
    let once = |seed: u64| {
        let start = Instant::now();
        let mut state = seed | 1;
        for _ in 0..STEPS {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
        }
        std::hint::black_box(state);
        start.elapsed()
    };
    (1..=3).map(once).min().unwrap_or_default()
}

/// CPU time of this process and of the kernel's work for it.
///
/// The kernel receives packets on a veth in the sender's context: in a soft interrupt on top of the system call, so
/// that the time counts for the sending thread. The kernel leaves the rest of a long soft interrupt to `ksoftirqd`,
/// whose time the meter adds.
pub(crate) struct Meter {
    probe: Duration,
    start: Instant,
    process: Duration,
    softirqd: Duration,
    machine: Duration,
}

/// Wall-clock and CPU time between the start and the end of a [`Meter`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Wall-clock time of the measurement.
    pub(crate) wall: Duration,
    /// CPU time of this process and of the `ksoftirqd` threads.
    pub(crate) cpu: Duration,
    /// CPU time of the whole machine, in steps of 10 ms.
    pub(crate) machine: Duration,
    /// Duration of the fixed calculation on this CPU: the mean of runs before and after the measurement.
    pub(crate) probe: Duration,
}

impl Meter {
    pub(crate) fn start() -> io::Result<Self> {
        let probe = probe();
        let (softirqd, machine, process) = (softirqd()?, machine()?, process()?);
        Ok(Self { probe, softirqd, machine, process, start: Instant::now() })
    }

    /// Ends the measurement; returns what was used since its start.
    pub(crate) fn stop(&self) -> io::Result<Usage> {
        let wall = self.start.elapsed();
        let process = process()?.saturating_sub(self.process);
        let machine = machine()?.saturating_sub(self.machine);
        let softirqd = softirqd()?.saturating_sub(self.softirqd);
        Ok(Usage { wall, cpu: process + softirqd, machine, probe: (self.probe + probe()) / 2 })
    }
}

fn process() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// CPU time of all threads `ksoftirqd/N`.
fn softirqd() -> io::Result<Duration> {
    let mut nanoseconds = 0;
    for pid in softirqd_pids() {
        let text = fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
        nanoseconds += text.split(' ').next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(nanoseconds))
}

fn softirqd_pids() -> &'static [u32] {
    static PIDS: std::sync::OnceLock<Vec<u32>> = std::sync::OnceLock::new();
    PIDS.get_or_init(|| {
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_softirqd = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("ksoftirqd/"))
        };
        pids.filter(is_softirqd).collect()
    })
}

/// Busy time of all CPUs: user, nice, system, irq, softirq and steal, without idle and iowait.
fn machine() -> io::Result<Duration> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().unwrap_or_default();
    let fields: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6, 7].into_iter().filter_map(|index| fields.get(index)).sum::<u64>();
    // The unit is `USER_HZ`, which is 100 on all supported architectures.
    Ok(Duration::from_millis(busy * 10))
}
