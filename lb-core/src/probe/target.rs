//! What a probe is sent to.

use std::{net::IpAddr, net::SocketAddr, sync::Arc};

use super::check::Check;
use crate::endpoint_key::EndpointKey;
use crate::protocol::Protocol;

/// An endpoint's address and port, with the check to perform. Each target is probed, and gets a verdict, on its own.
/// Services with equal checks share the targets of common endpoints.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// Address of the endpoint.
    pub address: IpAddr,
    /// The port that probes go to.
    pub port: u16,
    /// The health check to perform.
    pub check: Arc<Check>,
}

impl Target {
    /// The target for an endpoint of a service port; `None` if the check does not apply to the port.
    pub fn of(check: &Arc<Check>, protocol: Protocol, (address, port): EndpointKey) -> Option<Self> {
        let port = check.port_of(protocol, port)?;
        Some(Self { address: address.into(), port, check: check.clone() })
    }

    /// Address and port that probes go to.
    pub const fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// A target with the same address, port and kind of check as `target`; the rest of its check, such as the interval, may
/// differ. `before` are the known targets that sort before `target`, `after` those from `target` on, both sorted.
pub(crate) fn alike<'a>(
    before: impl DoubleEndedIterator<Item = &'a Target>,
    after: impl Iterator<Item = &'a Target>,
    target: &Target,
) -> Option<&'a Target> {
    let at_socket = |other: &&Target| other.socket() == target.socket();
    let (before, after) = (before.rev().take_while(at_socket), after.take_while(at_socket));
    before.chain(after).find(|other| other.check.kind == target.check.kind)
}
