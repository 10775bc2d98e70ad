//! The Pod and the Service in the arguments of `explain`, and the packet between them.

use std::{net::IpAddr, net::SocketAddr, str::FromStr};

use k8s_openapi::api::core::v1::{Pod, Service, ServicePort};

/// The client of `explain`: `pod/NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTarget {
    /// Namespace of the Pod.
    pub namespace: String,
    /// Name of the Pod.
    pub name: String,
}

/// The destination of `explain`: `svc/NAMESPACE/NAME[:PORT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceTarget {
    /// Namespace of the Service.
    pub namespace: String,
    /// Name of the Service.
    pub name: String,
    /// Number or name of a port; with `None`, the Service must have only one.
    pub port: Option<String>,
}

/// An address family, as a Service names it in `spec.ipFamilies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum IpFamily {
    /// IPv4
    #[value(name = "IPv4")]
    V4,
    /// IPv6
    #[value(name = "IPv6")]
    V6,
}

/// Why the arguments name no packet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// An argument does not have the expected form.
    #[error("`{text}` is not of the form {form}")]
    Form {
        /// The argument as typed.
        text: String,
        /// The form that the argument should have.
        form: &'static str,
    },
    /// The Pod has no address.
    #[error("the Pod has no address yet; wait until it runs")]
    NoPodAddress,
    /// The Service has no cluster IP.
    #[error(
        "the Service has no cluster IP, so clients reach its endpoints directly; explain needs a Service with one"
    )]
    NoClusterIp,
    /// The Pod and the Service have no family in common, or do not both have the requested family.
    #[error("the Pod has {pod}, the Service {service}; {needed}")]
    NoCommonFamily {
        /// What the packet needs.
        needed: &'static str,
        /// Addresses of the Pod.
        pod: String,
        /// Addresses of the Service.
        service: String,
    },
    /// The Service has no such port; or the argument names no port, and the Service has several.
    #[error("name a port of the Service: {0}")]
    WhichPort(String),
}

impl FromStr for PodTarget {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let (namespace, name) = split(text, &["pod", "pods", "po"], "pod/NAMESPACE/NAME")?;
        Ok(Self { namespace, name })
    }
}

impl FromStr for ServiceTarget {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let (object, port) = match text.split_once(':') {
            Some((object, port)) => (object, Some(port.to_owned())),
            None => (text, None),
        };
        let form = "svc/NAMESPACE/NAME[:PORT]";
        let (namespace, name) = split(object, &["svc", "service", "services"], form)?;
        if port.as_ref().is_some_and(String::is_empty) {
            return Err(TargetError::Form { text: text.to_owned(), form });
        }
        Ok(Self { namespace, name, port })
    }
}

fn split(text: &str, kinds: &[&str], form: &'static str) -> Result<(String, String), TargetError> {
    let parts: Vec<&str> = text.split('/').collect();
    match parts[..] {
        [kind, namespace, name] if kinds.contains(&kind) && !namespace.is_empty() && !name.is_empty() => {
            Ok((namespace.to_owned(), name.to_owned()))
        }
        _ => Err(TargetError::Form { text: text.to_owned(), form }),
    }
}

/// A packet from the Pod to the Service, without the source port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// Address of the Pod.
    pub(crate) from: IpAddr,
    /// Address and port of the Service.
    pub(crate) to: SocketAddr,
    /// `tcp`, `udp` or `sctp`
    pub(crate) protocol: String,
}

impl Packet {
    /// The packet from `pod` to `service`, to the Service's first cluster IP in a family that the Pod also has; with
    /// `family`, in that family.
    ///
    /// # Errors
    /// The Pod has no address, the Service has no cluster IP, they have no family in common or do not both have
    /// `family`, or `port` selects no port (it may be omitted only if the Service has a single port).
    pub(crate) fn between(
        pod: &Pod,
        service: &Service,
        port: Option<&str>,
        family: Option<IpFamily>,
    ) -> Result<Self, TargetError> {
        let (sources, vips) = (pod_addresses(pod), cluster_ips(service));
        if sources.is_empty() {
            return Err(TargetError::NoPodAddress);
        }
        if vips.is_empty() {
            return Err(TargetError::NoClusterIp);
        }
        let of_family = |vip: &IpAddr| sources.iter().find(|source| source.is_ipv4() == vip.is_ipv4());
        let is_wanted = |vip: &&IpAddr| family.is_none_or(|family| vip.is_ipv4() == (family == IpFamily::V4));
        let found = vips.iter().filter(is_wanted).find_map(|vip| Some((*of_family(vip)?, *vip)));
        let Some((from, vip)) = found else {
            let needed = match family {
                None => "they need a common address family",
                Some(IpFamily::V4) => "a packet of IPv4 needs an IPv4 address of both",
                Some(IpFamily::V6) => "a packet of IPv6 needs an IPv6 address of both",
            };
            let (pod, service) = (list(&sources), list(&vips));
            return Err(TargetError::NoCommonFamily { needed, pod, service });
        };
        let ServicePort { port, protocol, .. } = pick_port(service, port)?;
        let which = |_| TargetError::WhichPort(format!("{port} is no port number"));
        let to = SocketAddr::new(vip, u16::try_from(*port).map_err(which)?);
        Ok(Self { from, to, protocol: protocol.as_deref().unwrap_or("TCP").to_lowercase() })
    }
}

fn pod_addresses(pod: &Pod) -> Vec<IpAddr> {
    let Some(status) = &pod.status else { return Vec::new() };
    parsed(status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()), status.pod_ip.as_deref())
}

fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let Some(spec) = &service.spec else { return Vec::new() };
    parsed(spec.cluster_ips.iter().flatten().map(String::as_str), spec.cluster_ip.as_deref())
}

