//! Services: the choice of a backend.

pub mod schedule;
