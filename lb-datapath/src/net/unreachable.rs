//! Routes that keep packets to cluster IPs from leaving the node untranslated, for example by the node's default route.
//!
//! These routes apply if the [catch device](super::catch) is missing: a pod whose device has no programs then gets an
//! ICMP error at once.

use netlink_packet_route::route::{RouteMessage, RouteType};
use tracing::info;

use crate::{
    error::DatapathError,
    net::{
        netlink::Netlink,
        our_routes::{self, METRIC, Networks, OurRoutes, Range},
    },
};

/// The unreachable routes of one data plane, in the network namespace of this thread.
#[derive(Debug)]
pub struct UnreachableRoutes(OurRoutes);

impl Default for UnreachableRoutes {
    fn default() -> Self {
        Self(OurRoutes::new(RouteType::Unreachable))
    }
}

impl UnreachableRoutes {
    /// Makes these networks unreachable, and removes our unreachable routes of other networks. Each call adds all
    /// routes, so a route that other software has removed comes back.
    ///
    /// # Errors
    /// The kernel refuses a route. The next call tries again.
    pub fn keep(&mut self, ranges: &[Range]) -> Result<(), DatapathError> {
        let networks = Networks::new(ranges);
        let changed = Netlink::open().and_then(|mut netlink| self.0.replace(&mut netlink, &networks, route));
        if changed.map_err(|error| DatapathError::netlink("make cluster IPs unreachable", error))? {
            info!(%networks, "untranslated packets to these networks never leave the node");
        }
        Ok(())
    }

    /// Removes all unreachable routes that agents have added.
    pub(crate) fn release() -> Result<(), DatapathError> {
        Self::default().keep(&[])
    }
}

fn route(range: Range) -> RouteMessage {
    our_routes::route(range, RouteType::Unreachable, METRIC)
}
