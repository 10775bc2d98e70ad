//! Counting.

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
