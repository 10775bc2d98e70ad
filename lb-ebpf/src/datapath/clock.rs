//! The clock of the data plane.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns};
use lb_common::conntrack::Tick;

/// The time as last read: the number of the timer interrupt in the upper 32 bits, the tick in the lower 32 bits.
static mut CLOCK: u64 = 0;

/// The current tick. The kernel's coarse time changes only at timer interrupts, so the programs read it once after each
/// interrupt, which they notice by the changed jiffies. `bpf_jiffies64` is a load, not a call: the verifier inlines it.
#[inline(always)]
pub(crate) fn now() -> Tick {
    // SAFETY: the helper takes nothing and only returns a number.
    let interrupts = unsafe { bpf_jiffies64() } << 32;
    // SAFETY: one volatile load of an aligned `u64`, which is never torn. Any value that some CPU has stored is right
    // for its interrupt.
    let clock = unsafe { (&raw const CLOCK).read_volatile() };
    if clock & (u64::MAX << 32) == interrupts { Tick(clock as u32) } else { read_clock(interrupts) }
}

#[inline(never)]
fn read_clock(interrupts: u64) -> Tick {
    // SAFETY: the helper takes nothing and only returns a number.
    let now = Tick::from_nanos(unsafe { bpf_ktime_get_coarse_ns() });
    // SAFETY: one volatile store of an aligned `u64`, which is never torn. If another CPU overwrites the value, the
    // next packet reads the clock again.
    unsafe { (&raw mut CLOCK).write_volatile(interrupts | u64::from(now.0)) };
    now
}
