//! The pure control plane: what the user wants, what the kernel should hold, and the ordered steps from the kernel's
//! present contents to that.
//!
//! ```text
//! source → Store → desired() → plan() → [Step] → Kernel state
//! ```
//!
//! This crate does no IO, reads no clock and uses no randomness: it depends on neither tokio nor aya nor the kube
//! client, so every property is tested without privileges.
#![forbid(unsafe_code)]

mod adopt;
pub mod allocate;
pub mod api;
pub mod arena;
pub mod capacity;
mod claims;
pub mod convert;
pub mod counters;
pub mod desired;
pub mod family;
pub mod health_checks;
mod ids;
mod ip;
mod last_good;
pub mod layout;
mod mirror;
pub mod model;
pub mod north_south;
mod per_address;
pub mod plan;
pub mod protocol;
pub mod reconciler;
mod records;
pub mod rules;
mod slices;
pub mod stale_udp;
pub mod store;
pub mod tables;
pub mod traffic;
