//! A BPF program that this process has loaded.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use crate::bpf::layout::PROGRAMS;

/// One loaded program. The kernel keeps the program at least as long as this value exists.
#[derive(Debug)]
pub(crate) struct LoadedProgram {
    pub(crate) name: &'static str,
    pub(crate) id: u32,
    pub(crate) fd: OwnedFd,
}

impl LoadedProgram {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The loaded programs, in the order of [`PROGRAMS`].
pub(crate) type Programs = [LoadedProgram; PROGRAMS.len()];
