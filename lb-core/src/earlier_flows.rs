//! What the flows and sockets of an earlier run of the agent refer to.

use std::collections::BTreeMap;

use crate::active_flow_slots::ServiceEndpoint;

/// The slots and ids that flows and sockets refer to when the agent starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EarlierFlows {
    /// The slots of the map `ACTIVE`, each with the endpoint whose flows it counts.
    pub active_flows_slots: BTreeMap<u32, ServiceEndpoint>,
    /// The highest id of a service port, which may have been deleted; 0 without any.
    pub highest_service: u32,
}
