//! What is probed.

use std::{net::IpAddr, net::SocketAddr, sync::Arc};

use super::check::Check;
use crate::endpoint_key::EndpointKey;
use crate::protocol::Protocol;

/// An address and port with its check: what is probed, and what has a verdict. Services with equal checks share the
/// targets of common endpoints.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port that probes go to.
    pub port: u16,
    /// The check.
    pub check: Arc<Check>,
}

impl Target {
    /// The target for an endpoint of a service port; `None` if the check does not apply to the port.
    pub fn of(check: &Arc<Check>, protocol: Protocol, (address, port): EndpointKey) -> Option<Self> {
        let port = check.port_of(protocol, port)?;
        Some(Self { address: address.into(), port, check: check.clone() })
    }

    /// The address and port that probes go to.
    pub const fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// A target whose probes ask the same as those of `target`. `before` and `after` are the targets on both sides of it, in
/// order.
pub(crate) fn alike<'a>(
    before: impl DoubleEndedIterator<Item = &'a Target>,
    after: impl Iterator<Item = &'a Target>,
    target: &Target,
) -> Option<&'a Target> {
    let at_socket = |other: &&Target| other.socket() == target.socket();
    let (before, after) = (before.rev().take_while(at_socket), after.take_while(at_socket));
    before.chain(after).find(|other| other.check.kind == target.check.kind)
}
