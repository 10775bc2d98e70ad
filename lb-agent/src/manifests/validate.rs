//! The validation of the API server (`pkg/apis/core/validation`, `pkg/apis/discovery/validation`), as far as it concerns
//! what a service proxy uses. The rules for single values are in [`lb_core::rules`]; here is which field has which.

use std::{collections::HashSet, fmt::Display, net::IpAddr};

use lb_core::{
    api::{self, IntOrString, ObjectMeta},
    convert::SERVICE_NAME,
    rules,
};

use super::{
    names,
    problem::{Fault, Faults},
};

const MAX_ENDPOINTS: usize = 1000;
const MAX_ADDRESSES: usize = 100;

type Outcome = Result<(), Vec<Fault>>;

/// Checks a Service; addresses and node ports against their ranges is the allocator's part.
pub(super) fn service(service: &api::Service) -> Outcome {
    let mut faults = Faults::default();
    metadata(&service.metadata, names::dns_1035_label, &mut faults);
    let Some(spec) = &service.spec else {
        faults.required("spec", "");
        return finish(faults);
    };
    one_of("spec.type", spec.service_type(), &rules::SERVICE_TYPES, &mut faults);
    cluster_ips(spec, &mut faults);
    if spec.is_external_name() {
        external_name(spec, &mut faults);
    }
    service_ports(spec, &mut faults);
    session_affinity(spec, &mut faults);
    external_addresses(spec, service.status.as_ref(), &mut faults);
    traffic_policies(spec, &mut faults);
    finish(faults)
}

fn cluster_ips(spec: &api::ServiceSpec, faults: &mut Faults) {
    families(spec, faults);
    let single = spec.cluster_ip.as_slice().iter().filter(|address| !address.is_empty());
    let single: Vec<&String> = single.collect();
    let list: Vec<&String> = spec.cluster_ips.iter().flatten().collect();
    let (field, addresses) =
        if list.is_empty() { ("spec.clusterIP", &single) } else { ("spec.clusterIPs", &list) };
    if spec.is_external_name() {
        if !addresses.is_empty() {
            faults.forbidden(field, "may not be set for ExternalName services");
        }
        return;
    }
    if let ([single], [first, ..]) = (&single[..], &list[..])
        && single != first
    {
        faults.invalid(field, &list, "first value must match `clusterIP`");
    }
    if spec.is_headless() {
        headless(spec, field, addresses, faults);
        return;
    }
    if addresses.len() > 2 {
        faults.invalid(field, addresses, "may only hold up to 2 values");
    }
    let parsed: Vec<_> =
        addresses.iter().filter_map(|address| parse_address(field, address, faults)).collect();
    if let [first, second] = parsed[..]
        && first.is_ipv4() == second.is_ipv4()
    {
        faults.invalid(field, addresses, rules::ONE_IP_PER_FAMILY);
    }
}

fn headless(spec: &api::ServiceSpec, field: &str, addresses: &[&String], faults: &mut Faults) {
    if addresses.len() > 1 {
        faults.invalid(field, addresses, "'None' must be the first and only value");
    }
    if spec.has_node_ports() {
        let kind = spec.service_type();
        faults.invalid(field, "None", format_args!("may not be set to 'None' for {kind} services"));
    }
}

fn families(spec: &api::ServiceSpec, faults: &mut Faults) {
    if let Some(policy) = &spec.ip_family_policy {
        one_of("spec.ipFamilyPolicy", policy, &rules::IP_FAMILY_POLICIES, faults);
    }
    let mut seen = HashSet::new();
    for (index, family) in spec.ip_families.iter().flatten().enumerate() {
        if !rules::IP_FAMILIES.contains(&family.as_str()) {
            faults.unsupported(format_args!("spec.ipFamilies[{index}]"), family, &rules::IP_FAMILIES);
        } else if !seen.insert(family) {
            faults.duplicate(format_args!("spec.ipFamilies[{index}]"), family);
        }
    }
}

fn external_name(spec: &api::ServiceSpec, faults: &mut Faults) {
    match spec.external_name.as_deref().map(|name| name.strip_suffix('.').unwrap_or(name)) {
        None | Some("") => faults.required("spec.externalName", ""),
        Some(name) => {
            if let Some(why) = names::dns_1123_subdomain(name) {
                faults.invalid("spec.externalName", name, why);
            }
        }
    }
}

fn service_ports(spec: &api::ServiceSpec, faults: &mut Faults) {
    let ports = spec.ports.as_deref().unwrap_or_default();
    if ports.is_empty() && !spec.is_headless() && !spec.is_external_name() {
        faults.required("spec.ports", "");
    }
    let (mut numbers, mut node_ports) = (HashSet::new(), HashSet::new());
    check_port_names("spec.ports", ports.iter().map(|port| port.name.as_deref()), ports.len() > 1, faults);
    for (index, port) in ports.iter().enumerate() {
        let (path, protocol) = (format!("spec.ports[{index}]"), port.protocol_or_default());
        port_number(format_args!("{path}.port"), port.port, faults);
        one_of(format_args!("{path}.protocol"), protocol, &rules::PROTOCOLS, faults);
        target_port(&path, &port.target(), faults);
        if !numbers.insert((port.port, protocol)) {
            faults.push(&path, rules::duplicate_port(port.port, protocol));
        }
        let Some(node_port) = port.node_port.filter(|number| *number != 0) else { continue };
        let field = format!("{path}.nodePort");
        if !spec.has_node_ports() {
            faults.push(field, rules::no_node_port(spec.service_type()));
        } else if let Err(why) = rules::port_number(node_port) {
            faults.invalid(field, node_port, why);
        } else if !node_ports.insert((node_port, protocol)) {
            faults.duplicate(field, node_port);
        }
    }
}

