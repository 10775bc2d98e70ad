//! The CPU time and the memory that a process has used.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::unistd::{SysconfVar, sysconf};
use serde::Serialize;

use super::machine::kibibytes;

/// Resident memory of a process in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Resident {
    /// Resident memory now, in bytes.
    pub now: u64,
    /// Greatest resident memory so far, in bytes.
    pub peak: u64,
}

impl Resident {
    /// Reads the resident memory of a process from `/proc`.
    pub fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("reading the memory of process {pid}"))?;
        Ok(Self { now: kibibytes(&status, "VmRSS")?, peak: kibibytes(&status, "VmHWM")? })
    }
}

/// CPU time that all threads of a process have used, in user space and in the kernel.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("reading the CPU time of process {pid}"))?;
    let ticks = ticks(&stat).with_context(|| format!("/proc/{pid}/stat has no CPU time: {stat}"))?;
    let per_second =
        sysconf(SysconfVar::CLK_TCK)?.context("the kernel does not tell its ticks per second")?;
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// The sum of `utime` and `stime` in the text of `/proc/PID/stat`. The program's name may have spaces and brackets.
fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11).map(|field| field.parse::<u64>().ok());
    Some(fields.next()?? + fields.next()??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_behind_the_name() {
        let stat = "7 (a) (b) S 1 7 7 0 -1 4194560 1 2 3 4 11 31 5 6 20 0 4 0 9 8 7";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (a) S 1"), None);
    }

    #[test]
    fn busy_process_uses_cpu_time() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        while cpu_time(pid).unwrap() < before + Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        assert!(Resident::of(pid).unwrap().now > 0);
    }
}
