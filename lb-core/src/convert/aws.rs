//! Decides which annotations of AWS apply to a Service.

use std::{borrow::Cow, collections::BTreeMap};

use super::{annotations::CROSS_ZONE, connection_ends, health, proxy_protocol};
use crate::{api, model::IgnoredAnnotation};

const OTHER_TYPE: &str = "it applies to Services of type LoadBalancer only";
const OF_CLOUD: &str = "the load balancer of the cloud, which status.loadBalancer.ingress names, serves it";
const NO_ADDRESS: &str =
    "status.loadBalancer.ingress is empty: the load balancer may be one of a cloud, which serves it";

/// The source of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A folder of manifests: this project is the load balancer of the Service.
    Manifests,
    /// An API server: the load balancer of the Service may be that of a cloud.
    Cluster,
}

/// `metadata.annotations`.
type Annotations = BTreeMap<String, String>;

/// The annotations that apply to a Service (all except some annotations of AWS), and a list of the annotations that do
/// not apply, with the reasons. `None` if the Service has no annotations.
pub(super) fn applicable(
    service: &api::Service,
    origin: Origin,
) -> Option<(Cow<'_, Annotations>, Vec<IgnoredAnnotation>)> {
    let all = service.metadata.annotations.as_ref()?;
    let ignored = |(name, value): (&String, &String)| {
        let why = why(service, origin, name)?;
        Some(IgnoredAnnotation { annotation: name.as_str().into(), value: value.as_str().into(), why })
    };
    let ignored: Vec<_> = all.iter().filter_map(ignored).collect();
    if ignored.is_empty() {
        return Some((Cow::Borrowed(all), ignored));
    }
    let mut rest = all.clone();
    for IgnoredAnnotation { annotation, .. } in &ignored {
        rest.remove(&**annotation);
    }
    Some((Cow::Owned(rest), ignored))
}

/// Why an annotation does not apply to a Service; `None` if it applies.
fn why(service: &api::Service, origin: Origin, name: &str) -> Option<&'static str> {
    let changes_connections = proxy_protocol::OF_AWS.contains(&name) || connection_ends::AWS.contains(&name);
    if !changes_connections && name != CROSS_ZONE && !health::AWS.contains(&name) {
        return None;
    }
    if !service.spec.as_ref().is_some_and(api::ServiceSpec::is_load_balancer) {
        return Some(OTHER_TYPE);
    }
    // If both load balancers sent the PROXY protocol header, backends would get two.
    if changes_connections && origin == Origin::Cluster { of_other_load_balancer(service) } else { None }
}

/// Why a load balancer of a cloud, not this project, serves the Service or may serve it; `None` if this project serves
/// it.
fn of_other_load_balancer(service: &api::Service) -> Option<&'static str> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let is_of_cloud = |ingress: &api::LoadBalancerIngress| {
        is_set(&ingress.hostname) || ingress.ip_mode.as_deref().is_some_and(|mode| mode != "VIP")
    };
    if ingress.iter().any(is_of_cloud) {
        Some(OF_CLOUD)
    } else if ingress.iter().any(|ingress| is_set(&ingress.ip)) {
        None
    } else {
        Some(NO_ADDRESS)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The annotations of AWS that apply to some Service.
    fn all() -> impl Iterator<Item = &'static str> {
        let changing = proxy_protocol::OF_AWS.into_iter().chain(connection_ends::AWS);
        changing.chain(health::AWS).chain([CROSS_ZONE])
    }

    /// Why the annotation `name` does not apply to a Service of type `kind` with this `ingress` in its status; `None`
    /// if it applies.
    #[expect(clippy::unwrap_in_result, reason = "a test panics")]
    fn ignored(name: &str, kind: &str, ingress: Value, origin: Origin) -> Option<&'static str> {
        let service = json!({
            "metadata": {"name": "web", "annotations": {name: "x", "lb.dev/proxy-protocol": "v2"}},
            "spec": {"type": kind}, "status": {"loadBalancer": {"ingress": ingress}},
        });
        let service = serde_json::from_value(service).unwrap();
        let (rest, ignored) = applicable(&service, origin).unwrap();
        assert!(rest.contains_key("lb.dev/proxy-protocol"));
        assert_eq!(rest.contains_key(name), ignored.is_empty(), "{name}");
        assert!(ignored.iter().all(|ignored| (&*ignored.annotation, &*ignored.value) == (name, "x")));
        ignored.first().map(|ignored| ignored.why)
    }

    #[test]
    fn annotations_of_aws_apply_to_type_load_balancer_only() {
        for name in all() {
            for origin in [Origin::Manifests, Origin::Cluster] {
                for kind in ["ClusterIP", "NodePort"] {
                    assert_eq!(ignored(name, kind, json!([]), origin), Some(OTHER_TYPE), "{name} {kind}");
                }
                let ingress = json!([{"ip": "203.0.113.1"}]);
                assert_eq!(ignored(name, "LoadBalancer", ingress, origin), None, "{name}");
            }
        }
    }

    #[test]
    fn annotations_that_the_load_balancer_of_a_cloud_serves_are_ignored() {
        for (ingress, expected) in [
            (json!([{"ip": "203.0.113.1"}]), None),
            (json!([{"ip": "203.0.113.1", "ipMode": "VIP"}, {"ip": "2001:db8::1"}]), None),
            (json!([{"ip": "203.0.113.1", "ipMode": "Proxy"}]), Some(OF_CLOUD)),
            (json!([{"hostname": "a.elb.amazonaws.com"}]), Some(OF_CLOUD)),
            (json!([{"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "hostname": "a"}]), Some(OF_CLOUD)),
            (json!([{"ip": "203.0.113.1", "hostname": ""}]), None),
            (json!([]), Some(NO_ADDRESS)),
            (json!([{"ip": ""}]), Some(NO_ADDRESS)),
            (Value::Null, Some(NO_ADDRESS)),
        ] {
            for name in all() {
                let changes_connections = !health::AWS.contains(&name) && name != CROSS_ZONE;
                let expected = expected.filter(|_| changes_connections);
                let in_cluster = ignored(name, "LoadBalancer", ingress.clone(), Origin::Cluster);
                assert_eq!(in_cluster, expected, "{name} {ingress}");
                let in_manifest = ignored(name, "LoadBalancer", ingress.clone(), Origin::Manifests);
                assert_eq!(in_manifest, None, "{name} {ingress}: no cloud");
            }
        }
    }
}
