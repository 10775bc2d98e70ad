//! Converts objects of the Kubernetes API to the [`model`](crate::model), by the rules of kube-proxy.

mod annotations;
mod aws;
mod clouds;
mod connection_ends;
mod error;
mod external;
mod health;
mod limits;
mod proxy_protocol;
mod values;

use std::{net::IpAddr, sync::Arc};

use self::error::readable;
use crate::{
    api::{self, ObjectMeta},
    family::Family,
    model::{Change, Endpoint, EndpointPort, EndpointSlice, Hints, ObjectName, Service, ServicePort},
    rules::{self, FieldError, names, service_ports::PortNames},
};

/// The prefix of this project's annotations.
pub const ANNOTATION_PREFIX: &str = "lb.dev/";

pub(crate) use self::error::Object;
pub use self::{
    annotations::{
        ACCESS_LOG, ACCESS_LOG_INTERVAL, MAGLEV_TABLE_SIZE, NORTH_SOUTH_MODE, SCHEDULER, SLOW_START, WEIGHTS,
    },
    aws::Origin,
    clouds::{ignored_names, is_of_cloud},
    connection_ends::{DRAIN_TIMEOUT, IDLE_TIMEOUT},
    error::{ConvertError, Converted},
    health::{FAIL_CLOSED, HEALTH_CHECK, HEALTHY_THRESHOLD, INTERVAL, TIMEOUT, UNHEALTHY_THRESHOLD},
    limits::{MAX_CONNECTIONS, MAX_CONNECTIONS_PER_CLIENT},
    proxy_protocol::PROXY_PROTOCOL,
};
pub(crate) use self::{
    clouds::{ASKS_FOR_INTERNAL, ASKS_FOR_PUBLIC},
    health::{has_invalid_check, has_invalid_fail_closed},
};

/// Label of Services that another proxy serves.
pub const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// Label of EndpointSlices of headless Services.
pub const HEADLESS: &str = "service.kubernetes.io/headless";
/// Label that names the Service of an EndpointSlice.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of Endpoints; with the value `true`, Kubernetes does not mirror them to EndpointSlices.
pub const SKIP_MIRROR: &str = "endpointslice.kubernetes.io/skip-mirror";

/// `namespace/name` of an object; the namespace is `default` if unset.
///
/// # Errors
///
/// An object without a name, or with a name or namespace that no API server would accept.
pub fn object_name(kind: &'static str, metadata: &ObjectMeta) -> Result<ObjectName, ConvertError> {
    let (namespace, name) = (metadata.namespace_or_default(), metadata.name.as_deref().unwrap_or_default());
    let full = ObjectName::new(namespace, name);
    if name.is_empty() {
        return Err(Object::new(kind, &full).required("metadata.name", "name is required"));
    }
    let of_name = names::dns_1123_subdomain(name).map(|why| ("metadata.name", name, why));
    let of_namespace = || names::dns_1123_label(namespace).map(|why| ("metadata.namespace", namespace, why));
    match of_name.or_else(of_namespace) {
        Some((field, value, why)) => Err(Object::new(kind, &full).invalid(field, value, &why)),
        None => Ok(full),
    }
}

