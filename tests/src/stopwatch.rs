//! Time limits that hold on a busy machine.
//!
//! A limit like "within a second" is a claim about the program. On a machine with more runnable tasks than CPUs,
//! wall-clock time also contains the time in which tasks waited for a CPU. The kernel measures that wait (pressure
//! stall information, Documentation/accounting/psi.rst), and how long a hypervisor ran something else (steal time).
//! [`Stopwatch`] subtracts both: on an idle machine a limit is exact; on a busy machine the limit grows with the load
//! of that moment.

use std::{
    fs,
    thread::available_parallelism,
    time::{Duration, Instant},
};

/// Names of the resources that tasks wait for, below `/proc/pressure`.
const RESOURCES: [&str; 3] = ["cpu", "io", "memory"];

/// Clock ticks per second in `/proc/stat` (`USER_HZ`, proc_stat(5)).
const TICKS_PER_SECOND: u64 = 100;

/// Measures time, without the time in which tasks of this machine waited for a CPU, I/O or memory.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    start: Instant,
    /// The value of [`stalled`] at the start of the measurement.
    stalled: Duration,
}

impl Stopwatch {
    /// Starts to measure.
    pub fn start() -> Self {
        Self { start: Instant::now(), stalled: stalled() }
    }

    /// Time since the start, minus the longest time for which tasks may have waited for resources.
    pub fn elapsed(&self) -> Duration {
        self.wall().saturating_sub(self.waited())
    }

    /// The longest time for which tasks may have waited for resources since the start. More than [`Self::wall`] if
    /// tasks of several CPUs waited at the same time.
    pub fn waited(&self) -> Duration {
        stalled().saturating_sub(self.stalled)
    }

    /// Time since the start, including the time of waiting for resources.
    pub fn wall(&self) -> Duration {
        self.start.elapsed()
    }
}

/// An upper bound of the time that tasks of this machine have waited for resources since boot, summed over the CPUs.
/// Waits that the kernel does not measure are missing, for example if it has no pressure stall information.
fn stalled() -> Duration {
    let of = |resource| fs::read_to_string(format!("/proc/pressure/{resource}")).ok();
    let total: Duration = RESOURCES.into_iter().filter_map(of).filter_map(|text| some_total(&text)).sum();
    // These totals are averages over all CPUs. If tasks of only one CPU have waited, they have waited for up to the
    // total times the number of CPUs.
    let cpus = available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(1));
    let stolen = fs::read_to_string("/proc/stat").ok().and_then(|text| steal_time(&text));
    total * cpus + stolen.unwrap_or_default()
}

/// The steal time of all CPUs together, from the text of `/proc/stat`.
fn steal_time(text: &str) -> Option<Duration> {
    let all_cpus = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // User, nice, system, idle, iowait, irq, softirq, steal.
    let ticks: u64 = all_cpus.split_whitespace().nth(7)?.parse().ok()?;
    Some(Duration::from_millis(ticks * (1000 / TICKS_PER_SECOND)))
}

/// The total in the line `some` of a pressure file: microseconds in which at least one task waited.
fn some_total(text: &str) -> Option<Duration> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    let total = some.split(' ').find_map(|field| field.strip_prefix("total="))?;
    Some(Duration::from_micros(total.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_read_from_the_line_some() {
        let text = "some avg10=99.19 avg60=98.88 avg300=98.00 total=1356003430\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(some_total(text), Some(Duration::from_micros(1_356_003_430)));
        assert_eq!(some_total("full avg10=0.00 total=7\n"), None);
    }

    #[test]
    fn steal_time_is_read_for_all_cpus() {
        let text = "cpu  4615835 321273 2321739 1841967 20041 0 82588 2918 4 0\n\
                    cpu0 2179195 161513 1146073 1067239 6059 0 40572 1446 2 0\n";
        assert_eq!(steal_time(text), Some(Duration::from_millis(29_180)));
        assert_eq!(steal_time("cpu  1 2 3\n"), None);
    }

    #[test]
    fn elapsed_time_never_exceeds_wall_time() {
        let stopwatch = Stopwatch::start();
        std::thread::sleep(Duration::from_millis(20));
        assert!(stopwatch.elapsed() <= stopwatch.wall());
        assert!(stopwatch.wall() >= Duration::from_millis(20));
    }
}
