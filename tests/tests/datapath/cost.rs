//! Measures the CPU time of a function.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Runs `work`; returns its result, and its CPU time on this thread in kernel and user space. Waits do not count.
pub(crate) fn cpu_time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_time();
    let result = work();
    (result, thread_time() - before)
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}