/// Converts a Service. A Service without virtual addresses (headless, `ExternalName`, no `clusterIP` yet) becomes
/// [`Change::Service`] with `None`. A Service that another proxy serves keeps only its cluster IPs. Invalid external
/// addresses, invalid source ranges and ports without a number are left out. An unknown enum value is replaced by the
/// default of its field, or the list item that contains it is left out.
///
/// # Errors
///
/// A Service without a valid name, or with an invalid or duplicate port, an invalid cluster IP, `healthCheckNodePort`
/// or affinity timeout.
pub fn service(service: &api::Service, origin: Origin) -> Result<Converted<Change>, ConvertError> {
    let name = object_name("Service", &service.metadata)?;
    let object = Object::new("Service", &name);
    let Some(spec) = &service.spec else { return Ok(Change::Service(name, None).into()) };
    if spec.is_external_name() {
        return Ok(Change::Service(name, None).into());
    }
    if has_label(&service.metadata, SERVICE_PROXY_NAME) {
        let foreign = foreign(cluster_ips(&object, spec)?);
        return Ok(Change::Service(name, foreign).into());
    }
    let mut left_out: Vec<ConvertError> = unknown_type(&object, spec).into_iter().collect();
    let mut ports = service_ports(&object, spec.ports.as_deref().unwrap_or_default(), &mut left_out)?;
    if !spec.has_node_ports() {
        ports.iter_mut().for_each(|port| port.node_port = None);
    }
    let external = external::external(&object, service, spec, &mut left_out)?;
    let internal = spec.internal_traffic_policy.as_deref();
    let internal_policy =
        external::traffic_policy(&object, "spec.internalTrafficPolicy", internal, &mut left_out);
    let affinity_seconds = affinity(&object, spec, &mut left_out)?;
    let cluster_ips = cluster_ips(&object, spec)?;
    if cluster_ips.is_empty() {
        return Ok(Change::Service(name, None).into());
    }
    if spec.ports.as_ref().is_none_or(Vec::is_empty) {
        left_out.push(object.required("spec.ports", "a Service with a cluster IP needs a port"));
    }
    let settings = annotations::read(service, origin);
    let is_foreign = false;
    let service =
        Service { cluster_ips, is_foreign, ports, affinity_seconds, external, internal_policy, settings };
    Ok(Converted { value: Change::Service(name, Some(service)), left_out })
}

/// A Service that another proxy serves at these cluster IPs; `None` if there are none.
fn foreign(cluster_ips: Vec<IpAddr>) -> Option<Service> {
    let has_address = !cluster_ips.is_empty();
    has_address.then(|| Service { cluster_ips, is_foreign: true, ..Service::default() })
}

/// The error for an unknown `spec.type`; the Service is served as with `ClusterIP`.
fn unknown_type(object: &Object, spec: &api::ServiceSpec) -> Option<ConvertError> {
    let unknown = Some(spec.service_type()).filter(|name| !rules::SERVICE_TYPES.contains(name))?;
    Some(object.unsupported("spec.type", unknown, &rules::SERVICE_TYPES))
}

/// The cluster IPs; none for a headless Service, or for a Service without an address yet.
pub(crate) fn cluster_ips(object: &Object, spec: &api::ServiceSpec) -> Result<Vec<IpAddr>, ConvertError> {
    rules::cluster_ips::stored(spec).map_err(|FieldError { field, why }| object.error(field, why))
}

/// The ports of the Service, without the ports that lack a number or have an unknown protocol.
fn service_ports(
    object: &Object,
    ports: &[api::ServicePort],
    left_out: &mut Vec<ConvertError>,
) -> Result<Vec<ServicePort>, ConvertError> {
    let mut converted: Vec<ServicePort> = Vec::new();
    let mut names = PortNames::of_service(ports.len());
    for (index, port) in ports.iter().enumerate() {
        let path = format!("spec.ports[{index}]");
        let name = port.name.as_deref().unwrap_or("");
        names.check(name).map_err(|why| object.error(format!("{path}.name"), why))?;
        if port.port == 0 {
            left_out.push(object.required(format!("{path}.port"), "a port needs a number"));
            continue;
        }
        let protocol = match object.protocol(format!("{path}.protocol"), port.protocol_or_default()) {
            Ok(protocol) => protocol,
            Err(unknown) => {
                left_out.push(unknown);
                continue;
            }
        };
        let number = object.port(format!("{path}.port"), port.port)?;
        let node_port = port.node_port.filter(|port| *port != 0);
        let node_port = node_port.map(|port| object.port(format!("{path}.nodePort"), port)).transpose()?;
        if converted.iter().any(|other| (other.port, other.protocol) == (number, protocol)) {
            return Err(object.error(path, rules::duplicate_port(port.port, protocol.as_str())));
        }
        converted.push(ServicePort { name: name.into(), protocol, port: number, node_port });
    }
    Ok(converted)
}

