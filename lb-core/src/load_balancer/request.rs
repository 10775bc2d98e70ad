//! Reads the request of a Service of type LoadBalancer: which addresses it names, and which pools may serve it.

use std::{collections::BTreeSet, net::IpAddr};

use super::selector::Labels;
use crate::{
    api::{self, ObjectMeta},
    convert::{ASKS_FOR_INTERNAL, ASKS_FOR_PUBLIC, ConvertError, Object, cluster_ips, object_name},
    family::Family,
    model::{ObjectName, Protocol},
    rules,
};

/// Prefixes of MetalLB's annotations: the prefix of present releases, and the prefix of older releases.
const PREFIXES: [&str; 2] = ["metallb.io", "metallb.universe.tf"];

/// The request of a Service of type LoadBalancer for addresses, from its fields and annotations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRequest {
    /// Name of the Service.
    pub service: ObjectName,
    /// `metadata.creationTimestamp` of the Service; usually `None` for a manifest.
    pub created: Option<String>,
    /// `metadata.labels` of the Service.
    pub labels: Labels,
    /// The families of the Service's cluster IPs: the Service requests one address of each family.
    pub families: Vec<Family>,
    /// Whether one address is enough if no pool has free addresses of all families (`PreferDualStack`).
    pub one_family_is_enough: bool,
    /// The addresses that the Service names; empty if it names none.
    pub addresses: Vec<IpAddr>,
    /// The pool that the Service names; `None` if it names none.
    pub pool: Option<String>,
    /// Whether an annotation of a cloud requests an internal load balancer.
    pub internal: bool,
    /// The terms on which the Service shares an address with other Services.
    pub terms: Terms,
}

/// The terms on which a Service shares an address with others.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Terms {
    /// The key that all sharers of the address must have; `None` if the Service does not share.
    pub key: Option<SharingKey>,
    /// Protocols and ports of the Service; sharers must not have any in common.
    pub ports: BTreeSet<(Protocol, u16)>,
}

/// What Services must have in common to share an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingKey {
    /// The value of MetalLB's annotation `allow-shared-ip`.
    pub text: String,
    /// The Service's selector under `externalTrafficPolicy: Local`; empty under `Cluster`. Under `Local`, a node sends
    /// packets only to its own pods, so sharers must have the same pods.
    pub pods: Vec<(String, String)>,
}

impl Terms {
    /// Whether two Services with these terms may share an address.
    pub fn allow(&self, other: &Self) -> bool {
        self.key.is_some() && self.key == other.key && self.ports.is_disjoint(&other.ports)
    }
}

/// Name and value of one of MetalLB's annotations. If the Service has the annotation under both prefixes, `metallb.io`
/// counts, even with an empty value.
fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<(String, &'a str)> {
    PREFIXES.iter().find_map(|prefix| {
        let name = format!("{prefix}/{name}");
        let text = metadata.annotation(&name)?;
        Some((name, text.trim()))
    })
}

/// Whether a request may depend on the annotation with this name.
pub fn is_relevant(name: &str) -> bool {
    let of_metallb = name.split_once('/').is_some_and(|(prefix, _)| PREFIXES.contains(&prefix));
    of_metallb || ASKS_FOR_INTERNAL.iter().any(|(known, _)| *known == name)
}

