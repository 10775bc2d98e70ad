//! Why a Service gets no address, and why a pool cannot be used.

use std::{fmt, net::IpAddr, sync::Arc};

use super::{AddressRange, Pool, Terms};
use crate::{family::Family, listing::first_few, model::ObjectName};

/// Why a Service gets no address, or not the address that it names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The Service has no cluster IP yet, so the families of its addresses are unknown.
    #[error("the Service has no cluster IP yet, which decides the families of its addresses")]
    NoClusterIp,
    /// The Service names no pool, and no pool with `autoAssign` admits it. A Service that requests an internal load
    /// balancer needs an internal pool, any other Service a pool that is not internal.
    #[error("no pool gives addresses to this Service: {}", no_pool(*internal))]
    NoPool {
        /// Whether the Service requests an internal load balancer.
        internal: bool,
    },
    /// The pool that the Service names does not exist, or cannot be used.
    #[error("there is no pool {0:?}")]
    UnknownPool(String),
    /// The pool that the Service names does not admit it, by `serviceAllocation`.
    #[error("serviceAllocation of pool {0:?} does not admit this Service")]
    NotAdmitted(String),
    /// No usable pool contains the address that the Service names, or the pool that contains the address avoids it.
    #[error("{0} is in no pool")]
    InNoPool(IpAddr),
    /// The Service names an address and a pool, but the address is in another pool.
    #[error("{ip} is in pool {pool:?}, and the Service names pool {named:?}")]
    InOtherPool {
        /// The address that the Service names.
        ip: IpAddr,
        /// Name of the pool that the Service names.
        named: String,
        /// Name of the pool that contains the address.
        pool: String,
    },
    /// Another Service has the address, and the two Services cannot share it.
    #[error("Service {by} has {ip}: {why}")]
    Taken {
        /// The address that the Service requests.
        ip: IpAddr,
        /// Name of the Service that has the address.
        by: ObjectName,
        /// Why the two Services cannot share the address.
        why: &'static str,
    },
    /// No pool that the Service may use has free addresses for it.
    #[error("no free address ({}) in {}", names(families), listed(pools))]
    Exhausted {
        /// Names of the pools that were tried.
        pools: Vec<String>,
        /// The IP families in which the Service needs an address.
        families: Vec<Family>,
    },
}

/// A problem with an address that a Service nevertheless keeps.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Concern {
    /// No usable pool contains the address.
    #[error(
        "{ip} is in no pool, so no advertisement announces it; the Service keeps it until {}",
        if *held { "there are pools and all of them can be read and used" } else { "it is deleted" }
    )]
    NoPool {
        /// The address that the Service keeps.
        ip: IpAddr,
        /// Whether the Service would lose the address if there were pools, and all of them could be read and used.
        held: bool,
    },
    /// The Service requests an internal load balancer but has an address of a pool that is not internal, or the
    /// reverse.
    #[error(
        "the Service asks for {} load balancer and keeps {ip} of pool {pool:?}, which is for {} ones; name a pool by the \
         annotation metallb.io/address-pool, or delete the Service and create it again",
        if *internal { "an internal" } else { "a public" },
        if *internal { "public" } else { "internal" }
    )]
    OtherKind {
        /// The address that the Service keeps.
        ip: IpAddr,
        /// Name of the pool that contains the address.
        pool: String,
        /// Whether the Service requests an internal load balancer.
        internal: bool,
    },
}

/// A problem with the addresses of a Service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The Service gets no address, or not the address that it requests.
    #[error("{}{why}{}", if *keeps { "" } else { "no address: " }, if *keeps { "; the Service keeps the address that it has" } else { "" })]
    Refused {
        /// Why the request was refused.
        why: String,
        /// Whether the Service keeps an address that it has.
        keeps: bool,
    },
    /// The Service keeps an address that it would not get now.
    #[error("{0}")]
    Concern(Concern),
}

impl Trouble {
    /// The `reason` of an Event about the problem, in MetalLB's words if MetalLB has such an Event.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "AllocationFailed",
            Self::Concern(Concern::NoPool { .. }) => "PoolGone",
            Self::Concern(Concern::OtherKind { .. }) => "AddressOfOtherKind",
        }
    }
}

/// Why a pool cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The pool overlaps another pool.
    #[error("pool {pool:?} is not used: its {range} overlaps {other_range} of pool {other:?}")]
    Overlap {
        /// Name of the pool that cannot be used.
        pool: String,
        /// The overlapping range of this pool.
        range: AddressRange,
        /// Name of the other pool, which is used.
        other: String,
        /// The overlapping range of the other pool.
        other_range: AddressRange,
    },
    /// Another used pool has this name.
    #[error("pool {0:?} is not used: there is another one of that name")]
    Twin(String),
    /// The pool contains addresses that cluster IPs or pods may have.
    #[error(
        "pool {pool:?} is not used: its {range} overlaps {reserved}, which is a network of cluster IPs or pods"
    )]
    Reserved {
        /// Name of the pool that cannot be used.
        pool: String,
        /// The overlapping range of the pool.
        range: AddressRange,
        /// The overlapping network of cluster IPs or pods.
        reserved: AddressRange,
    },
}

impl PoolError {
    /// Why the pool cannot be used in addition to the pools `others`; `None` if it can.
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

/// Maximum number of addresses that the text of a [`NodesInPool`] names.
const NAMED: usize = 5;

/// A pool that contains addresses of nodes. The pool's other addresses are assigned as usual.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodesInPool {
    /// Name of the pool.
    pub pool: Arc<str>,
    /// The addresses of nodes in the pool, each with the name of its node, in ascending order; at least one.
    pub nodes: Vec<(IpAddr, Arc<str>)>,
}

impl fmt::Display for NodesInPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, nodes } = self;
        let nodes = first_few(nodes.iter().map(|(ip, node)| format!("{ip} ({node})")), NAMED);
        write!(
            formatter,
            "pool {pool:?} contains addresses of Nodes: {nodes}; a Service gets such an address only if it names it: take \
             them out of the pool"
        )
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