/// The affinity timeout; an unknown affinity counts as none.
fn affinity(
    object: &Object,
    spec: &api::ServiceSpec,
    left_out: &mut Vec<ConvertError>,
) -> Result<Option<u32>, ConvertError> {
    match spec.affinity() {
        "None" => return Ok(None),
        "ClientIP" => {}
        unknown => {
            left_out.push(object.unsupported("spec.sessionAffinity", unknown, &rules::SESSION_AFFINITIES));
            return Ok(None);
        }
    }
    let seconds = spec.affinity_seconds();
    let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
    rules::affinity_seconds(seconds).map(Some).map_err(|why| object.invalid(field, seconds, why))
}

/// Converts an EndpointSlice. A slice of no Service, of a headless Service, or with addresses that are neither IPv4 nor
/// IPv6 becomes [`Change::EndpointSlice`] with `None`. Invalid ports, and endpoints with an invalid address, are left
/// out.
///
/// # Errors
///
/// An EndpointSlice without a valid name.
pub fn endpoint_slice(slice: &api::EndpointSlice) -> Result<Converted<Change>, ConvertError> {
    let name = object_name("EndpointSlice", &slice.metadata)?;
    let object = Object::new("EndpointSlice", &name);
    let service = slice.metadata.label(SERVICE_NAME).filter(|service| !service.is_empty());
    let Some(family) = Family::from_name(&slice.address_type) else {
        let unknown = (!rules::ADDRESS_TYPES.contains(&&*slice.address_type))
            .then(|| object.unsupported("addressType", &slice.address_type, &rules::ADDRESS_TYPES));
        let left_out = unknown.into_iter().collect();
        return Ok(Converted { value: Change::EndpointSlice(name, None), left_out });
    };
    let Some(service) = service.filter(|_| !has_label(&slice.metadata, HEADLESS)) else {
        return Ok(Change::EndpointSlice(name, None).into());
    };
    let service = ObjectName { namespace: name.namespace.clone(), name: service.into() };
    let mut left_out = Vec::new();
    let ports = slice.ports.iter().flatten().enumerate();
    let ports = readable(ports.map(|(index, port)| slice_port(&object, index, port)), &mut left_out);
    let endpoints = slice.endpoints.iter().flatten().enumerate();
    let endpoints = endpoints.map(|(index, endpoint)| slice_endpoint(&object, index, endpoint, family));
    let endpoints = readable(endpoints, &mut left_out);
    let value = Change::EndpointSlice(name, Some(EndpointSlice { service, ports, endpoints }));
    Ok(Converted { value, left_out })
}

/// A port of an EndpointSlice. As in kube-proxy, `None` if the port has no number, or if its `name` is unset (an empty
/// name is valid).
fn slice_port(
    object: &Object,
    index: usize,
    port: &api::EndpointPort,
) -> Result<Option<EndpointPort>, ConvertError> {
    let protocol = object.protocol(format!("ports[{index}].protocol"), port.protocol_or_default())?;
    let (Some(name), Some(number)) = (port.name.as_deref(), port.port.filter(|port| *port != 0)) else {
        return Ok(None);
    };
    let port = object.port(format!("ports[{index}].port"), number)?;
    Ok(Some(EndpointPort { name: name.into(), protocol, port }))
}

fn slice_endpoint(
    object: &Object,
    index: usize,
    endpoint: &api::Endpoint,
    family: Family,
) -> Result<Option<Endpoint>, ConvertError> {
    let Some(text) = endpoint.addresses.first() else { return Ok(None) };
    let field = format!("endpoints[{index}].addresses[0]");
    let address = object.ip(field.clone(), text)?;
    if Family::of(address) != family {
        let why = format!("must be a valid {} address", family.as_str());
        return Err(object.invalid(field, text, &why));
    }
    rules::endpoint_ip(address).map_err(|why| object.invalid(field, text, why))?;
    let conditions = &endpoint.conditions;
    Ok(Some(Endpoint {
        address,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        node: text_of(endpoint.node_name.as_ref()),
        zone: text_of(endpoint.zone.as_ref()),
        pod: pod(&endpoint.target_ref),
        hints: hints(&endpoint.hints),
    }))
}

