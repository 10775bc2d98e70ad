//! Flows: their entries, the choice of a backend, and the affinity and counters that go with them.

pub(crate) mod active_flows;
pub(crate) mod affinity;
pub(crate) mod choose;
mod claim;
pub(crate) mod conntrack;
pub(crate) mod create;
mod entry;
mod flow_log;
pub(crate) mod masquerade;
pub(crate) mod new;
pub(crate) mod of_node;
pub(crate) mod table;
