//! Reads the pinned data plane and the kernel for commands, without a lock.

pub(crate) mod check;
pub(crate) mod missing;
pub(crate) mod objects;
pub(crate) mod pinned;
pub(crate) mod program_view;
pub(crate) mod run_time;
