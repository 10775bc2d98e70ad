//! The endpoints of a Service, as far as DNS names depend on them, and the names of endpoints below their Service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::NamedPort;
use crate::model::ObjectName;

/// The parts of an EndpointSlice that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSlice {
    /// The Service that the slice belongs to.
    pub service: ObjectName,
    /// The ports of the slice's endpoints.
    pub ports: Vec<NamedPort>,
    /// The endpoints that are ready, and those that the Service may publish nevertheless.
    pub endpoints: Vec<NamedEndpoint>,
}

/// The parts of an endpoint that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedEndpoint {
    /// The endpoint's address.
    pub address: IpAddr,
    /// `hostname`, in lower case.
    pub hostname: Option<Box<str>>,
    /// Whether the endpoint has names even without `publishNotReadyAddresses`. Always true for endpoints of an
    /// EndpointSlice, because the writer of the slice has already applied that field; for endpoints of an Endpoints
    /// object, the agent applies it.
    pub ready: bool,
}

impl NamedEndpoint {
    /// The label of the endpoint's name below its Service: its host name, or its address with dashes.
    pub(super) fn host(&self) -> String {
        self.hostname.as_deref().map_or_else(|| dashed(self.address), str::to_owned)
    }
}

/// An address as one DNS label: dots and colons become dashes. A label must not begin or end with a dash, so `fd00::`
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

/// The address that a label of [`dashed`] stands for: IPv4 if it has three dashes, of which no two are adjacent; else
/// IPv6.
pub(super) fn undashed(label: &str) -> Option<IpAddr> {
    let dashes = label.bytes().filter(|byte| *byte == b'-').count();
    if dashes == 3 && !label.contains("--") {
        label.replace('-', ".").parse::<Ipv4Addr>().ok().map(IpAddr::V4)
    } else {
        label.replace('-', ":").parse::<Ipv6Addr>().ok().map(IpAddr::V6)
    }
}
