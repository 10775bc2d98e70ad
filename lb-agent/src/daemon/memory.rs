//! Settings of the memory allocator.

/// Makes all threads share one heap. By default glibc spreads threads over several heaps, and memory that one thread
/// allocates and another frees leaves holes in these heaps.
#[cfg(target_env = "gnu")]
pub(super) fn use_one_heap() {
    // SAFETY: mallopt takes no pointers and ignores invalid values. `run` calls it before it starts threads.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns free memory of the heap to the kernel. Call it after a plan of all Services, which needs more memory than
/// any other plan.
#[cfg(target_env = "gnu")]
pub(super) fn return_unused() {
    // SAFETY: malloc_trim takes no pointers, frees only unused memory, and is thread-safe.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: `malloc_trim` is a function of glibc.
#[cfg(not(target_env = "gnu"))]
pub(super) fn return_unused() {}

/// Does nothing: `M_ARENA_MAX` is an option of glibc.
#[cfg(not(target_env = "gnu"))]
pub(super) fn use_one_heap() {}
