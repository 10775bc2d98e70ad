//! The clock of the programs, for tests of what depends on the time.

use lb_common::conntrack::Tick;
use nix::time::{ClockId, clock_gettime};

/// The tick that programs note in entries now: they read this clock, too, which moves with the kernel's timer only.
pub(crate) fn tick() -> Tick {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).unwrap();
    let [seconds, nanos] = [now.tv_sec(), now.tv_nsec()].map(|part| u64::try_from(part).unwrap());
    Tick::from_nanos(seconds * 1_000_000_000 + nanos)
}

/// Does `attempt` until one began and ended in the same tick, so that all programs in it took flows to be equally old.
pub(crate) fn within_a_tick<T>(mut attempt: impl FnMut() -> T) -> T {
    for _ in 0..20 {
        let began = tick();
        let done = attempt();
        if tick() == began {
            return done;
        }
    }
    panic!("no attempt of 20 fits into a tick, which is more than a second");
}
