//! Health checks of endpoints (`lb.dev/health-check`): sends the probes that [`lb_core::probe`] schedules, and hands
//! the verdicts to the writer. `docs/health-checks.md` describes them.
//!
//! ```text
//! writer ──targets and their Services──▶ Prober ──endpoints that are (un)healthy──▶ writer
//!                                         ├ probes: tcp, http, grpc, dns
//!                                         └ memory: unhealthy targets, for the next agent
//! ```
//!
//! The servers of `healthCheckNodePort` are in [`health`](crate::health).

mod board;
mod dns;
mod grpc;
mod http;
mod memory;
mod prober;
mod send;
mod tls;

pub use self::board::{Board, CheckReport, EndpointReport, PassingReport};
pub(crate) use self::{
    memory::Remembered,
    prober::{Observers, Prober, Targets},
};
