//! Health checks of endpoints: what to probe, when, and what the results mean. The agent sends the probes.
//!
//! ```text
//! Service + slices → Targets ──▶ Monitor: schedule, thresholds → verdicts ──▶ Reconciler: endpoints for new flows
//!                                   ▲ agent: probes → results ┘
//! ```
//!
//! `healthCheckNodePort`, by which load balancers check this node, is something else: see
//! [`health_checks`](crate::health_checks).

pub mod check;
pub mod failure;
pub mod monitor;
mod shares;
pub mod target;
mod targets;

pub(crate) use self::targets::Targets;
pub use self::{
    check::{Check, Kind, Timing},
    failure::{Failure, Reason},
    monitor::{EndpointHealth, Memory, Monitor, State},
    target::Target,
};
