//! Objects of the Kubernetes API → [`model`](crate::model), by kube-proxy's rules of what a service proxy looks at.

mod external;
mod ip;
mod scheduling;

use std::{net::IpAddr, sync::Arc};

use crate::{
    api::{self, ObjectMeta},
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, Hints, ObjectName, Protocol, Service, ServicePort,
    },
};

/// How the names of all annotations of ours begin.
pub const ANNOTATION_PREFIX: &str = "lb.dev/";

pub use self::scheduling::{MAGLEV_TABLE_SIZE, NORTH_SOUTH_MODE, SCHEDULER, WEIGHTS};

/// Services with this label are another proxy's business.
pub const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// EndpointSlices with this label belong to headless Services.
pub const HEADLESS: &str = "service.kubernetes.io/headless";
/// The Service an EndpointSlice belongs to.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Endpoints with this label set to `true` are not mirrored.
pub const SKIP_MIRROR: &str = "endpointslice.kubernetes.io/skip-mirror";

/// `timeoutSeconds` of `ClientIP` affinity where nothing is said: three hours.
const DEFAULT_AFFINITY_SECONDS: i32 = 10_800;
const MAX_AFFINITY_SECONDS: i32 = 86_400;

const NO_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";

/// A field of an object that an API server would refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} \"{object}\" is invalid: {field}: {why}")]
pub struct ConvertError {
    /// Kind of the object.
    pub kind: &'static str,
    /// `namespace/name` of the object.
    pub object: String,
    /// Path of the field, such as `spec.ports[0].port`.
    pub field: String,
    /// The value that was found there; empty where there is none.
    pub value: String,
    /// What is wrong with it, and what would be right.
    pub why: String,
}

/// What an object comes to. As in kube-proxy an odd address costs itself and not the object; who can have objects put right
/// asks for the [`whole`](Self::whole) of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted<T> {
    /// All of the object that can be served.
    pub value: T,
    /// What an API server would refuse of it.
    pub left_out: Vec<ConvertError>,
}

impl<T> Converted<T> {
    /// The same as something else.
    pub fn map<U>(self, into: impl FnOnce(T) -> U) -> Converted<U> {
        Converted { value: into(self.value), left_out: self.left_out }
    }

    /// The whole object.
    ///
    /// # Errors
    ///
    /// The first of what is left out.
    pub fn whole(self) -> Result<T, ConvertError> {
        self.left_out.into_iter().next().map_or(Ok(self.value), Err)
    }
}

impl<T> From<T> for Converted<T> {
    fn from(value: T) -> Self {
        Self { value, left_out: Vec::new() }
    }
}

/// The object an error is about.
pub(crate) struct Object {
    kind: &'static str,
    name: String,
}

impl Object {
    pub(crate) fn new(kind: &'static str, name: &ObjectName) -> Self {
        Self { kind, name: name.to_string() }
    }

    pub(crate) fn invalid(&self, field: impl Into<String>, value: impl ToString, why: &str) -> ConvertError {
        let value = value.to_string();
        self.error(field, value.clone(), format!("Invalid value: {value:?}: {why}"))
    }

    pub(crate) fn required(&self, field: impl Into<String>, why: &str) -> ConvertError {
        self.error(field, String::new(), format!("Required value: {why}"))
    }

    pub(crate) fn duplicate(&self, field: impl Into<String>, value: impl ToString) -> ConvertError {
        let value = value.to_string();
        self.error(field, value.clone(), format!("Duplicate value: {value:?}"))
    }

    pub(crate) fn unsupported(&self, field: impl Into<String>, value: &str, known: &[&str]) -> ConvertError {
        let why = format!("Unsupported value: {value:?}: supported values: {}", known.join(", "));
        self.error(field, value.to_owned(), why)
    }

    pub(crate) fn error(&self, field: impl Into<String>, value: String, why: String) -> ConvertError {
        ConvertError { kind: self.kind, object: self.name.clone(), field: field.into(), value, why }
    }

