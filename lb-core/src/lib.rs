//! The pure control plane: the wanted objects, the desired kernel state, and the ordered steps from the present kernel
//! state to the desired one.
//!
//! ```text
//! source → Store → desired() → plan() → [Step] → Kernel state
//! ```
//!
//! This crate does no IO, reads no clock and uses no randomness: it depends on neither tokio nor aya nor the kube
//! client, so its tests need no privileges.
#![forbid(unsafe_code)]

pub mod active_flow_slots;
mod adopt;
pub mod allocate;
pub mod announce;
pub mod api;
pub mod arena;
pub mod capacity;
mod claims;
pub mod compact;
pub mod connection_rules;
pub mod convert;
pub mod desired;
pub mod dns;
pub mod earlier_flows;
pub mod endpoint_key;
pub mod environment;
pub mod family;
pub mod fnv;
pub mod health_checks;
mod ids;
mod ip;
mod kubelet_probes;
mod last_good;
pub mod lease;
pub mod listing;
pub mod load_balancer;
mod mirror;
pub mod model;
pub mod north_south;
mod per_address;
pub mod plan;
pub mod probe;
pub mod protocol;
pub mod reconciler;
mod records;
pub mod rules;
mod slices;
pub mod slow_start;
pub mod stale_udp;
pub mod store;
pub mod strings;
pub mod tables;
pub mod traffic;
