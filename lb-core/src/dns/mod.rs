//! The names of Services, by version 1.1 of the DNS specification of Kubernetes: objects become [`NameChange`]s, and an
//! index of them answers questions. The crate `lb-dns` has the messages, the transports and the upstream servers.
//!
//! The proxy ignores headless Services, ExternalName, and Services that another proxy serves; all of them have names.

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
    convert::{TOLERATE_UNREADY, endpoint_slice, endpoints, service},
    endpoint::{NamedEndpoint, NamedSlice},
    index::Index,
    record::{Answer, Data, Found, Kind},
    unread::{Unread, Words, words},
    zone::{Zone, ZoneError},
};
use std::net::IpAddr;

use crate::{model::ObjectName, protocol::Protocol};

/// The change of one object, as far as names depend on it. `None` deletes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// A Service.
    Service(ObjectName, Option<NamedService>),
    /// An EndpointSlice, or a part of Endpoints.
    Slice(ObjectName, Option<NamedSlice>),
    /// A Namespace, and whether there is such an object. A namespace that contains a Service or a slice exists even
    /// without one.
    Namespace(ObjectName, bool),
}

/// The parts of a Service that DNS names depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedService {
    /// What its name leads to.
    pub target: Target,
    /// The ports, with and without a name.
    pub ports: Vec<NamedPort>,
    /// `spec.publishNotReadyAddresses`: whether endpoints that are not ready have names.
    pub publishes_not_ready: bool,
}

/// What the name of a Service leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Its cluster IPs; none if it has not got them yet.
    ClusterIps(Vec<IpAddr>),
    /// Its endpoints: the Service is headless.
    Endpoints,
    /// Another name, without a dot at its end: `spec.externalName`.
    Name(Box<str>),
}

/// A port of a Service or of a slice. `_NAME._protocol` below the Service's name has its SRV records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// The name; empty for an unnamed port, which only SRV at the Service's own name lists.
    pub name: Box<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The number.
    pub port: u16,
}
