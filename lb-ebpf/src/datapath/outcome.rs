//! Functions that return early with an outcome.

use lb_common::Outcome;

/// Runs the body of a subprogram in which an early return has an outcome as well. (A subprogram returns one register,
/// and `Result<Outcome, Outcome>` is two. Not for functions that are inlined in several places: the closure would
/// stay a subprogram of its own.)
#[inline(always)]
pub(super) fn outcome_of(body: impl FnOnce() -> Result<Outcome, Outcome>) -> Outcome {
    either(body())
}

/// The outcome, early or not.
#[inline(always)]
pub(super) fn either(result: Result<Outcome, Outcome>) -> Outcome {
    result.unwrap_or_else(|early| early)
}
