//! How a Service is reached from outside of the cluster. What kube-proxy would leave out is left out here; the rest of the
//! Service is served.

use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;

use super::{
    ConvertError, Object,
    ip::{parse_ip, parse_network},
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
) -> Result<External, ConvertError> {
    let ips = addresses(spec.external_ips.iter().flatten().map(String::as_str));
    let reachable = has_node_ports(spec) || !ips.is_empty();
    let policy =
        traffic_policy(object, "spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref())?;
    let policy = if reachable { policy } else { TrafficPolicy::Cluster };
    let mut external = External { ips, policy, ..External::default() };
    if is_load_balancer(spec) {
        external.load_balancer_ips = load_balancer_ips(status);
        let ranges = spec.load_balancer_source_ranges.iter().flatten();
        external.source_ranges = ranges.filter_map(|range| parse_network(range.trim())).collect();
        if policy == TrafficPolicy::Local {
            external.health_check_node_port = health_check_node_port(object, spec)?;
        }
    }
    Ok(external)
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
fn load_balancer_ips(status: Option<&core::ServiceStatus>) -> Vec<IpAddr> {
    let ingress = status.and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    let vips = ingress.into_iter().flatten().filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"));
    addresses(vips.filter_map(|ingress| ingress.ip.as_deref()))
}

fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for address in texts.filter_map(parse_ip) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

fn health_check_node_port(object: &Object, spec: &core::ServiceSpec) -> Result<Option<u16>, ConvertError> {
    let port = spec.health_check_node_port.filter(|port| *port != 0);
    port.map(|port| object.port("spec.healthCheckNodePort".to_owned(), port)).transpose()
}
