//! Pools of addresses: MetalLB's `IPAddressPool`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    range::AddressRange,
    selector::{Labels, Selector},
};
use crate::{
    api,
    convert::{ConvertError, Object, object_name},
    family::Family,
    model::ObjectName,
};

/// Label that, with the value `true`, reserves a pool for Services that request an internal load balancer, or that name
/// the pool or one of its addresses.
pub const INTERNAL: &str = "lb.dev/internal";
/// Label that the API server sets on each namespace: the name of the namespace.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// A pool of addresses for Services of type LoadBalancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Name of the pool, from `metadata.name`.
    pub name: Arc<str>,
    /// Labels of the pool, from `metadata.labels`.
    pub labels: Labels,
    /// The addresses of the pool, from `spec.addresses`, in the order given there.
    pub ranges: Vec<AddressRange>,
    /// `spec.autoAssign`: whether Services that name neither a pool nor an address get addresses of the pool.
    pub auto_assign: bool,
    /// `spec.avoidBuggyIPs`: whether the pool gives no IPv4 address that ends in .0 or .255.
    pub avoid_buggy_ips: bool,
    /// `spec.serviceAllocation`: which Services may use the pool; `None` for all.
    pub scope: Option<Scope>,
    /// Whether the pool gives addresses only to Services that request an internal load balancer, or that name the pool
    /// or one of its addresses.
    pub internal: bool,
}

/// How many addresses of a pool are in use. Does not count addresses that the pool never gives because of
/// `avoidBuggyIPs`. Numbers that do not fit are `u64::MAX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Name of the pool.
    pub pool: Arc<str>,
    /// Number of addresses that Services have, at most `total`.
    pub used: u64,
    /// Number of addresses that Services can have, in use or not.
    pub total: u64,
}

impl PoolUsage {
    pub(super) fn new(pool: &Pool, used: u64) -> Self {
        let avoided = |range: &AddressRange| {
            let buggy = || range.count_with_last_byte(0) + range.count_with_last_byte(255);
            if pool.avoid_buggy_ips && range.family() == Family::V4 { buggy() } else { 0 }
        };
        let sizes = pool.ranges.iter().map(|range| range.size() - avoided(range));
        let total = sizes.fold(0, u128::saturating_add);
        Self { pool: pool.name.clone(), used, total: u64::try_from(total).unwrap_or(u64::MAX) }
    }
}

/// Which Services may use a pool: `spec.serviceAllocation`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Scope {
    /// `priority`: among the pools with `serviceAllocation`, those with a smaller number are tried first, those with 0
    /// last.
    pub priority: u32,
    /// `namespaces` whose Services may use the pool, in addition to those that `namespace_selectors` select. If both
    /// fields are empty, the Services of all namespaces may use it.
    namespaces: BTreeSet<String>,
    /// `namespaceSelectors`: select namespaces whose Services may use the pool.
    namespace_selectors: Vec<Selector>,
    /// `serviceSelectors`: if there are any, one of them must select the Service.
    service_selectors: Vec<Selector>,
}

impl Scope {
    /// Whether a Service with these labels may use the pool. `namespaceSelectors` that select no namespace admit no
    /// Service (in MetalLB, they admit every namespace).
    fn admits(&self, service: &ObjectName, labels: &Labels, namespaces: &Namespaces) -> bool {
        let any_namespace = self.namespaces.is_empty() && self.namespace_selectors.is_empty();
        let in_namespace = any_namespace || self.namespaces.contains(&*service.namespace) || {
            let labels = namespaces.labels(&service.namespace);
            self.namespace_selectors.iter().any(|selector| selector.selects(&labels))
        };
        let selected = self.service_selectors.iter().any(|selector| selector.selects(labels));
        in_namespace && (self.service_selectors.is_empty() || selected)
    }
}

/// The labels of all namespaces, by name.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Namespaces(pub BTreeMap<String, Labels>);

impl Namespaces {
    /// The labels of a namespace. The label with the namespace's name is always among them, even if the map does not
    /// have the namespace.
    fn labels(&self, namespace: &str) -> Labels {
        let mut labels = self.0.get(namespace).cloned().unwrap_or_default();
        labels.insert(NAMESPACE_NAME.to_owned(), namespace.to_owned());
        labels
    }
}

