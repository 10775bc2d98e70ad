//! Ways to a backend that need headers of their own.

pub mod tunnel;
