//! The validation of the API server (`pkg/apis/core/validation`, `pkg/apis/discovery/validation`) for the fields that a
//! service proxy uses. The rules for single values are in [`lb_core::rules`]; this module applies them to the fields.

use std::{collections::HashSet, fmt::Display, net::IpAddr};

use lb_core::{
    api::{self, IntOrString, ObjectMeta},
    convert::SERVICE_NAME,
    rules::{
        self, cluster_ips, names,
        service_ports::{self, PortNames},
    },
};

use super::condition::{FieldError, FieldErrors};

const MAX_ENDPOINTS: usize = 1000;
const MAX_ADDRESSES: usize = 100;

type Validation = Result<(), Vec<FieldError>>;

/// Checks a Service; the allocator checks addresses and node ports against their ranges.
pub(super) fn service(service: &api::Service) -> Validation {
    let mut errors = FieldErrors::default();
    metadata(&service.metadata, names::dns_1035_label, &mut errors);
    let Some(spec) = &service.spec else {
        errors.required("spec", "");
        return finish(errors);
    };
    one_of("spec.type", spec.service_type(), &rules::SERVICE_TYPES, &mut errors);
    errors.extend(cluster_ips::requested(spec).1);
    if spec.is_external_name() {
        external_name(spec, &mut errors);
    }
    service_ports(spec, &mut errors);
    session_affinity(spec, &mut errors);
    external_addresses(spec, service.status.as_ref(), &mut errors);
    traffic_policies(spec, &mut errors);
    finish(errors)
}

fn external_name(spec: &api::ServiceSpec, errors: &mut FieldErrors) {
    let name = spec.external_name();
    if name.is_empty() {
        errors.required("spec.externalName", "");
    } else if let Some(why) = names::dns_1123_subdomain(name) {
        errors.invalid("spec.externalName", name, why);
    }
}

fn service_ports(spec: &api::ServiceSpec, errors: &mut FieldErrors) {
    let ports = spec.ports.as_deref().unwrap_or_default();
    if ports.is_empty() && !spec.is_headless() && !spec.is_external_name() {
        errors.required("spec.ports", "");
    }
    let mut numbers = HashSet::new();
    let names = ports.iter().map(|port| port.name.as_deref());
    check_port_names("spec.ports", names, PortNames::of_service(ports.len()), errors);
    for (index, port) in ports.iter().enumerate() {
        let (path, protocol) = (format!("spec.ports[{index}]"), port.protocol_or_default());
        port_number(format_args!("{path}.port"), port.port, errors);
        one_of(format_args!("{path}.protocol"), protocol, &rules::PROTOCOLS, errors);
        target_port(&path, &port.target(), errors);
        if !numbers.insert((port.port, protocol)) {
            errors.push(&path, rules::duplicate_port(port.port, protocol));
        }
    }
    errors.extend(service_ports::node_ports(spec).1);
}

fn target_port(path: &str, port: &IntOrString, errors: &mut FieldErrors) {
    match port {
        IntOrString::Int(number) => port_number(format_args!("{path}.targetPort"), *number, errors),
        IntOrString::String(name) => {
            if let Some(why) = names::port_name(name) {
                errors.invalid(format_args!("{path}.targetPort"), name, why);
            }
        }
    }
}

fn session_affinity(spec: &api::ServiceSpec, errors: &mut FieldErrors) {
    one_of("spec.sessionAffinity", spec.affinity(), &rules::SESSION_AFFINITIES, errors);
    let seconds = spec.affinity_seconds();
    if spec.affinity() != "None"
        && let Err(why) = rules::affinity_seconds(seconds)
    {
        errors.invalid("spec.sessionAffinityConfig.clientIP.timeoutSeconds", seconds, why);
    }
}