fn target_port(path: &str, port: &IntOrString, faults: &mut Faults) {
    match port {
        IntOrString::Int(number) => port_number(format_args!("{path}.targetPort"), *number, faults),
        IntOrString::String(name) => {
            if let Some(why) = names::port_name(name) {
                faults.invalid(format_args!("{path}.targetPort"), name, why);
            }
        }
    }
}

fn session_affinity(spec: &api::ServiceSpec, faults: &mut Faults) {
    one_of("spec.sessionAffinity", spec.affinity(), &rules::SESSION_AFFINITIES, faults);
    let seconds = spec.affinity_seconds();
    if spec.affinity() != "None"
        && let Err(why) = rules::affinity_seconds(seconds)
    {
        faults.invalid("spec.sessionAffinityConfig.clientIP.timeoutSeconds", seconds, why);
    }
}

/// `externalIPs`, source ranges and the addresses of a load balancer.
fn external_addresses(spec: &api::ServiceSpec, status: Option<&api::ServiceStatus>, faults: &mut Faults) {
    for (index, address) in spec.external_ips.iter().flatten().enumerate() {
        usable_address(format_args!("spec.externalIPs[{index}]"), address, faults);
    }
    let is_load_balancer = spec.is_load_balancer();
    let ranges = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    if !ranges.is_empty() && !is_load_balancer {
        let why = "may only be used when `type` is 'LoadBalancer'";
        faults.forbidden("spec.loadBalancerSourceRanges", why);
    }
    for (index, range) in ranges.iter().enumerate() {
        if !is_cidr(range.trim()) {
            faults.invalid(format_args!("spec.loadBalancerSourceRanges[{index}]"), range, rules::NO_CIDR);
        }
    }
    let load_balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingress = load_balancer.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    if !ingress.is_empty() && !is_load_balancer {
        let why = "may only be used when `spec.type` is \"LoadBalancer\"";
        faults.forbidden("status.loadBalancer.ingress", why);
    }
    for (index, ingress) in ingress.iter().enumerate() {
        if let Some(address) = ingress.ip.as_deref().filter(|address| !address.is_empty()) {
            parse_address(format_args!("status.loadBalancer.ingress[{index}].ip"), address, faults);
        }
    }
}

fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else { return false };
    let limit = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    length.parse::<u8>().is_ok_and(|length| length <= limit)
}

fn traffic_policies(spec: &api::ServiceSpec, faults: &mut Faults) {
    if let Some(policy) = &spec.internal_traffic_policy {
        one_of("spec.internalTrafficPolicy", policy, &rules::TRAFFIC_POLICIES, faults);
    }
    let has_port = spec.has_health_check_port();
    if let Some(port) = spec.health_check_node_port.filter(|port| *port != 0 && !has_port) {
        let why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        faults.invalid("spec.healthCheckNodePort", port, why);
    }
    let Some(policy) = &spec.external_traffic_policy else { return };
    let has_external_ips = spec.external_ips.as_ref().is_some_and(|addresses| !addresses.is_empty());
    if spec.has_node_ports() || has_external_ips {
        one_of("spec.externalTrafficPolicy", policy, &rules::TRAFFIC_POLICIES, faults);
    } else {
        let why = "may only be set for externally-accessible services";
        faults.invalid("spec.externalTrafficPolicy", policy, why);
    }
}

/// Checks an EndpointSlice. One that belongs to no Service is valid, but probably not meant.
pub(super) fn endpoint_slice(slice: &api::EndpointSlice, warnings: &mut Vec<Fault>) -> Outcome {
    let mut faults = Faults::default();
    metadata(&slice.metadata, names::dns_1123_subdomain, &mut faults);
    one_of("addressType", &slice.address_type, &rules::ADDRESS_TYPES, &mut faults);
    let endpoints = slice.endpoints.as_deref().unwrap_or_default();
    if endpoints.len() > MAX_ENDPOINTS {
        faults.too_many("endpoints", endpoints.len(), MAX_ENDPOINTS);
    }
    for (index, endpoint) in endpoints.iter().enumerate() {
        slice_addresses(index, &slice.address_type, &endpoint.addresses, &mut faults);
    }
    let ports = slice.ports.as_deref().unwrap_or_default();
    check_port_names("ports", ports.iter().map(|port| port.name.as_deref()), false, &mut faults);
    for (index, port) in ports.iter().enumerate() {
        let protocol = port.protocol_or_default();
        one_of(format_args!("ports[{index}].protocol"), protocol, &rules::PROTOCOLS, &mut faults);
        if let Some(number) = port.port {
            port_number(format_args!("ports[{index}].port"), number, &mut faults);
        }
    }
    if slice.metadata.label(SERVICE_NAME).is_none_or(str::is_empty) {
        let message = "label kubernetes.io/service-name is missing: these endpoints belong to no Service";
        warnings.push(Fault::new("metadata.labels", message));
    }
    finish(faults)
}

