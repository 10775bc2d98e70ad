//! Finds the ports of pods at which kubelet probes fail if the pods expect a PROXY protocol header.

use std::collections::BTreeSet;

use crate::model::{EndpointSlice, Protocol, Service};

/// The TCP ports of the pods of a Service. If the Service has the PROXY protocol, its pods expect a header at these
/// ports, but kubelet probes send none. (The agent does not read Pods, so it does not know which ports kubelet probes.)
/// Slices without a pod do not count, because kubelet probes only pods.
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