    fn port(&self, field: String, value: i32) -> Result<u16, ConvertError> {
        match u16::try_from(value) {
            Ok(port) if port > 0 => Ok(port),
            Ok(_) | Err(_) => Err(self.invalid(field, value, "must be between 1 and 65535, inclusive")),
        }
    }

    pub(crate) fn ip(&self, field: String, text: &str) -> Result<IpAddr, ConvertError> {
        match ip::parse_ip(text) {
            Some(IpAddr::V4(_)) if text.contains(':') => {
                Err(self.invalid(field, text, "must not be an IPv4-mapped IPv6 address: write it as IPv4"))
            }
            Some(ip) => Ok(ip),
            None => Err(self.invalid(field, text, NO_IP)),
        }
    }

    fn protocol(&self, field: String, protocol: Option<&str>) -> Result<Protocol, ConvertError> {
        match protocol.unwrap_or_default() {
            "" | "TCP" => Ok(Protocol::Tcp),
            "UDP" => Ok(Protocol::Udp),
            "SCTP" => Ok(Protocol::Sctp),
            unknown => Err(self.unsupported(field, unknown, &["SCTP", "TCP", "UDP"])),
        }
    }
}

/// `namespace/name` of an object; without a namespace it is in `default`.
///
/// # Errors
///
/// An object without a name.
pub fn object_name(kind: &'static str, metadata: &ObjectMeta) -> Result<ObjectName, ConvertError> {
    let namespace =
        metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or("default");
    match metadata.name.as_deref() {
        Some(name) if !name.is_empty() => Ok(ObjectName::new(namespace, name)),
        Some(_) | None => {
            Err(Object { kind, name: format!("{namespace}/") }.required("metadata.name", "name is required"))
        }
    }
}

/// A Service. One without virtual addresses (headless, `ExternalName`, no `clusterIP` yet) or with another proxy is
/// [`Change::Service`] with `None`. External addresses and source ranges that cannot be read are left out, and so are
/// values of enums that this version does not know: what they are set on has its default, or is not served.
///
/// # Errors
///
/// Any other field that an API server would refuse.
pub fn service(service: &api::Service) -> Result<Converted<Change>, ConvertError> {
    let name = object_name("Service", &service.metadata)?;
    let object = Object::new("Service", &name);
    let Some(spec) = &service.spec else { return Ok(Change::Service(name, None).into()) };
    if has_label(&service.metadata, SERVICE_PROXY_NAME) || spec.type_.as_deref() == Some("ExternalName") {
        return Ok(Change::Service(name, None).into());
    }
    let mut left_out: Vec<ConvertError> = unknown_type(&object, spec).into_iter().collect();
    let mut ports = service_ports(&object, spec.ports.as_deref().unwrap_or_default(), &mut left_out)?;
    if !external::has_node_ports(spec) {
        ports.iter_mut().for_each(|port| port.node_port = None);
    }
    let external = external::external(&object, spec, service.status.as_ref(), &mut left_out)?;
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
    let scheduling = scheduling::scheduling(&service.metadata);
    let service = Service { cluster_ips, ports, affinity_seconds, external, internal_policy, scheduling };
    Ok(Converted { value: Change::Service(name, Some(service)), left_out })
}

/// An unknown type is served like `ClusterIP`.
fn unknown_type(object: &Object, spec: &api::ServiceSpec) -> Option<ConvertError> {
    match spec.type_.as_deref().unwrap_or_default() {
        "" | "ClusterIP" | "NodePort" | "LoadBalancer" | "ExternalName" => None,
        unknown => {
            let known = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
            Some(object.unsupported("spec.type", unknown, &known))
        }
    }
}