/// Checks `externalIPs`, source ranges and the addresses in `status.loadBalancer` of a Service.
fn external_addresses(
    spec: &api::ServiceSpec,
    status: Option<&api::ServiceStatus>,
    errors: &mut FieldErrors,
) {
    for (index, address) in spec.external_ips.iter().flatten().enumerate() {
        usable_address(format_args!("spec.externalIPs[{index}]"), address, errors);
    }
    let is_load_balancer = spec.is_load_balancer();
    let ranges = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    if !ranges.is_empty() && !is_load_balancer {
        let why = "may only be used when `type` is 'LoadBalancer'";
        errors.forbidden("spec.loadBalancerSourceRanges", why);
    }
    for (index, range) in ranges.iter().enumerate() {
        if let Err(why) = rules::source_range(range) {
            errors.invalid(format_args!("spec.loadBalancerSourceRanges[{index}]"), range, why);
        }
    }
    let load_balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingress = load_balancer.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    if !ingress.is_empty() && !is_load_balancer {
        let why = "may only be used when `spec.type` is \"LoadBalancer\"";
        errors.forbidden("status.loadBalancer.ingress", why);
    }
    for (index, ingress) in ingress.iter().enumerate() {
        if let Some(address) = ingress.ip.as_deref().filter(|address| !address.is_empty()) {
            parse_address(format_args!("status.loadBalancer.ingress[{index}].ip"), address, errors);
        }
    }
}

fn traffic_policies(spec: &api::ServiceSpec, errors: &mut FieldErrors) {
    if let Some(policy) = &spec.internal_traffic_policy {
        one_of("spec.internalTrafficPolicy", policy, &rules::TRAFFIC_POLICIES, errors);
    }
    let has_port = spec.has_health_check_port();
    if let Some(port) = spec.health_check_node_port.filter(|port| *port != 0 && !has_port) {
        let why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        errors.invalid("spec.healthCheckNodePort", port, why);
    }
    let Some(policy) = &spec.external_traffic_policy else { return };
    let has_external_ips = spec.external_ips.as_ref().is_some_and(|addresses| !addresses.is_empty());
    if spec.has_node_ports() || has_external_ips {
        one_of("spec.externalTrafficPolicy", policy, &rules::TRAFFIC_POLICIES, errors);
    } else {
        let why = "may only be set for externally-accessible services";
        errors.invalid("spec.externalTrafficPolicy", policy, why);
    }
}

/// Checks an EndpointSlice. A slice that names no Service is valid, but gets a warning.
pub(super) fn endpoint_slice(slice: &api::EndpointSlice, warnings: &mut Vec<FieldError>) -> Validation {
    let mut errors = FieldErrors::default();
    metadata(&slice.metadata, names::dns_1123_subdomain, &mut errors);
    one_of("addressType", &slice.address_type, &rules::ADDRESS_TYPES, &mut errors);
    let endpoints = slice.endpoints.as_deref().unwrap_or_default();
    if endpoints.len() > MAX_ENDPOINTS {
        errors.too_many("endpoints", endpoints.len(), MAX_ENDPOINTS);
    }
    for (index, endpoint) in endpoints.iter().enumerate() {
        slice_addresses(index, &slice.address_type, &endpoint.addresses, &mut errors);
    }
    let ports = slice.ports.as_deref().unwrap_or_default();
    let names = ports.iter().map(|port| port.name.as_deref());
    check_port_names("ports", names, PortNames::optional(), &mut errors);
    for (index, port) in ports.iter().enumerate() {
        let protocol = port.protocol_or_default();
        one_of(format_args!("ports[{index}].protocol"), protocol, &rules::PROTOCOLS, &mut errors);
        if let Some(number) = port.port {
            port_number(format_args!("ports[{index}].port"), number, &mut errors);
        }
    }
    if slice.metadata.label(SERVICE_NAME).is_none_or(str::is_empty) {
        let message = "label kubernetes.io/service-name is missing: these endpoints belong to no Service";
        warnings.push(FieldError::new("metadata.labels", message));
    }
    finish(errors)
}

