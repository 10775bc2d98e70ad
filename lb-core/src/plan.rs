//! From what the kernel holds to what it should hold: an ordered list of steps.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use lb_common::{Backend, Service, ServiceKey};

use crate::model::ServicePortName;

/// What people call an endpoint; kept in the kernel beside its address so that every command can show it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct EndpointLabels {
    /// Node the endpoint runs on.
    pub node: Option<Arc<str>>,
    /// Zone of that node.
    pub zone: Option<Arc<str>>,
    /// Name of the pod.
    pub pod: Option<Arc<str>>,
}

/// What people call a service port; kept in the kernel under its id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceLabels {
    /// Its name.
    pub name: ServicePortName,
    /// Its node port, so that an allocated one outlives the agent.
    pub node_port: Option<u16>,
}

/// One change of the maps. A step is applied whole or fails whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Removes a frontend from `SERVICES`.
    DeleteFrontend(ServiceKey),
    /// Writes backends to slots of `BACKENDS` that no frontend refers to.
    WriteBackends {
        /// First slot.
        base: u32,
        /// The values of the slots from `base` on; sorted.
        backends: Vec<Backend>,
    },
    /// Names a service port in `SERVICE_NAMES`.
    PutServiceLabels(u32, ServiceLabels),
    /// Names an address in `ENDPOINT_NAMES`.
    PutEndpointLabels(IpAddr, EndpointLabels),
    /// Creates or switches a frontend in `SERVICES` in one atomic update.
    PutFrontend(ServiceKey, Service),
    /// Gives slots back. Writes nothing: they may be reused only after a grace period, because programs that run
    /// at this moment may still read them.
    ReleaseBackends {
        /// First slot.
        base: u32,
        /// Number of slots.
        count: u32,
    },
    /// Removes the name of a service port that has no frontend any more.
    DeleteServiceLabels(u32),
    /// Removes the name of an address that no backend has any more.
    DeleteEndpointLabels(IpAddr),
}

/// Everything the control plane keeps in the kernel, as read back from the maps when the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Contents {
    /// `SERVICES`
    pub frontends: BTreeMap<ServiceKey, Service>,
    /// The slots of `BACKENDS` that some frontend refers to, by index.
    pub backends: BTreeMap<u32, Backend>,
    /// `SERVICE_NAMES`
    pub service_labels: BTreeMap<u32, ServiceLabels>,
    /// `ENDPOINT_NAMES`
    pub endpoint_labels: BTreeMap<IpAddr, EndpointLabels>,
}
