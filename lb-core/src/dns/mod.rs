//! The names of Services, by version 1.1 of the DNS specification of Kubernetes: objects become [`NameChange`]s, and an
//! index of them answers questions. The crate `lb-dns` has the messages, the transports and the upstream servers.
//!
//! The proxy ignores headless Services, ExternalName, and Services that another proxy serves; all of them have names.

mod cluster_dns;
mod convert;
mod endpoint;
mod index;
mod published;
mod record;
mod reverse;
mod service;
#[cfg(test)]
mod tests;
mod unread;
mod zone;

pub use self::{
    cluster_dns::ClusterDns,
    convert::{TOLERATE_UNREADY, endpoint_slice, endpoints, service},
    endpoint::{NamedEndpoint, NamedSlice},
    index::Index,
    record::{Answer, Data, Found, Kind},
    unread::{Unread, Words, words},
    zone::{Zone, ZoneError},
};
use std::net::IpAddr;

use crate::{model::ObjectName, protocol::Protocol};

/// The change of one object, reduced to what DNS names depend on. `None` means that the object was deleted, or that no
/// names come from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// A Service has changed.
    Service(ObjectName, Option<NamedService>),
    /// An EndpointSlice, or a part of an Endpoints object, has changed.
    Slice(ObjectName, Option<NamedSlice>),
    /// A Namespace object has changed; true if the object exists now. A namespace that contains a Service or a slice
    /// exists for DNS even without such an object.
    Namespace(ObjectName, bool),
}

/// The parts of a Service that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedService {
    /// What the Service's name resolves to.
    pub target: Target,
    /// The Service's ports, with and without a name.
    pub ports: Vec<NamedPort>,
    /// `spec.publishNotReadyAddresses`, or the older annotation [`TOLERATE_UNREADY`]: whether endpoints that are not
    /// ready have names.
    pub publishes_not_ready: bool,
}

/// What the name of a Service resolves to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The Service's cluster IPs; empty if none are allocated yet.
    ClusterIps(Vec<IpAddr>),
    /// The endpoints, because the Service is headless.
    Endpoints,
    /// Another name, without a dot at its end, from `spec.externalName`.
    Name(Box<str>),
}

/// A port of a Service or of a slice. The name `_NAME._protocol` below the Service's name has the port's SRV records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// Name of the port; empty for an unnamed port, which only the SRV records at the Service's own name include.
    pub name: Box<str>,
    /// Transport protocol of the port.
    pub protocol: Protocol,
    /// Number of the port.
    pub port: u16,
}
