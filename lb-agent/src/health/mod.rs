//! Health checks, compatible with kube-proxy (`pkg/proxy/healthcheck`).
//!
//! `/healthz` and `/livez` ([`router`]) answer for the agent by the rule of [`Freshness`]: an agent is unhealthy if changes wait too
//! long. Each Service with a `healthCheckNodePort` has a server that tells load balancers whether this node has endpoints of it
//! ([`Servers`]).

mod answer;
mod freshness;
mod listen;
mod proxy;
mod servers;

pub use self::{
    freshness::{Freshness, Health, Moment},
    proxy::router,
    servers::{Checks, Report, ReportFailure, Servers},
};