/// The virtual addresses; none for a headless Service and one that has no address yet.
fn cluster_ips(object: &Object, spec: &api::ServiceSpec) -> Result<Vec<IpAddr>, ConvertError> {
    let requested = requested_ips(spec);
    if is_headless(spec) {
        return Ok(Vec::new());
    }
    let mut ips: Vec<IpAddr> = Vec::new();
    for (index, text) in requested.iter().enumerate() {
        let field = format!("spec.clusterIPs[{index}]");
        let ip = object.ip(field.clone(), text)?;
        if ips.iter().any(|other| other.is_ipv4() == ip.is_ipv4()) {
            return Err(object.invalid(field, text, "may hold at most one address of each family"));
        }
        ips.push(ip);
    }
    Ok(ips)
}

/// Whether the Service asks for no virtual address at all.
pub fn is_headless(spec: &api::ServiceSpec) -> bool {
    requested_ips(spec).first().is_some_and(|ip| *ip == "None")
}

/// `spec.clusterIPs`, or `spec.clusterIP` where there is no list.
pub(crate) fn requested_ips(spec: &api::ServiceSpec) -> Vec<&str> {
    let list = spec.cluster_ips.as_deref().unwrap_or_default().iter().map(String::as_str);
    let list: Vec<&str> = list.filter(|ip| !ip.is_empty()).collect();
    match spec.cluster_ip.as_deref() {
        Some(ip) if list.is_empty() && !ip.is_empty() => vec![ip],
        Some(_) | None => list,
    }
}

/// Ports without a number, and those of a protocol that is not known, are left out.
fn service_ports(
    object: &Object,
    ports: &[api::ServicePort],
    left_out: &mut Vec<ConvertError>,
) -> Result<Vec<ServicePort>, ConvertError> {
    let mut converted: Vec<ServicePort> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for (index, port) in ports.iter().enumerate() {
        let path = format!("spec.ports[{index}]");
        let name = port.name.as_deref().unwrap_or("");
        if name.is_empty() && ports.len() > 1 {
            return Err(object.required(format!("{path}.name"), "each of several ports needs a name"));
        }
        if names.contains(&name) {
            return Err(object.duplicate(format!("{path}.name"), name));
        }
        names.push(name);
        if port.port == 0 {
            left_out.push(object.required(format!("{path}.port"), "a port needs a number"));
            continue;
        }
        let protocol = match object.protocol(format!("{path}.protocol"), port.protocol.as_deref()) {
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
            return Err(object.duplicate(path, format!("{number}/{}", protocol.as_str())));
        }
        converted.push(ServicePort { name: name.into(), protocol, port: number, node_port });
    }
    Ok(converted)
}

/// An unknown affinity is none.
fn affinity(
    object: &Object,
    spec: &api::ServiceSpec,
    left_out: &mut Vec<ConvertError>,
) -> Result<Option<u32>, ConvertError> {
    match spec.session_affinity.as_deref().unwrap_or("None") {
        "" | "None" => return Ok(None),
        "ClientIP" => {}
        unknown => {
            left_out.push(object.unsupported("spec.sessionAffinity", unknown, &["ClientIP", "None"]));
            return Ok(None);
        }
    }
    let client_ip = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let seconds = client_ip.and_then(|config| config.timeout_seconds).unwrap_or(DEFAULT_AFFINITY_SECONDS);
    match u32::try_from(seconds) {
        Ok(valid) if (1..=MAX_AFFINITY_SECONDS).contains(&seconds) => Ok(Some(valid)),
        Ok(_) | Err(_) => Err(object.invalid(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            seconds,
            "must be greater than 0 and at most 86400",
        )),
    }
}

