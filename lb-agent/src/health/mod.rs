//! Who may rely on this node, in the words of kube-proxy (`pkg/proxy/healthcheck`).
//!
//! `/healthz` and `/livez` speak about the agent ([`proxy`]), by the rule of [`freshness`]: unhealthy is who has changes
//! that wait for long. A Service with a `healthCheckNodePort` has a server of its own that tells load balancers
//! whether it has endpoints on this node ([`servers`]).

mod freshness;
mod proxy;

pub use self::{
    freshness::{Freshness, Health, Moment},
    proxy::router,
};