fn hints(hints: &api::EndpointHints) -> Option<Arc<Hints>> {
    let zones: Vec<Arc<str>> =
        hints.for_zones.iter().flatten().map(|zone| zone.name.as_str().into()).collect();
    let nodes: Vec<Arc<str>> =
        hints.for_nodes.iter().flatten().map(|node| node.name.as_str().into()).collect();
    (!zones.is_empty() || !nodes.is_empty()).then(|| Arc::new(Hints { zones, nodes }))
}

/// Converts Endpoints to EndpointSlices, as Kubernetes mirrors them: one for each subset and family, with a name that
/// no object of the API can have. Returns no slices if the label [`SKIP_MIRROR`] is `true`. The caller deletes slices
/// that are no longer returned.
///
/// # Errors
///
/// Endpoints without a valid name, or with an invalid port, protocol or address.
pub fn endpoints(endpoints: &api::Endpoints) -> Result<Vec<(ObjectName, EndpointSlice)>, ConvertError> {
    let name = object_name("Endpoints", &endpoints.metadata)?;
    let object = Object::new("Endpoints", &name);
    if endpoints.metadata.label(SKIP_MIRROR) == Some("true") {
        return Ok(Vec::new());
    }
    let mut slices = Vec::new();
    for (index, subset) in endpoints.subsets.iter().flatten().enumerate() {
        let path = format!("subsets[{index}]");
        let ports = subset_ports(&object, &path, subset)?;
        let found = subset_endpoints(&object, &path, subset)?;
        for (is_v4, family) in [(true, "ipv4"), (false, "ipv6")] {
            let endpoints: Vec<Endpoint> =
                found.iter().filter(|e| e.address.is_ipv4() == is_v4).cloned().collect();
            if !endpoints.is_empty() {
                let slice = format!("endpoints/{}/{index}/{family}", name.name);
                let slice = ObjectName { namespace: name.namespace.clone(), name: slice.into() };
                let ports = ports.clone();
                slices.push((slice, EndpointSlice { service: name.clone(), ports, endpoints }));
            }
        }
    }
    Ok(slices)
}

fn subset_ports(
    object: &Object,
    path: &str,
    subset: &api::EndpointSubset,
) -> Result<Vec<EndpointPort>, ConvertError> {
    let mut ports = Vec::new();
    for (index, port) in subset.ports.iter().flatten().enumerate() {
        let number = object.port(format!("{path}.ports[{index}].port"), port.port.unwrap_or_default())?;
        let protocol =
            object.protocol(format!("{path}.ports[{index}].protocol"), port.protocol_or_default())?;
        let name = port.name.as_deref().unwrap_or("");
        ports.push(EndpointPort { name: name.into(), protocol, port: number });
    }
    Ok(ports)
}

fn subset_endpoints(
    object: &Object,
    path: &str,
    subset: &api::EndpointSubset,
) -> Result<Vec<Endpoint>, ConvertError> {
    let lists =
        [("addresses", &subset.addresses, true), ("notReadyAddresses", &subset.not_ready_addresses, false)];
    let mut endpoints = Vec::new();
    for (list, addresses, ready) in lists {
        for (index, address) in addresses.iter().flatten().enumerate() {
            endpoints.push(subset_endpoint(object, format!("{path}.{list}[{index}].ip"), address, ready)?);
        }
    }
    Ok(endpoints)
}

fn subset_endpoint(
    object: &Object,
    field: String,
    address: &api::EndpointAddress,
    ready: bool,
) -> Result<Endpoint, ConvertError> {
    Ok(Endpoint {
        address: object.endpoint_ip(field, &address.ip)?,
        ready,
        serving: ready,
        terminating: false,
        node: text_of(address.node_name.as_ref()),
        zone: None,
        pod: pod(&address.target_ref),
        hints: None,
    })
}

fn pod(target: &api::ObjectReference) -> Option<Arc<str>> {
    if target.kind.as_deref() == Some("Pod") { text_of(target.name.as_ref()) } else { None }
}

/// The text; `None` if it is empty, or has control characters, which commands would print to a user's terminal.
fn text_of(text: Option<&String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty() && !text.contains(char::is_control)).map(|text| text.as_str().into())
}

fn has_label(metadata: &ObjectMeta, label: &str) -> bool {
    metadata.label(label).is_some()
}