impl Pool {
    /// A pool of these networks with the defaults of `IPAddressPool`: assigned automatically, not internal, and for all
    /// Services.
    pub fn of_networks(name: &str, networks: &[IpNet]) -> Self {
        Self {
            name: name.into(),
            labels: Labels::new(),
            ranges: networks.iter().map(|network| (*network).into()).collect(),
            auto_assign: true,
            avoid_buggy_ips: false,
            scope: None,
            internal: false,
        }
    }

    /// Reads a pool.
    ///
    /// # Errors
    ///
    /// The first invalid field.
    pub fn new(pool: &api::IpAddressPool) -> Result<Self, ConvertError> {
        let name = object_name("IPAddressPool", &pool.metadata)?;
        let object = Object::new("IPAddressPool", &name);
        let spec = &pool.spec;
        if spec.addresses.is_empty() {
            return Err(object.required("spec.addresses", "a pool needs a CIDR or a range of addresses"));
        }
        let mut ranges: Vec<AddressRange> = Vec::new();
        for (index, text) in spec.addresses.iter().enumerate() {
            let field = format!("spec.addresses[{index}]");
            let range: AddressRange =
                text.parse().map_err(|why| object.invalid(&field, text, &format!("{why}")))?;
            if let Some(other) = ranges.iter().find(|other| other.overlaps(&range)) {
                return Err(object.invalid(field, text, &format!("overlaps {other} of the same pool")));
            }
            ranges.push(range);
        }
        let scope = spec.service_allocation.as_ref().map(|scope| Scope::new(scope, &object)).transpose()?;
        Ok(Self {
            name: name.name,
            labels: pool.metadata.labels.clone().unwrap_or_default(),
            ranges,
            auto_assign: spec.auto_assign.unwrap_or(true),
            avoid_buggy_ips: spec.avoid_buggy_ips.unwrap_or(false),
            scope,
            internal: pool.metadata.label(INTERNAL) == Some("true"),
        })
    }

    /// Whether the pool contains the address and does not avoid it.
    pub fn has(&self, ip: IpAddr) -> bool {
        !self.avoids(ip) && self.ranges.iter().any(|range| range.contains(ip))
    }

    /// Whether a Service with these labels may use the pool.
    pub(super) fn admits(&self, service: &ObjectName, labels: &Labels, namespaces: &Namespaces) -> bool {
        self.scope.as_ref().is_none_or(|scope| scope.admits(service, labels, namespaces))
    }

    /// Sort key by which pools are tried for Services that name none: first those with `serviceAllocation` by priority,
    /// then the others, each group by name.
    pub(super) fn order(&self) -> (bool, u32, Arc<str>) {
        // Priority 0 is the lowest: `0 - 1` wraps to the greatest number.
        let priority = self.scope.as_ref().map(|scope| scope.priority.wrapping_sub(1));
        (priority.is_none(), priority.unwrap_or_default(), self.name.clone())
    }

    /// Whether the pool does not give this address because of `avoidBuggyIPs`: an IPv4 address that ends in .0 or .255.
    pub(super) fn avoids(&self, ip: IpAddr) -> bool {
        self.avoid_buggy_ips && matches!(ip, IpAddr::V4(v4) if matches!(v4.octets()[3], 0 | 255))
    }
}

impl Scope {
    fn new(scope: &api::ServiceAllocation, object: &Object) -> Result<Self, ConvertError> {
        let selectors = |list: &Option<Vec<api::LabelSelector>>, name: &str| {
            let one = |(index, selector)| {
                Selector::new(selector).map_err(|(field, why)| {
                    object.error(format!("spec.serviceAllocation.{name}[{index}].{field}"), why)
                })
            };
            list.iter().flatten().enumerate().map(one).collect::<Result<Vec<_>, _>>()
        };
        let mut namespaces = BTreeSet::new();
        for (index, namespace) in scope.namespaces.iter().flatten().enumerate() {
            if !namespaces.insert(namespace.clone()) {
                let field = format!("spec.serviceAllocation.namespaces[{index}]");
                return Err(object.duplicate(field, namespace));
            }
        }
        let given = scope.priority.unwrap_or(0);
        let priority = u32::try_from(given)
            .map_err(|error| object.invalid("spec.serviceAllocation.priority", given, &error.to_string()))?;
        Ok(Self {
            priority,
            namespaces,
            namespace_selectors: selectors(&scope.namespace_selectors, "namespaceSelectors")?,
            service_selectors: selectors(&scope.service_selectors, "serviceSelectors")?,
        })
    }
}