/// The addresses in a list, or the single address if the list has no address. Other texts, such as `None`, are left
/// out.
fn parsed<'a>(list: impl Iterator<Item = &'a str>, single: Option<&'a str>) -> Vec<IpAddr> {
    let parse = |text: &str| text.parse().ok();
    let all: Vec<IpAddr> = list.filter_map(parse).collect();
    if all.is_empty() { single.and_then(parse).into_iter().collect() } else { all }
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The port with this number or name (the first one, if a number selects several); if `wanted` is `None`, the only
/// port.
fn pick_port<'a>(service: &'a Service, wanted: Option<&str>) -> Result<&'a ServicePort, TargetError> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let is_wanted = |port: &&ServicePort| {
        wanted.is_none_or(|wanted| port.port.to_string() == wanted || port.name.as_deref() == Some(wanted))
    };
    let found: Vec<&ServicePort> = ports.clone().filter(is_wanted).collect();
    match (&found[..], wanted) {
        // A number may select a TCP and a UDP port: the first one is taken, which is usually TCP. A name selects one
        // port.
        ([port], _) | ([port, ..], Some(_)) => Ok(port),
        _ => {
            let text = |port: &ServicePort| {
                let name = port.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
                format!("{}{name}", port.port)
            };
            Err(TargetError::WhichPort(ports.map(text).collect::<Vec<_>>().join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn targets_name_kind_namespace_and_name() {
        let pod: PodTarget = "pod/shop/web-1".parse().expect("a Pod");
        assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("shop", "web-1"));
        let service: ServiceTarget = "svc/shop/api:http".parse().expect("a Service");
        assert_eq!((service.name.as_str(), service.port.as_deref()), ("api", Some("http")));
        assert_eq!("service/shop/api".parse::<ServiceTarget>().expect("a Service").port, None);
        for wrong in ["shop/web", "svc/shop/web", "pod/web", "pod//web", "pod/a/b/c"] {
            assert!(wrong.parse::<PodTarget>().is_err(), "{wrong}");
        }
        for wrong in ["svc/shop", "pod/shop/api", "svc/shop/api:"] {
            assert!(wrong.parse::<ServiceTarget>().is_err(), "{wrong}");
        }
    }

    fn objects(pod: &[&str], service: &[&str]) -> (Pod, Service) {
        let ips: Vec<_> = pod.iter().map(|ip| json!({"ip": ip})).collect();
        let status = json!({"podIP": pod.first(), "podIPs": ips});
        let pod = from_value(json!({"metadata": {}, "status": status})).expect("a Pod");
        let ports = json!([
            {"port": 80, "name": "http", "protocol": "TCP"}, {"port": 53, "name": "dns", "protocol": "UDP"},
        ]);
        let spec = json!({"clusterIP": service.first(), "clusterIPs": service, "ports": ports});
        let service = json!({"metadata": {}, "spec": spec});
        (pod, from_value(service).expect("a Service"))
    }

    fn packet(pod: &[&str], service: &[&str], port: Option<&str>) -> Result<String, TargetError> {
        packet_of(None, pod, service, port)
    }

    fn packet_of(
        family: Option<IpFamily>,
        pod: &[&str],
        service: &[&str],
        port: Option<&str>,
    ) -> Result<String, TargetError> {
        let (pod, service) = objects(pod, service);
        let Packet { from, to, protocol } = Packet::between(&pod, &service, port, family)?;
        Ok(format!("{from} {to} {protocol}"))
    }

    #[test]
    fn packet_has_the_wanted_family() {
        let (both, v4) = (["10.244.0.5", "fd00::5"], ["10.244.0.5"]);
        let vips = ["fd01::1", "10.96.0.1"];
        for (family, expected) in
            [(IpFamily::V4, "10.244.0.5 10.96.0.1:80 tcp"), (IpFamily::V6, "fd00::5 [fd01::1]:80 tcp")]
        {
            assert_eq!(packet_of(Some(family), &both, &vips, Some("80")), Ok(expected.to_owned()));
        }
        for (pod, service) in [(&v4[..], &vips[..]), (&both, &vips[1..])] {
            let error = packet_of(Some(IpFamily::V6), pod, service, Some("80")).expect_err("no IPv6");
            let (pod, service) = (pod.join(", "), service.join(", "));
            let expected = format!(
                "the Pod has {pod}, the Service {service}; a packet of IPv6 needs an IPv6 address of both"
            );
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn packet_has_a_common_family_and_the_named_port() {
        let both = ["10.244.0.5", "fd00::5"];
        let found = packet(&both, &["fd01::1", "10.96.0.1"], Some("dns"));
        assert_eq!(found, Ok("fd00::5 [fd01::1]:53 udp".to_owned()));
        let found = packet(&both[..1], &["fd01::1", "10.96.0.1"], Some("80"));
        assert_eq!(found, Ok("10.244.0.5 10.96.0.1:80 tcp".to_owned()));
        let which = TargetError::WhichPort("80 (http), 53 (dns)".to_owned());
        assert_eq!(packet(&both, &["10.96.0.1"], None), Err(which.clone()));
        assert_eq!(packet(&both, &["10.96.0.1"], Some("81")), Err(which));
        assert_eq!(packet(&both, &["None"], None), Err(TargetError::NoClusterIp));
        assert_eq!(packet(&[], &["10.96.0.1"], None), Err(TargetError::NoPodAddress));
        let apart = packet(&both[1..], &["10.96.0.1"], Some("80"));
        assert!(matches!(apart, Err(TargetError::NoCommonFamily { .. })), "{apart:?}");
    }
}
