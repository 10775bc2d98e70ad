//! The counters of outcomes.

use core::arch::asm;

use lb_common::Outcome;

use super::maps::STATS;

/// Counts a packet with this outcome.
#[inline(always)]
pub(crate) fn count(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the pointer is that of an array element for this CPU, which lives as long as the program runs.
        // Programs on packets run with bottom halves disabled, so none can interrupt this one here.
        unsafe { *counter += 1 };
    }
}

/// Counts a system call with this outcome. A program on a packet may interrupt it on the same CPU.
#[inline(always)]
pub(crate) fn count_preempted(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs. Other writers run
        // on this CPU, and cannot interrupt a single instruction.
        unsafe { add_one(counter) };
    }
}

/// Counts in one step. (The target has no `AtomicU64::fetch_add`.)
///
/// # Safety
///
/// The counter is a value of a map that lives as long as the program runs.
#[inline(always)]
pub(crate) unsafe fn add_one(counter: *mut u64) {
    // SAFETY: the caller guarantees that `counter` is a live, aligned map value.
    unsafe {
        asm!("lock *(u64 *)({counter} + 0) += {one}", counter = in(reg) counter, one = in(reg) 1_u64, options(nostack));
    }
}
