//! Why a Service gets no address, and why a pool is not used.

use std::net::IpAddr;

use super::{AddressRange, Pool, Terms};
use crate::{family::Family, model::ObjectName};

/// Why a Service gets no address, or not the one that it names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The Service has no cluster IP yet, so the families of its addresses are unknown.
    #[error("the Service has no cluster IP yet, which decides the families of its addresses")]
    NoClusterIp,
    /// The Service names no pool, and no pool with `autoAssign` admits it. A Service that asks for an internal load
    /// balancer needs an internal pool, any other Service a pool that is not internal.
    #[error("no pool gives addresses to this Service: {}", no_pool(*internal))]
    NoPool {
        /// Whether the Service asks for an internal load balancer.
        internal: bool,
    },
    /// The pool that the Service names does not exist, or is not used.
    #[error("there is no pool {0:?}")]
    UnknownPool(String),
    /// `serviceAllocation` of the pool does not admit the Service.
    #[error("serviceAllocation of pool {0:?} does not admit this Service")]
    NotAdmitted(String),
    /// The named address is in no used pool, or its pool avoids it.
    #[error("{0} is in no pool")]
    InNoPool(IpAddr),
    /// The named address is in another pool than the named one.
    #[error("{ip} is in pool {pool:?}, and the Service names pool {named:?}")]
    InOtherPool {
        /// The named address.
        ip: IpAddr,
        /// The named pool.
        named: String,
        /// The pool of the address.
        pool: String,
    },
    /// Another Service has the address.
    #[error("Service {by} has {ip}: {why}")]
    Taken {
        /// The address.
        ip: IpAddr,
        /// The Service that has it.
        by: ObjectName,
        /// Why the two cannot share it.
        why: &'static str,
    },
    /// No pool that the Service may use has free addresses for it.
    #[error("no free address ({}) in {}", names(families), listed(pools))]
    Exhausted {
        /// The pools that were tried.
        pools: Vec<String>,
        /// The families of the Service.
        families: Vec<Family>,
    },
}

/// A problem with an address that a Service keeps.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Concern {
    /// No pool has the address any more.
    #[error("{0} is in no pool; the Service keeps it until it is deleted")]
    NoPool(IpAddr),
    /// The Service asks for an internal load balancer and has an address of another pool, or the reverse.
    #[error(
        "the Service asks for {} load balancer and keeps {ip} of pool {pool:?}, which is for {} ones; name a pool by the \
         annotation metallb.io/address-pool, or delete the Service and create it again",
        if *internal { "an internal" } else { "a public" },
        if *internal { "public" } else { "internal" }
    )]
    OtherKind {
        /// The address.
        ip: IpAddr,
        /// The pool of the address.
        pool: String,
        /// Whether the Service asks for an internal load balancer.
        internal: bool,
    },
}

/// A problem with the addresses of a Service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The Service gets no address, or not the one that it requests.
    #[error("{}{why}{}", if *keeps { "" } else { "no address: " }, if *keeps { "; the Service keeps the address that it has" } else { "" })]
    Refused {
        /// The reason.
        why: String,
        /// Whether the Service keeps an address that it has.
        keeps: bool,
    },
    /// The Service has an address that it would not get now.
    #[error("{0}")]
    Concern(Concern),
}

impl Trouble {
    /// The reason of an Event, in MetalLB's words where it has one.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "AllocationFailed",
            Self::Concern(Concern::NoPool(_)) => "PoolGone",
            Self::Concern(Concern::OtherKind { .. }) => "AddressOfOtherKind",
        }
    }
}

/// Why a pool is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The pool has addresses of another pool.
    #[error("pool {pool:?} is not used: its {range} overlaps {other_range} of pool {other:?}")]
    Overlap {
        /// The pool that is not used.
        pool: String,
        /// The overlapping range of this pool.
        range: AddressRange,
        /// The pool that is used.
        other: String,
        /// The overlapping range of the other pool.
        other_range: AddressRange,
    },
    /// Another pool has the same name.
    #[error("pool {0:?} is not used: there is another one of that name")]
    Twin(String),
    /// The pool has addresses that cluster IPs or pods may have.
    #[error(
        "pool {pool:?} is not used: its {range} overlaps {reserved}, which is a network of cluster IPs or pods"
    )]
    Reserved {
        /// The pool that is not used.
        pool: String,
        /// The overlapping range of the pool.
        range: AddressRange,
        /// The network of cluster IPs or pods.
        reserved: AddressRange,
    },
}

impl PoolError {
    /// Why the pool cannot be used beside the others; `None` if it can.
    pub(super) fn of(pool: &Pool, others: &[Pool], reserved: &[AddressRange]) -> Option<Self> {
        let name = || pool.name.to_string();
        if others.iter().any(|other| other.name == pool.name) {
            return Some(Self::Twin(name()));
        }
        for range in &pool.ranges {
            if let Some(reserved) = reserved.iter().find(|reserved| reserved.overlaps(range)) {
                return Some(Self::Reserved { pool: name(), range: *range, reserved: *reserved });
            }
            for other in others {
                if let Some(found) = other.ranges.iter().find(|other| other.overlaps(range)) {
                    let other = other.name.to_string();
                    return Some(Self::Overlap { pool: name(), range: *range, other, other_range: *found });
                }
            }
        }
        None
    }
}

/// Why two Services cannot share an address.
pub(super) fn refusal(one: &Terms, other: &Terms) -> &'static str {
    match (&one.key, &other.key) {
        (Some(key), Some(other_key)) if key == other_key => "they have a port in common",
        (Some(key), Some(other_key)) if key.text == other_key.text => {
            "under externalTrafficPolicy Local sharers need the same policy and selector"
        }
        (Some(_), Some(_)) => "their keys for sharing (annotation metallb.io/allow-shared-ip) differ",
        _ => {
            "to share it, both need the same annotation metallb.io/allow-shared-ip (and, under externalTrafficPolicy Local, a selector)"
        }
    }
}

const fn no_pool(internal: bool) -> &'static str {
    if internal {
        "it asks for an internal load balancer, and no pool with autoAssign and the label lb.dev/internal=true admits it"
    } else {
        "none has autoAssign and admits it"
    }
}

fn names(families: &[Family]) -> String {
    families.iter().map(|family| family.as_str()).collect::<Vec<_>>().join(" and ")
}

fn listed(pools: &[String]) -> String {
    let names = pools.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    if pools.len() == 1 { format!("pool {names}") } else { format!("any one of the pools {names}") }
}
