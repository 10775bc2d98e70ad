//! Routes that keep packets to cluster IPs from leaving the node untranslated, for example by its default route.
//!
//! They apply if the [catch device](super::catch) is missing: a pod whose device has no programs then gets an ICMP
//! error at once.

use std::{collections::BTreeSet, io};

use netlink_packet_route::route::{RouteMessage, RouteType};
use tracing::info;

use crate::{
    error::DatapathError,
    net::{
        netlink::Netlink,
        our_routes::{self, METRIC, Range},
    },
};

/// The routes of one data plane in the network namespace of this thread.
#[derive(Debug, Default)]
pub struct UnreachableRoutes {
    /// The networks that have an unreachable route of ours; `None` before the routes were first read.
    present: Option<BTreeSet<Range>>,
}

impl UnreachableRoutes {
    /// Makes these networks unreachable, and removes our unreachable routes of other networks. Each call adds all
    /// routes, so a route that other software has removed comes back.
    ///
    /// # Errors
    /// The kernel refuses a route. The next call tries again.
    pub fn keep(&mut self, ranges: &[Range]) -> Result<(), DatapathError> {
        let wanted: BTreeSet<Range> = ranges.iter().copied().filter(|(_, prefix)| *prefix > 0).collect();
        let present = self
            .update(&wanted)
            .map_err(|error| DatapathError::netlink("make cluster IPs unreachable", error))?;
        if wanted != present {
            let networks: Vec<_> = wanted.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
            info!(
                networks = networks.join(", "),
                "untranslated packets to these networks never leave the node"
            );
        }
        self.present = Some(wanted);
        Ok(())
    }

    /// Adds and removes routes; returns the networks that had one before.
    fn update(&mut self, wanted: &BTreeSet<Range>) -> io::Result<BTreeSet<Range>> {
        let mut netlink = Netlink::open()?;
        let present = match self.present.take() {
            Some(present) => present,
            None => our_routes::present(&mut netlink, RouteType::Unreachable)?,
        };
        for range in wanted {
            our_routes::add(&mut netlink, route(*range))?;
        }
        for range in present.difference(wanted) {
            our_routes::remove(&mut netlink, route(*range))?;
        }
        Ok(present)
    }

    /// Removes all unreachable routes that agents have added.
    pub(crate) fn release() -> Result<(), DatapathError> {
        Self::default().keep(&[])
    }
}

fn route(range: Range) -> RouteMessage {
    our_routes::route(range, RouteType::Unreachable, METRIC)
}
