//! Health checks, compatible with kube-proxy (`pkg/proxy/healthcheck`).
//!
//! `/healthz` and `/livez` ([`router`]) report the agent's health by the rule of [`Freshness`]: an agent is alive
//! unless a change has waited for too long, and healthy if it is alive and has synchronised at least once. `/healthz`
//! also answers 503 while load balancers must not send traffic to the node. Each Service with a `healthCheckNodePort`
//! has a server where load balancers check whether this node has endpoints of the Service ([`Servers`]).

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
