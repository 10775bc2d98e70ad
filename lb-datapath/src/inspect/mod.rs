//! The pinned data plane and the kernel as commands read them, without a lock.

pub(crate) mod check;
pub(crate) mod objects;
pub(crate) mod pinned;
pub(crate) mod program_view;
pub(crate) mod run_time;
