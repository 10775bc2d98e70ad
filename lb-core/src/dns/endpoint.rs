//! Endpoints and the host names that they have below their Service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::NamedPort;
use crate::model::ObjectName;

/// The parts of an EndpointSlice that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSlice {
    /// The Service.
    pub service: ObjectName,
    /// The ports.
    pub ports: Vec<NamedPort>,
    /// The endpoints that are ready, and those that the Service may publish nevertheless.
    pub endpoints: Vec<NamedEndpoint>,
}

/// The parts of an endpoint that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedEndpoint {
    /// The address.
    pub address: IpAddr,
    /// `hostname`, in lower case.
    pub hostname: Option<Box<str>>,
    /// Whether the endpoint has names even without `publishNotReadyAddresses`. Always true for endpoints of an
    /// EndpointSlice, whose writer has already applied that field; for those of Endpoints the agent applies it.
    pub ready: bool,
}

impl NamedEndpoint {
    /// The label of the endpoint below its Service.
    pub(super) fn host(&self) -> String {
        self.hostname.as_deref().map_or_else(|| dashed(self.address), str::to_owned)
    }
}

/// An address as one label: dots and colons become dashes. A label must not begin or end with a dash, so `fd00::`
/// becomes `fd00--0`.
pub(super) fn dashed(address: IpAddr) -> String {
    let mut label = address.to_string().replace(['.', ':'], "-");
    if label.ends_with('-') {
        label.push('0');
    }
    if label.starts_with('-') {
        label.insert(0, '0');
    }
    label
}

/// The address that a label spells: IPv4 if the label has three dashes, no two of them adjacent; otherwise IPv6.
pub(super) fn undashed(label: &str) -> Option<IpAddr> {
    let dashes = label.bytes().filter(|byte| *byte == b'-').count();
    if dashes == 3 && !label.contains("--") {
        label.replace('-', ".").parse::<Ipv4Addr>().ok().map(IpAddr::V4)
    } else {
        label.replace('-', ":").parse::<Ipv6Addr>().ok().map(IpAddr::V6)
    }
}
