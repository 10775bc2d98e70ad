//! The DNS server of the agent. [`lb_core::dns`] knows the names of Services; this crate encodes messages, answers over
//! UDP and TCP, and asks upstream servers for all other names.
//!
//! ```text
//! bytes → query::read → local::answer → message::encode → bytes
//!                            └ other names → Forwarder (cache, upstream servers)
//! ```
#![forbid(unsafe_code)]

mod cache;
mod clients;
mod forward;
mod local;
mod message;
mod names;
mod query;
mod resolv;
mod respond;
mod server;
mod servers;
mod stats;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;
mod upstream;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::{
    clients::Access,
    forward::{Forwarder, MOST_QUESTIONS},
    names::Names,
    resolv::upstreams_of,
    respond::respond,
    server::{BindError, Server},
    servers::Servers,
    stats::Stats,
    upstream::{ServerCode, response_code},
};

/// Locks, also after a panic of another thread: every change that a lock guards is complete or harmless.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
