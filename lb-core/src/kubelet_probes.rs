//! Finds the ports whose kubelet probes a PROXY protocol header breaks.

use std::collections::BTreeSet;

use crate::model::{EndpointSlice, Protocol, Service};

/// The TCP ports of the pods of a Service. If it has the PROXY protocol, they must read a header, and a kubelet probe of
/// such a port sends none. (The agent does not read Pods, so it does not know which ports kubelet probes.) An endpoint
/// without a pod has no kubelet.
pub(crate) fn ports_of_pods(service: &Service, slices: &[EndpointSlice]) -> BTreeSet<u16> {
    let has_pods = |slice: &&EndpointSlice| slice.endpoints.iter().any(|endpoint| endpoint.pod.is_some());
    let is_served = |name: &str| {
        let mut tcp = service.ports.iter().filter(|port| port.protocol == Protocol::Tcp);
        tcp.any(|port| &*port.name == name)
    };
    let ports = slices.iter().filter(has_pods).flat_map(|slice| &slice.ports);
    ports
        .filter(|port| port.protocol == Protocol::Tcp && is_served(&port.name))
        .map(|port| port.port)
        .collect()
}
