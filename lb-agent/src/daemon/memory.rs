//! Keeping the agent small.

/// One heap for all threads. glibc gives each thread its own, where what one allocates and another frees leaves
/// holes: with 10,000 Services that is a quarter of the agent's memory. Nothing here allocates in a hot path.
#[cfg(target_env = "gnu")]
pub(super) fn use_one_heap() {
    // SAFETY: mallopt may be called at any time; a value it does not like it ignores.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Other C libraries have one heap anyway.
#[cfg(not(target_env = "gnu"))]
pub(super) fn use_one_heap() {}
