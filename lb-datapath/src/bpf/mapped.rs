//! Maps into the agent's memory those arrays that both the programs and the agent change.

use std::{
    io,
    os::fd::BorrowedFd,
    ptr, slice,
    sync::atomic::{AtomicI64, AtomicU64},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// An atomic integer type, which any thread may change.
pub(crate) trait Atomic: Sync {}

impl Atomic for AtomicI64 {}
impl Atomic for AtomicU64 {}

/// The values of an array map, mapped into this process's memory as atomic integers.
#[derive(Debug)]
pub(crate) struct Mapped<T> {
    start: ptr::NonNull<T>,
    length: usize,
}

// SAFETY: only atomic integers are in this memory, and any thread may use those.
unsafe impl<T: Atomic> Send for Mapped<T> {}
// SAFETY: only atomic integers are in this memory, and any thread may use those.
unsafe impl<T: Atomic> Sync for Mapped<T> {}

impl<T: Atomic> Mapped<T> {
    /// Maps the first `length` integers of an array map's values.
    pub(crate) fn new(map: BorrowedFd<'_>, length: usize) -> io::Result<Self> {
        const { assert!(size_of::<T>() == 8) };
        let bytes = length * size_of::<T>();
        let (access, sharing) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, sharing, map, 0) }?;
        let start =
            ptr::NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapped = Self { start, length };
        // Keeps a fork from copying the page tables of this memory (up to 512 MB of flows), which the child never
        // reads. Ignores an error: it only makes forks slower, and only the tests fork.
        // SAFETY: this changes nothing in this process. A child lacks the mapping, but never uses its copy of `Mapped`:
        // it only executes another program.
        unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxDontFork) }.unwrap_or_default();
        Ok(mapped)
    }

    /// The mapped integers; index 0 is the first of the array's first element.
    pub(crate) const fn values(&self) -> &[T] {
        // SAFETY: the mapping is this long (the kernel refuses one beyond the array), page-aligned, exists as long as
        // `self`, and is changed by atomic operations only.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let bytes = self.length * size_of::<T>();
        // SAFETY: this is the range that `new` has mapped, and no reference into it is left. `munmap` fails only for
        // another range, so there is no error to handle.
        unsafe { munmap(self.start.as_ptr().cast(), bytes) }.unwrap_or_default();
    }
}