fn slice_addresses(endpoint: usize, address_type: &str, addresses: &[String], errors: &mut FieldErrors) {
    let path = format!("endpoints[{endpoint}].addresses");
    if addresses.is_empty() {
        errors.required(&path, "must contain at least 1 address");
    } else if addresses.len() > MAX_ADDRESSES {
        errors.too_many(&path, addresses.len(), MAX_ADDRESSES);
    }
    for (index, address) in addresses.iter().enumerate() {
        let field = format_args!("{path}[{index}]");
        let right_family = |ip: &IpAddr| ip.is_ipv4() == (address_type == "IPv4");
        match (address_type, address.parse::<IpAddr>()) {
            ("IPv4" | "IPv6", Ok(ip)) if right_family(&ip) => usable_address(field, address, errors),
            ("IPv4" | "IPv6", _) => {
                errors.invalid(field, address, format_args!("must be a valid {address_type} address"));
            }
            // Neither kube-proxy nor this agent uses slices with host names (`addressType: FQDN`).
            _ => {}
        }
    }
}

pub(super) fn endpoints(endpoints: &api::Endpoints) -> Validation {
    let mut errors = FieldErrors::default();
    metadata(&endpoints.metadata, names::dns_1123_subdomain, &mut errors);
    for (index, subset) in endpoints.subsets.iter().flatten().enumerate() {
        let path = format!("subsets[{index}]");
        let ready = subset.addresses.as_deref().unwrap_or_default();
        let not_ready = subset.not_ready_addresses.as_deref().unwrap_or_default();
        if ready.is_empty() && not_ready.is_empty() {
            errors.required(&path, "must specify `addresses` or `notReadyAddresses`");
        }
        for (field, addresses) in [("addresses", ready), ("notReadyAddresses", not_ready)] {
            for (index, address) in addresses.iter().enumerate() {
                usable_address(format_args!("{path}.{field}[{index}].ip"), &address.ip, &mut errors);
            }
        }
        let ports = subset.ports.as_deref().unwrap_or_default();
        let names = ports.iter().map(|port| port.name.as_deref());
        check_port_names(&format!("{path}.ports"), names, PortNames::of_service(ports.len()), &mut errors);
        for (index, port) in ports.iter().enumerate() {
            port_number(
                format_args!("{path}.ports[{index}].port"),
                port.port.unwrap_or_default(),
                &mut errors,
            );
            let protocol = port.protocol_or_default();
            one_of(format_args!("{path}.ports[{index}].protocol"), protocol, &rules::PROTOCOLS, &mut errors);
        }
    }
    finish(errors)
}

fn finish(FieldErrors(errors): FieldErrors) -> Validation {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

fn metadata(metadata: &ObjectMeta, name_form: fn(&str) -> Option<String>, errors: &mut FieldErrors) {
    let name = metadata.name.as_deref().unwrap_or_default();
    if let Some(why) = name_form(name) {
        errors.invalid("metadata.name", name, why);
    }
    let namespace = metadata.namespace_or_default();
    if let Some(why) = names::dns_1123_label(namespace) {
        errors.invalid("metadata.namespace", namespace, why);
    }
}

fn one_of(field: impl Display, value: &str, supported: &[&str], errors: &mut FieldErrors) {
    if let Err(why) = rules::one_of(value, supported) {
        errors.push(field, why);
    }
}

fn port_number(field: impl Display, number: i32, errors: &mut FieldErrors) {
    if let Err(why) = rules::port_number(number) {
        errors.invalid(field, number, why);
    }
}

/// Checks that each port name is empty or a DNS label, and that `known` accepts the name.
fn check_port_names<'a>(
    path: &str,
    names: impl Iterator<Item = Option<&'a str>>,
    mut known: PortNames<'a>,
    errors: &mut FieldErrors,
) {
    for (index, name) in names.map(Option::unwrap_or_default).enumerate() {
        let field = format_args!("{path}[{index}].name");
        if let Some(why) = names::dns_1123_label(name).filter(|_| !name.is_empty()) {
            errors.invalid(field, name, why);
        } else if let Err(why) = known.check(name) {
            errors.push(field, why);
        }
    }
}

fn parse_address(field: impl Display, text: &str, errors: &mut FieldErrors) -> Option<IpAddr> {
    rules::new_ip(text).inspect_err(|why| errors.invalid(field, text, why)).ok()
}

fn usable_address(field: impl Display, text: &str, errors: &mut FieldErrors) {
    if let Err(why) = rules::new_ip(text).and_then(rules::usable_ip) {
        errors.invalid(field, text, why);
    }
}
