//! Waiting until no running program can look at a record any more that was replaced before.

use crate::{bpf::sys, error::DatapathError};

/// Returns after a grace period: every BPF program that ran when this was called has ended, so slots of `BACKENDS`
/// released before may be written again. Blocks for some 10 ms; from async code use `spawn_blocking`.
///
/// This is what the kernel promises after an update of a map of maps. `membarrier(MEMBARRIER_CMD_GLOBAL)` also waits,
/// but does nothing on a machine with one CPU and is refused on those with `nohz_full` CPUs.
pub fn wait() -> Result<(), DatapathError> {
    sys::wait_for_programs().map_err(DatapathError::Grace)
}
