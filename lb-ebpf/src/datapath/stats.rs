//! Counting.

use core::arch::asm;

use lb_common::Outcome;

use super::maps::STATS;

/// Counts a packet with this outcome.
#[inline(always)]
pub(crate) fn count(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the slot is of this CPU alone and programs on one hook do not nest on a CPU; the map is never freed
        // while a program runs.
        unsafe { *counter += 1 };
    }
}

/// Counts a system call with this outcome. Programs on packets may interrupt the one that does, on the same CPU.
#[inline(always)]
pub(crate) fn count_preempted(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the slot is never freed while a program runs; all others that write it do so on this CPU, and none of
        // them can come between the halves of one instruction.
        unsafe { add_one(counter) };
    }
}

/// Counts in one step. (The target has no `AtomicU64::fetch_add`.)
///
/// # Safety
///
/// The counter is a value of a map that lives as long as the program runs.
#[inline(always)]
pub(super) unsafe fn add_one(counter: *mut u64) {
    // SAFETY: as above.
    unsafe {
        asm!("lock *(u64 *)({counter} + 0) += {one}", counter = in(reg) counter, one = in(reg) 1_u64, options(nostack));
    }
}
