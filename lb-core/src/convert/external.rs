//! How a Service is reached from outside of the cluster. What kube-proxy would leave out is left out here, and said; the rest
//! of the Service is served.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;

use super::{
    ConvertError, Converted, NO_IP, Object,
    ip::{parse_ip, parse_network},
    readable,
};
use crate::model::{External, TrafficPolicy};

/// Whether the type of the Service comes with node ports.
pub(super) fn has_node_ports(spec: &core::ServiceSpec) -> bool {
    matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"))
}

fn is_load_balancer(spec: &core::ServiceSpec) -> bool {
    spec.type_.as_deref() == Some("LoadBalancer")
}

pub(super) fn external(
    object: &Object,
    spec: &core::ServiceSpec,
    status: Option<&core::ServiceStatus>,
) -> Result<Converted<External>, ConvertError> {
    let mut left_out = Vec::new();
    let ips = spec.external_ips.iter().flatten().enumerate();
    let ips = ips.map(|(index, text)| address(object, format!("spec.externalIPs[{index}]"), text));
    let ips = unique(readable(ips, &mut left_out));
    let reachable = has_node_ports(spec) || !ips.is_empty();
    let policy =
        traffic_policy(object, "spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref())?;
    let policy = if reachable { policy } else { TrafficPolicy::Cluster };
    let mut external = External { ips, policy, ..External::default() };
    if is_load_balancer(spec) {
        external.load_balancer_ips = load_balancer_ips(object, status, &mut left_out);
        let ranges = spec.load_balancer_source_ranges.iter().flatten().enumerate();
        let ranges = ranges.map(|(index, range)| source_range(object, index, range));
        external.source_ranges = readable(ranges, &mut left_out);
        if policy == TrafficPolicy::Local {
            external.health_check_node_port = health_check_node_port(object, spec)?;
        }
    }
    Ok(Converted { value: external, left_out })
}

/// A traffic policy; `Cluster` where nothing is said.
pub(super) fn traffic_policy(
    object: &Object,
    field: &str,
    policy: Option<&str>,
) -> Result<TrafficPolicy, ConvertError> {
    match policy.unwrap_or_default() {
        "" | "Cluster" => Ok(TrafficPolicy::Cluster),
        "Local" => Ok(TrafficPolicy::Local),
        unknown => Err(object.unsupported(field, unknown, &["Cluster", "Local"])),
    }
}

/// The addresses that the load balancer gave: those of `ipMode: Proxy` belong to machines that send to node ports, and
/// packets to them must reach these machines.
fn load_balancer_ips(
    object: &Object,
    status: Option<&core::ServiceStatus>,
    left_out: &mut Vec<ConvertError>,
) -> Vec<IpAddr> {
    let ingress = status.and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    let vips = ingress.into_iter().flatten().enumerate();
    let vips = vips.filter(|(_, ingress)| ingress.ip_mode.as_deref() != Some("Proxy"));
    let vip = |(index, ingress): (usize, &core::LoadBalancerIngress)| {
        let text = ingress.ip.as_deref().unwrap_or_default();
        address(object, format!("status.loadBalancer.ingress[{index}].ip"), text)
    };
    unique(readable(vips.map(vip), left_out))
}

/// An address; what is empty is none.
fn address(object: &Object, field: String, text: &str) -> Result<Option<IpAddr>, ConvertError> {
    match parse_ip(text) {
        None if !text.trim().is_empty() => Err(object.invalid(field, text, NO_IP)),
        ip => Ok(ip),
    }
}

/// A network; what is empty is none.
fn source_range(object: &Object, index: usize, text: &str) -> Result<Option<IpNet>, ConvertError> {
    let network = parse_network(text.trim());
    if network.is_none() && !text.trim().is_empty() {
        let why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";
        return Err(object.invalid(format!("spec.loadBalancerSourceRanges[{index}]"), text, why));
    }
    Ok(network)
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

fn health_check_node_port(object: &Object, spec: &core::ServiceSpec) -> Result<Option<u16>, ConvertError> {
    let port = spec.health_check_node_port.filter(|port| *port != 0);
    port.map(|port| object.port("spec.healthCheckNodePort".to_owned(), port)).transpose()
}
