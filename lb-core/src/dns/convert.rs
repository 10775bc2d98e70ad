//! Converts objects of the Kubernetes API to the parts that DNS names depend on. Invalid parts, which the API server
//! would reject, are left out; the conversion for the proxy reports them.

use std::net::IpAddr;

use super::{NameChange, NamedEndpoint, NamedPort, NamedService, NamedSlice, Target};
use crate::{
    api,
    convert::{ConvertError, SERVICE_NAME, SKIP_MIRROR, object_name},
    family::Family,
    model::ObjectName,
    rules,
};

/// The annotation that had the meaning of `publishNotReadyAddresses` before that field existed.
pub const TOLERATE_UNREADY: &str = "service.alpha.kubernetes.io/tolerate-unready-endpoints";

/// Converts a Service. `cluster_ips` replaces the cluster IPs in the object if another part of the agent allocates
/// cluster IPs.
///
/// # Errors
///
/// An object without a valid name.
pub fn service(service: &api::Service, cluster_ips: Option<&[IpAddr]>) -> Result<NameChange, ConvertError> {
    let name = object_name("Service", &service.metadata)?;
    let named = service.spec.as_ref().and_then(|spec| {
        let ports = spec.ports.iter().flatten();
        let old = service.metadata.annotation(TOLERATE_UNREADY) == Some("true");
        Some(NamedService {
            target: target(spec, cluster_ips)?,
            ports: ports
                .filter_map(|port| named_port(port.name.as_deref(), port.protocol_or_default(), port.port))
                .collect(),
            publishes_not_ready: spec.publish_not_ready_addresses == Some(true) || old,
        })
    });
    Ok(NameChange::Service(name, named))
}

/// What the Service's name resolves to; `None` for an `externalName` that is empty or an IP address.
fn target(spec: &api::ServiceSpec, cluster_ips: Option<&[IpAddr]>) -> Option<Target> {
    if spec.is_external_name() {
        let name = spec.external_name();
        let is_name = !name.is_empty() && name.parse::<IpAddr>().is_err();
        return is_name.then(|| Target::Name(name.into()));
    }
    if spec.is_headless() {
        return Some(Target::Endpoints);
    }
    let in_object = || spec.requested_ips().iter().filter_map(|text| rules::stored_ip(text).ok()).collect();
    Some(Target::ClusterIps(cluster_ips.map_or_else(in_object, <[IpAddr]>::to_vec)))
}

fn named_port(name: Option<&str>, protocol: &str, port: i32) -> Option<NamedPort> {
    let (protocol, port) = (rules::protocol(protocol)?, rules::port_number(port).ok()?);
    Some(NamedPort { name: name.unwrap_or_default().to_ascii_lowercase().into(), protocol, port })
}

fn slice_ports(ports: Option<&Vec<api::EndpointPort>>) -> Vec<NamedPort> {
    let ports = ports.into_iter().flatten();
    ports.filter_map(|p| named_port(p.name.as_deref(), p.protocol_or_default(), p.port?)).collect()
}

/// Converts an EndpointSlice. A slice without a Service, or with addresses that are neither IPv4 nor IPv6, has no
/// names.
///
/// # Errors
///
/// An object without a valid name.
pub fn endpoint_slice(slice: &api::EndpointSlice) -> Result<NameChange, ConvertError> {
    let name = object_name("EndpointSlice", &slice.metadata)?;
    let service = slice.metadata.label(SERVICE_NAME).filter(|service| !service.is_empty());
    let (Some(service), Some(family)) = (service, Family::from_name(&slice.address_type)) else {
        return Ok(NameChange::Slice(name, None));
    };
    let ready = slice.endpoints.iter().flatten().filter(|endpoint| endpoint.conditions.ready != Some(false));
    let endpoints = ready.filter_map(|endpoint| {
        named_endpoint(endpoint.addresses.first()?, endpoint.hostname.as_deref(), true)
            .filter(|endpoint| Family::of(endpoint.address) == family)
    });
    let service = ObjectName { namespace: name.namespace.clone(), name: service.into() };
    let ports = slice_ports(slice.ports.as_ref());
    let slice = NamedSlice { service, ports, endpoints: endpoints.collect() };
    Ok(NameChange::Slice(name, Some(slice)))
}

/// Converts Endpoints: one slice for each subset, or none if the label [`SKIP_MIRROR`] is `true`. The caller deletes
/// slices that are no longer returned.
///
/// # Errors
///
/// An object without a valid name.
pub fn endpoints(endpoints: &api::Endpoints) -> Result<Vec<(ObjectName, NamedSlice)>, ConvertError> {
    let service = object_name("Endpoints", &endpoints.metadata)?;
    if endpoints.metadata.label(SKIP_MIRROR) == Some("true") {
        return Ok(Vec::new());
    }
    let subsets = endpoints.subsets.iter().flatten().enumerate();
    let slice = |(index, subset): (usize, &api::EndpointSubset)| {
        let lists = [(&subset.addresses, true), (&subset.not_ready_addresses, false)];
        let endpoints = lists.into_iter().flat_map(|(list, ready)| {
            let list = list.iter().flatten();
            list.filter_map(move |endpoint| named_endpoint(&endpoint.ip, endpoint.hostname.as_deref(), ready))
        });
        let name = format!("endpoints/{}/{index}", service.name);
        let name = ObjectName { namespace: service.namespace.clone(), name: name.into() };
        let ports = slice_ports(subset.ports.as_ref());
        (name, NamedSlice { service: service.clone(), ports, endpoints: endpoints.collect() })
    };
    Ok(subsets.map(slice).collect())
}

fn named_endpoint(address: &str, hostname: Option<&str>, ready: bool) -> Option<NamedEndpoint> {
    let address = rules::stored_ip(address).ok()?;
    rules::endpoint_ip(address).ok()?;
    let hostname = hostname.filter(|hostname| !hostname.is_empty());
    let hostname = hostname.map(|hostname| hostname.to_ascii_lowercase().into());
    Some(NamedEndpoint { address, hostname, ready })
}
