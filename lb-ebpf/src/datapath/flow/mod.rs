//! Flows: the entries of `CONNTRACK`, and what belongs to a flow beside them.

pub(crate) mod active_flows;
pub(crate) mod affinity;
pub(crate) mod conntrack;
pub(crate) mod create;
pub(crate) mod masquerade;
pub(crate) mod new;
