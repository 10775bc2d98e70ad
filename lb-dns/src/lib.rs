//! The DNS server of the agent. [`lb_core::dns`] knows the names of Services; this crate encodes messages, answers over
//! UDP and TCP, and asks upstream servers for all other names.
//!
//! ```text
//! bytes → query::read → local::answer → message::encode → bytes
//!                            └ not ours → Forwarder (cache, upstream servers)
//! ```
#![forbid(unsafe_code)]

mod cache;
mod forward;
mod local;
mod message;
mod names;
mod query;
mod resolv;
mod server;
mod stats;
#[cfg(test)]
mod tests;
mod upstream;

pub use self::{
    forward::Forwarder,
    names::Names,
    resolv::upstreams_of,
    server::{BindError, Server},
    stats::Stats,
};