/// An EndpointSlice. One of no Service, of a headless Service, or whose addresses are neither IPv4 nor IPv6 is
/// [`Change::EndpointSlice`] with `None`. Endpoints whose address can be none, and ports that cannot be read, are left out.
///
/// # Errors
///
/// Any other field that an API server would refuse.
pub fn endpoint_slice(slice: &api::EndpointSlice) -> Result<Converted<Change>, ConvertError> {
    let name = object_name("EndpointSlice", &slice.metadata)?;
    let object = Object::new("EndpointSlice", &name);
    let service = slice.metadata.label(SERVICE_NAME).filter(|service| !service.is_empty());
    let is_v4 = match slice.address_type.as_str() {
        "IPv4" => true,
        "IPv6" => false,
        "FQDN" => return Ok(Change::EndpointSlice(name, None).into()),
        unknown => {
            let left_out = vec![object.unsupported("addressType", unknown, &["FQDN", "IPv4", "IPv6"])];
            return Ok(Converted { value: Change::EndpointSlice(name, None), left_out });
        }
    };
    let Some(service) = service.filter(|_| !has_label(&slice.metadata, HEADLESS)) else {
        return Ok(Change::EndpointSlice(name, None).into());
    };
    let service = ObjectName { namespace: name.namespace.clone(), name: service.into() };
    let mut left_out = Vec::new();
    let ports = slice.ports.iter().flatten().enumerate();
    let ports = readable(ports.map(|(index, port)| slice_port(&object, index, port)), &mut left_out);
    let endpoints = slice.endpoints.iter().flatten().enumerate();
    let endpoints = endpoints.map(|(index, endpoint)| slice_endpoint(&object, index, endpoint, is_v4));
    let endpoints = readable(endpoints, &mut left_out);
    let value = Change::EndpointSlice(name, Some(EndpointSlice { service, ports, endpoints }));
    Ok(Converted { value, left_out })
}

/// The parts of an object that are something and can be read.
fn readable<T>(
    parts: impl Iterator<Item = Result<Option<T>, ConvertError>>,
    left_out: &mut Vec<ConvertError>,
) -> Vec<T> {
    let mut found = Vec::new();
    for part in parts {
        match part {
            Ok(part) => found.extend(part),
            Err(error) => left_out.push(error),
        }
    }
    found
}

/// A port without a name or a number means nothing to kube-proxy, and so to us.
fn slice_port(
    object: &Object,
    index: usize,
    port: &api::EndpointPort,
) -> Result<Option<EndpointPort>, ConvertError> {
    let protocol = object.protocol(format!("ports[{index}].protocol"), port.protocol.as_deref())?;
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
    is_v4: bool,
) -> Result<Option<Endpoint>, ConvertError> {
    let Some(text) = endpoint.addresses.first() else { return Ok(None) };
    let field = format!("endpoints[{index}].addresses[0]");
    let address = object.ip(field.clone(), text)?;
    if address.is_ipv4() != is_v4 {
        let why = if is_v4 { "must be a valid IPv4 address" } else { "must be a valid IPv6 address" };
        return Err(object.invalid(field, text, why));
    }
    usable(object, field, address)?;
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

/// Addresses that can be no endpoint's, as the API server has it.
fn usable(object: &Object, field: String, address: IpAddr) -> Result<(), ConvertError> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let why = if address.is_unspecified() {
        "may not be unspecified (0.0.0.0 or ::)"
    } else if address.is_loopback() {
        "may not be in the loopback range (127.0.0.0/8, ::1/128)"
    } else if link_local {
        "may not be in the link-local range (169.254.0.0/16, fe80::/10)"
    } else if address.is_multicast() {
        "may not be a multicast address (224.0.0.0/4, ff00::/8)"
    } else {
        return Ok(());
    };
    Err(object.invalid(field, address, why))
}

/// Endpoints, mirrored into EndpointSlices as Kubernetes does it: one for each subset and family, with a name that
/// no object of the API can have. Who keeps track of the Endpoints removes the slices that are there no more.
///
/// # Errors
///
/// A field that an API server would refuse.
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
            object.protocol(format!("{path}.ports[{index}].protocol"), port.protocol.as_deref())?;
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
    let ip = object.ip(field.clone(), &address.ip)?;
    usable(object, field, ip)?;
    Ok(Endpoint {
        address: ip,
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

fn text_of(text: Option<&String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty()).map(|text| text.as_str().into())
}

fn has_label(metadata: &ObjectMeta, label: &str) -> bool {
    metadata.label(label).is_some()
}
