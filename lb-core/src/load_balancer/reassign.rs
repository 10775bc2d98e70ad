//! Whether a Service loses an address because of a change of the pools, as with MetalLB since version 0.14.2.

use std::net::IpAddr;

use super::{AddressRequest, LoadBalancers, Pool};

/// Why the pools no longer allow an address that a Service has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Withdrawal {
    /// No pool contains the address.
    #[error("no pool contains it")]
    NoPool,
    /// The pool of this name contains the address, but does not give it because of `avoidBuggyIPs`.
    #[error("pool {0:?} has avoidBuggyIPs")]
    Avoided(String),
    /// The pool of this name does not admit the Service, by `serviceAllocation`.
    #[error("serviceAllocation of pool {0:?} does not admit the Service")]
    NotAdmitted(String),
    /// The Service requests an internal load balancer but has an address of a pool that is not internal, or the
    /// reverse.
    #[error(
        "pool {pool:?} is for {} load balancers, and the Service asks for {} one",
        if *internal { "public" } else { "internal" },
        if *internal { "an internal" } else { "a public" }
    )]
    OtherKind {
        /// Name of the pool that contains the address.
        pool: String,
        /// Whether the Service requests an internal load balancer.
        internal: bool,
    },
}

impl LoadBalancers {
    /// Sets whether Services lose addresses that the pools no longer allow. They lose none while `may_reassign` is
    /// false: it must be false while the caller cannot read every pool, because an unread pool may have the address.
    pub fn set_reassign(&mut self, reassign: bool, may_reassign: bool) {
        if (self.reassign, self.may_reassign) != (reassign, may_reassign) {
            (self.reassign, self.may_reassign) = (reassign, may_reassign);
            self.changes += 1;
        }
    }

    /// Whether Services now lose addresses that the pools no longer allow. They keep these addresses while some pool
    /// cannot be read or used, or no pool exists: that is probably a mistake, which must not take addresses from
    /// Services.
    pub(super) fn reassigns(&self) -> bool {
        self.reassign && self.may_reassign && self.all_pools_used && !self.pools.is_empty()
    }

    /// Why the Service loses the address `ip`, which it has now; `None` if it keeps the address.
    pub(super) fn withdrawal(&self, request: &AddressRequest, ip: IpAddr) -> Option<Withdrawal> {
        if !self.reassigns() {
            return None;
        }
        let Some(pool) = self.pool_of(ip) else { return Some(Withdrawal::NoPool) };
        self.refusal(request, pool, ip)
    }

    fn refusal(&self, request: &AddressRequest, pool: &Pool, ip: IpAddr) -> Option<Withdrawal> {
        let name = || pool.name.to_string();
        if pool.avoids(ip) {
            Some(Withdrawal::Avoided(name()))
        } else if !pool.admits(&request.service, &request.labels, &self.namespaces) {
            Some(Withdrawal::NotAdmitted(name()))
        } else if !request.names_pool_or_address() && pool.internal != request.internal {
            Some(Withdrawal::OtherKind { pool: name(), internal: request.internal })
        } else {
            None
        }
    }
}
