//! CPU time of a function.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// CPU time of this thread in `work`, in the kernel and outside it. Waiting for a busy CPU does not count.
pub(crate) fn cpu_time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_time();
    let result = work();
    (result, thread_time() - before)
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}