impl AddressRequest {
    /// Reads the request of a Service. `None` if the Service is not of type LoadBalancer, or its class is not `class`.
    /// If `class` is `None`, only Services without a class match.
    ///
    /// # Errors
    ///
    /// The first field that is invalid or contradicts another field.
    pub fn of(service: &api::Service, class: Option<&str>) -> Result<Option<Self>, ConvertError> {
        let metadata = &service.metadata;
        let name = object_name("Service", metadata)?;
        let object = Object::new("Service", &name);
        let Some(spec) = service.spec.as_ref().filter(|spec| spec.is_load_balancer()) else {
            return Ok(None);
        };
        let own_class = spec.load_balancer_class.as_deref().filter(|class| !class.is_empty());
        if own_class != class {
            return Ok(None);
        }
        let families: Vec<Family> = cluster_ips(&object, spec)?.into_iter().map(Family::of).collect();
        let addresses = addresses(&object, metadata, spec, &families)?;
        let pool = annotation(metadata, "address-pool").map(|(_, pool)| pool.to_owned());
        Ok(Some(Self {
            created: metadata.creation_timestamp.clone(),
            labels: metadata.labels.clone().unwrap_or_default(),
            one_family_is_enough: spec.ip_family_policy.as_deref() == Some("PreferDualStack"),
            families,
            addresses,
            pool: pool.filter(|pool| !pool.is_empty()),
            internal: is_internal(metadata),
            terms: terms(metadata, spec),
            service: name,
        }))
    }
}

impl AddressRequest {
    /// Whether the Service names a pool or addresses. For such a Service, it does not matter whether the pool is
    /// internal.
    pub(super) fn names_pool_or_address(&self) -> bool {
        !self.addresses.is_empty() || self.pool.is_some()
    }
}

/// The addresses that the Service names: one in each of its families, or none.
fn addresses(
    object: &Object,
    metadata: &ObjectMeta,
    spec: &api::ServiceSpec,
    families: &[Family],
) -> Result<Vec<IpAddr>, ConvertError> {
    let annotation = annotation(metadata, "loadBalancerIPs").filter(|(_, text)| !text.is_empty());
    let field = spec.load_balancer_ip.as_deref().filter(|text| !text.is_empty());
    let (from, text) = match (annotation, field) {
        (None, None) => return Ok(Vec::new()),
        (Some((name, _)), Some(text)) => {
            let why = format!("annotation {name} and this field exclude each other; remove one of them");
            return Err(object.invalid("spec.loadBalancerIP", text, &why));
        }
        (Some((name, text)), None) => (format!("metadata.annotations[{name}]"), text),
        (None, Some(text)) => ("spec.loadBalancerIP".to_owned(), text),
    };
    let mut addresses = Vec::new();
    for part in text.split(',') {
        let ip = rules::stored_ip(part.trim()).map_err(|why| object.invalid(&from, part.trim(), why))?;
        addresses.push(ip);
    }
    let mut named: Vec<Family> = addresses.iter().map(|ip| Family::of(*ip)).collect();
    named.sort_unstable();
    let mut wanted = families.to_vec();
    wanted.sort_unstable();
    if named != wanted {
        let wanted: Vec<&str> = wanted.iter().map(|family| family.as_str()).collect();
        let why = format!("name one address of each family of the cluster IPs: {}", wanted.join(" and "));
        return Err(object.invalid(from, text, &why));
    }
    Ok(addresses)
}

fn is_internal(metadata: &ObjectMeta) -> bool {
    ASKS_FOR_INTERNAL.iter().any(|(name, values)| {
        let text = metadata.annotation(name).map(str::trim);
        text.is_some_and(|text| match values {
            [] => !ASKS_FOR_PUBLIC.contains(&text),
            values => values.contains(&text),
        })
    })
}

fn terms(metadata: &ObjectMeta, spec: &api::ServiceSpec) -> Terms {
    let text = annotation(metadata, "allow-shared-ip").map(|(_, text)| text.to_owned());
    let is_local = spec.external_traffic_policy.as_deref() == Some("Local");
    let selector = spec.selector.iter().flatten().map(|(key, value)| (key.clone(), value.clone()));
    let pods: Vec<_> = if is_local { selector.collect() } else { Vec::new() };
    // A Service without a selector may have any pods, so it shares only under `Cluster`.
    let shares = !is_local || !pods.is_empty();
    let key = text.filter(|text| !text.is_empty() && shares).map(|text| SharingKey { text, pods });
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        let protocol = rules::protocol(port.protocol_or_default())?;
        Some((protocol, rules::port_number(port.port).ok()?))
    });
    Terms { key, ports: ports.collect() }
}
