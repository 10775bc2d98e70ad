//! Who may rely on this node, in the words of kube-proxy (`pkg/proxy/healthcheck`).
//!
//! `/healthz` and `/livez` speak about the agent ([`router`]), by the rule of [`Freshness`]: unhealthy is who has
//! changes that wait for long. A Service with a `healthCheckNodePort` has a server of its own, which tells load balancers
//! whether this node has endpoints of it ([`Servers`]).

mod answer;
mod freshness;
mod listen;
mod proxy;
mod servers;

pub use self::{
    freshness::{Freshness, Health, Moment},
    proxy::router,
    servers::{Checks, Report, Servers, TellFailure},
};