fn slice_addresses(endpoint: usize, address_type: &str, addresses: &[String], faults: &mut Faults) {
    let path = format!("endpoints[{endpoint}].addresses");
    if addresses.is_empty() {
        faults.required(&path, "must contain at least 1 address");
    } else if addresses.len() > MAX_ADDRESSES {
        faults.too_many(&path, addresses.len(), MAX_ADDRESSES);
    }
    for (index, address) in addresses.iter().enumerate() {
        let field = format_args!("{path}[{index}]");
        let right_family = |ip: &IpAddr| ip.is_ipv4() == (address_type == "IPv4");
        match (address_type, address.parse::<IpAddr>()) {
            ("IPv4" | "IPv6", Ok(ip)) if right_family(&ip) => usable_address(field, address, faults),
            ("IPv4" | "IPv6", _) => {
                faults.invalid(field, address, format_args!("must be a valid {address_type} address"));
            }
            // Neither kube-proxy nor this agent uses slices of names.
            _ => {}
        }
    }
}

/// Checks Endpoints.
pub(super) fn endpoints(endpoints: &api::Endpoints) -> Outcome {
    let mut faults = Faults::default();
    metadata(&endpoints.metadata, names::dns_1123_subdomain, &mut faults);
    for (index, subset) in endpoints.subsets.iter().flatten().enumerate() {
        let path = format!("subsets[{index}]");
        let ready = subset.addresses.as_deref().unwrap_or_default();
        let not_ready = subset.not_ready_addresses.as_deref().unwrap_or_default();
        if ready.is_empty() && not_ready.is_empty() {
            faults.required(&path, "must specify `addresses` or `notReadyAddresses`");
        }
        for (field, addresses) in [("addresses", ready), ("notReadyAddresses", not_ready)] {
            for (index, address) in addresses.iter().enumerate() {
                usable_address(format_args!("{path}.{field}[{index}].ip"), &address.ip, &mut faults);
            }
        }
        let ports = subset.ports.as_deref().unwrap_or_default();
        let names = ports.iter().map(|port| port.name.as_deref());
        check_port_names(&format!("{path}.ports"), names, ports.len() > 1, &mut faults);
        for (index, port) in ports.iter().enumerate() {
            port_number(
                format_args!("{path}.ports[{index}].port"),
                port.port.unwrap_or_default(),
                &mut faults,
            );
            let protocol = port.protocol_or_default();
            one_of(format_args!("{path}.ports[{index}].protocol"), protocol, &rules::PROTOCOLS, &mut faults);
        }
    }
    finish(faults)
}

fn finish(Faults(faults): Faults) -> Outcome {
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

fn metadata(metadata: &ObjectMeta, name_form: fn(&str) -> Option<String>, faults: &mut Faults) {
    let name = metadata.name.as_deref().unwrap_or_default();
    if let Some(why) = name_form(name) {
        faults.invalid("metadata.name", name, why);
    }
    let namespace = metadata.namespace_or_default();
    if let Some(why) = names::dns_1123_label(namespace) {
        faults.invalid("metadata.namespace", namespace, why);
    }
}

fn one_of(field: impl Display, value: &str, supported: &[&str], faults: &mut Faults) {
    if value.is_empty() {
        faults.required(field, "");
    } else if !supported.contains(&value) {
        faults.unsupported(field, value, supported);
    }
}

fn port_number(field: impl Display, number: i32, faults: &mut Faults) {
    if let Err(why) = rules::port_number(number) {
        faults.invalid(field, number, why);
    }
}

/// Names are labels and differ; without a name there may be only one port where names are `required`.
fn check_port_names<'a>(
    path: &str,
    names: impl Iterator<Item = Option<&'a str>>,
    required: bool,
    faults: &mut Faults,
) {
    let mut seen = HashSet::new();
    for (index, name) in names.map(Option::unwrap_or_default).enumerate() {
        let field = format_args!("{path}[{index}].name");
        if name.is_empty() && required {
            faults.required(field, "");
        } else if let Some(why) = names::dns_1123_label(name).filter(|_| !name.is_empty()) {
            faults.invalid(field, name, why);
        } else if !seen.insert(name) {
            faults.duplicate(field, name);
        }
    }
}

fn parse_address(field: impl Display, text: &str, faults: &mut Faults) -> Option<IpAddr> {
    rules::new_ip(text).inspect_err(|why| faults.invalid(field, text, why)).ok()
}

fn usable_address(field: impl Display, text: &str, faults: &mut Faults) {
    if let Err(why) = rules::new_ip(text).and_then(rules::usable_ip) {
        faults.invalid(field, text, why);
    }
}
