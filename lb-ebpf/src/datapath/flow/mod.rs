//! Flows: the entries of `CONNTRACK`, their creation, and the affinity and counters that go with them.

pub(crate) mod active_flows;
pub(crate) mod affinity;
mod claim;
pub(crate) mod conntrack;
pub(crate) mod create;
pub(crate) mod masquerade;
pub(crate) mod new;
