//! Measures how often and how long BPF programs run. The kernel counts both while a [`RunTime`] exists
//! (`BPF_ENABLE_STATS`).

use std::{collections::BTreeMap, os::fd::OwnedFd, time::Duration};

use aya::sys::{Stats, enable_stats};

use crate::{error::DatapathError, inspect::pinned::ProgramStatus};

/// Makes the kernel count runs and run time of BPF programs as long as this value exists, at most until the process
/// ends. Counting adds about 20 ns to each run of a program.
#[derive(Debug)]
pub struct RunTime {
    _counting: OwnedFd,
}

impl RunTime {
    /// Starts counting.
    ///
    /// # Errors
    /// The kernel refuses, or is older than 5.8.
    pub fn count() -> Result<Self, DatapathError> {
        let counting = enable_stats(Stats::RunTime)
            .map_err(|error| DatapathError::RunTime { source: error.io_error })?;
        Ok(Self { _counting: counting })
    }
}

/// How often and how long a program ran between two samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Name of the program.
    pub name: String,
    /// The kernel's id of the program.
    pub id: u32,
    /// Number of runs of the program.
    pub runs: u64,
    /// Time that the runs took, summed over all CPUs.
    pub time: Duration,
}

/// The work of each program between two samples, busiest first. Programs that were unloaded meanwhile are left out.
pub fn work(before: &[ProgramStatus], after: &[ProgramStatus]) -> Vec<Work> {
    let before: BTreeMap<u32, &ProgramStatus> = before.iter().map(|program| (program.id, program)).collect();
    let of = |program: &ProgramStatus| {
        let (runs, time) = before.get(&program.id).map_or((0, Duration::ZERO), |b| (b.run_count, b.run_time));
        Work {
            name: program.name.clone(),
            id: program.id,
            runs: program.run_count.saturating_sub(runs),
            time: program.run_time.saturating_sub(time),
        }
    };
    let mut work: Vec<Work> = after.iter().map(of).collect();
    work.sort_by(|a, b| b.time.cmp(&a.time).then_with(|| a.name.cmp(&b.name)).then(a.id.cmp(&b.id)));
    work
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(id: u32, runs: u64, micros: u64) -> ProgramStatus {
        ProgramStatus {
            name: format!("program{id}"),
            id,
            tag: 0,
            loaded_at: None,
            run_count: runs,
            run_time: Duration::from_micros(micros),
        }
    }

    #[test]
    fn work_is_the_difference_with_the_busiest_program_first() {
        let before = [program(1, 100, 50), program(2, 7, 7), program(3, 9, 9)];
        let after = [program(1, 110, 51), program(2, 7, 7), program(4, 3, 30)];
        let done: Vec<_> = work(&before, &after).iter().map(|w| (w.id, w.runs, w.time.as_micros())).collect();
        assert_eq!(done, [(4, 3, 30), (1, 10, 1), (2, 0, 0)], "3 is gone, 4 is new");
    }
}
