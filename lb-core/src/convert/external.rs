//! Converts the fields by which external clients reach a Service. Leaves out invalid and unknown values, and reports
//! them as errors; the agent serves the rest of the Service. Addresses of `ipMode: Proxy` are left out without an
//! error, and an invalid `healthCheckNodePort` is an error of the whole Service.

use std::net::IpAddr;

use ipnet::IpNet;

use super::error::{ConvertError, Object, readable};
use crate::{
    api,
    ip::parse_ip,
    load_balancer::given_addresses,
    model::{External, TrafficPolicy},
    rules,
};

pub(super) fn external(
    object: &Object,
    service: &api::Service,
    spec: &api::ServiceSpec,
    left_out: &mut Vec<ConvertError>,
) -> Result<External, ConvertError> {
    let ips = spec.external_ips.iter().flatten().enumerate();
    let ips = ips.map(|(index, text)| address(object, format!("spec.externalIPs[{index}]"), text));
    let ips = unique(readable(ips, left_out));
    let reachable = spec.has_node_ports() || !ips.is_empty();
    let policy = spec.external_traffic_policy.as_deref();
    let policy = traffic_policy(object, "spec.externalTrafficPolicy", policy, left_out);
    let policy = if reachable { policy } else { TrafficPolicy::Cluster };
    let mut external = External { ips, policy, ..External::default() };
    if spec.is_load_balancer() {
        external.load_balancer_ips = load_balancer_ips(object, service.status.as_ref(), left_out);
        let given = given_addresses(&service.metadata).unwrap_or_default();
        let ips = external.load_balancer_ips.iter().copied();
        external.given_ips = ips.filter(|ip| given.contains(ip)).collect();
        let ranges = spec.load_balancer_source_ranges.iter().flatten().enumerate();
        let ranges = ranges.map(|(index, range)| source_range(object, index, range));
        external.source_ranges = readable(ranges, left_out);
        if spec.has_health_check_port() {
            external.health_check_node_port = health_check_node_port(object, spec)?;
        }
    }
    Ok(external)
}

/// A traffic policy; an absent or unknown policy counts as `Cluster`, as in kube-proxy.
pub(super) fn traffic_policy(
    object: &Object,
    field: &str,
    policy: Option<&str>,
    left_out: &mut Vec<ConvertError>,
) -> TrafficPolicy {
    match policy.unwrap_or_default() {
        "" | "Cluster" => TrafficPolicy::Cluster,
        "Local" => TrafficPolicy::Local,
        unknown => {
            left_out.push(object.unsupported(field, unknown, &rules::TRAFFIC_POLICIES));
            TrafficPolicy::Cluster
        }
    }
}

/// The load balancer addresses that this node serves: those of `ipMode: VIP`, which is the default. With `Proxy`,
/// packets to the address must reach the load balancer itself. As with kube-proxy, the node serves no address of an
/// unknown mode.
fn load_balancer_ips(
    object: &Object,
    status: Option<&api::ServiceStatus>,
    left_out: &mut Vec<ConvertError>,
) -> Vec<IpAddr> {
    let ingress = status.and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    let vip = |(index, ingress): (usize, &api::LoadBalancerIngress)| {
        let field = |name: &str| format!("status.loadBalancer.ingress[{index}].{name}");
        match ingress.ip_mode.as_deref() {
            None | Some("VIP") => address(object, field("ip"), ingress.ip.as_deref().unwrap_or_default()),
            Some("Proxy") => Ok(None),
            Some(unknown) => Err(object.unsupported(field("ipMode"), unknown, &rules::IP_MODES)),
        }
    };
    unique(readable(ingress.into_iter().flatten().enumerate().map(vip), left_out))
}

/// Parses an address; an empty string is no address.
fn address(object: &Object, field: String, text: &str) -> Result<Option<IpAddr>, ConvertError> {
    match parse_ip(text) {
        None if !text.trim().is_empty() => Err(object.invalid(field, text, rules::NO_IP)),
        ip => Ok(ip),
    }
}

/// Parses a network; an empty string is no network.
fn source_range(object: &Object, index: usize, text: &str) -> Result<Option<IpNet>, ConvertError> {
    match rules::source_range(text) {
        Ok(network) => Ok(Some(network)),
        Err(_) if text.trim().is_empty() => Ok(None),
        Err(why) => Err(object.invalid(format!("spec.loadBalancerSourceRanges[{index}]"), text, why)),
    }
}

fn unique(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    let mut unique = Vec::new();
    for address in addresses {
        if !unique.contains(&address) {
            unique.push(address);
        }
    }
    unique
}

fn health_check_node_port(object: &Object, spec: &api::ServiceSpec) -> Result<Option<u16>, ConvertError> {
    let port = spec.health_check_node_port.filter(|port| *port != 0);
    port.map(|port| object.port("spec.healthCheckNodePort".to_owned(), port)).transpose()
}
