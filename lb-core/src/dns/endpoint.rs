//! Endpoints and the host names that they have below their Service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::NamedPort;
use crate::model::ObjectName;

/// What names need of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSlice {
    /// The Service.
    pub service: ObjectName,
    /// The ports.
    pub ports: Vec<NamedPort>,
    /// The endpoints that are ready, and those that the Service may publish nevertheless.
    pub endpoints: Vec<NamedEndpoint>,
}

/// What names need of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedEndpoint {
    /// The address.
    pub address: IpAddr,
    /// `hostname`, in lower case.
    pub hostname: Option<Box<str>>,
    /// Whether the endpoint has names without regard to `publishNotReadyAddresses`. In a slice, whoever writes it has
    /// applied that field already; in Endpoints the agent does.
    pub ready: bool,
}

impl NamedEndpoint {
    /// The label of the endpoint below its Service.
    pub(super) fn host(&self) -> String {
        self.hostname.as_deref().map_or_else(|| dashed(self.address), str::to_owned)
    }

    /// Whether [`Self::host`] is `label`; `address` is what [`undashed`] makes of the label.
    pub(super) fn is_host(&self, label: &str, address: Option<IpAddr>) -> bool {
        match &self.hostname {
            Some(hostname) => **hostname == *label,
            None => address == Some(self.address) && dashed(self.address) == label,
        }
    }
}

/// An address as one label: dots and colons become dashes. A label ends with no dash, hence `fd00::` is `fd00--0`.
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

/// The address that a label spells: three dashes and none beside another is IPv4.
pub(super) fn undashed(label: &str) -> Option<IpAddr> {
    let dashes = label.bytes().filter(|byte| *byte == b'-').count();
    if dashes == 3 && !label.contains("--") {
        label.replace('-', ".").parse::<Ipv4Addr>().ok().map(IpAddr::V4)
    } else {
        label.replace('-', ":").parse::<Ipv6Addr>().ok().map(IpAddr::V6)
    }
}
