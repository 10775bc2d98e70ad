//! Settings of the heap.

/// Makes all threads share one heap. glibc gives each thread its own heap. Memory that one thread allocates and another
/// frees then leaves holes: with 10,000 Services a quarter of the agent's memory. No hot path of the agent allocates.
#[cfg(target_env = "gnu")]
pub(super) fn use_one_heap() {
    // SAFETY: mallopt may be called at any time; it ignores invalid values.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns free memory of the heap to the kernel. Call it after a plan of all Services, which needs more memory than
/// any other plan.
#[cfg(target_env = "gnu")]
pub(super) fn return_unused() {
    // SAFETY: malloc_trim may be called at any time.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries return free memory by themselves.
#[cfg(not(target_env = "gnu"))]
pub(super) fn return_unused() {}

/// Does nothing: other C libraries always have one heap for all threads.
#[cfg(not(target_env = "gnu"))]
pub(super) fn use_one_heap() {}
