//! The clock of the programs, for tests that depend on the time.

use std::{thread::sleep, time::Duration};

use lb_common::conntrack::Tick;
use nix::libc;

/// The current tick, as programs write it to entries.
///
/// Read by a system call, because the vDSO's copy of this clock may lag behind the kernel's at the boundary of a tick.
/// The result would then differ from the tick of a program that runs at the same time.
pub(crate) fn tick() -> Tick {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to `now`, which outlives the call.
    let result =
        unsafe { libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let [seconds, nanos] = [now.tv_sec, now.tv_nsec].map(|part| u64::try_from(part).unwrap());
    Tick::from_nanos(seconds * 1_000_000_000 + nanos)
}

/// Repeats `attempt`, at most 20 times, until it begins and ends in the same tick: all programs that it runs then read
/// the same tick.
/// Each further attempt begins right after the boundary of a tick, so it has the whole tick: 1.07 s.
pub(crate) fn within_a_tick<T>(mut attempt: impl FnMut() -> T) -> T {
    for _ in 0..20 {
        let began = tick();
        let done = attempt();
        let ended = tick();
        if ended == began {
            return done;
        }
        while tick() == ended {
            sleep(Duration::from_millis(1));
        }
    }
    panic!("no attempt of 20 fits into a tick, which is more than a second");
}
