//! Waits until no running program can read a record that was replaced before the wait.

use crate::{bpf::sys, error::DatapathError};

/// Returns after a grace period: every BPF program that was running at the call has finished, so the caller may reuse
/// what it made unreachable for programs before the call, such as slots of `BACKENDS` and `TABLES`. Blocks for about
/// 10 ms; from async code use `spawn_blocking`.
///
/// The kernel guarantees this after an update of a map of maps. `membarrier(MEMBARRIER_CMD_GLOBAL)` also waits, but
/// does nothing on a machine with one CPU and fails on machines with `nohz_full` CPUs.
pub fn wait() -> Result<(), DatapathError> {
    sys::wait_for_programs().map_err(|source| DatapathError::Grace { source })
}
