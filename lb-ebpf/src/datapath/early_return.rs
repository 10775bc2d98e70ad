//! Helpers for functions that may return early with an outcome, and results of global functions, which are numbers.

use lb_common::Outcome;

/// Runs the body of a subprogram that may return an outcome early. (A subprogram returns one register, and a
/// `Result<Outcome, Outcome>` takes two. A function that is inlined in several places must not call this function: LLVM
/// would compile the closure as a subprogram.)
#[inline(always)]
pub(super) fn outcome_of(body: impl FnOnce() -> Result<Outcome, Outcome>) -> Outcome {
    either(body())
}

/// The outcome of a body, whether it returned early or not.
#[inline(always)]
pub(super) fn either(result: Result<Outcome, Outcome>) -> Outcome {
    result.unwrap_or_else(|early| early)
}

/// What a global function that rewrites a packet returns: 1, or 0 if it failed.
#[inline(always)]
pub(super) fn number_of(result: Result<(), Outcome>) -> u32 {
    u32::from(result.is_ok())
}

/// Converts the number that a global function has returned to a result: the inverse of [`number_of`].
///
/// # Errors
///
/// Always [`Outcome::RewriteFailed`].
#[inline(always)]
pub(super) fn rewritten(number: u32) -> Result<(), Outcome> {
    if number == 0 { Err(Outcome::RewriteFailed) } else { Ok(()) }
}
