//! The counters of outcomes.

use lb_common::Outcome;

use super::{maps::STATS, words};

/// Counts a packet with this outcome.
#[inline(always)]
pub(crate) fn count(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the pointer leads to an array element for this CPU, which lives as long as the program runs. Programs
        // on packets run with bottom halves disabled, so none of them can interrupt this one.
        unsafe { *counter += 1 };
    }
}

/// Counts a system call with this outcome. A program on a packet may interrupt the caller on the same CPU.
#[inline(always)]
pub(crate) fn count_preempted(outcome: Outcome) {
    if let Some(counter) = STATS.get_ptr_mut(outcome as u32) {
        // SAFETY: the pointer leads to an array element, which lives as long as the program runs. Other writers run on
        // this CPU, and cannot interrupt a single instruction.
        unsafe { words::add(counter, 1) };
    }
}
