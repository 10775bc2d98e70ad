//! Finds the annotations that configure load balancers of clouds and have no effect in this project, so that the agent
//! reports them. An annotation that asks for what happens anyway needs no report.

use std::collections::BTreeMap;

use super::{
    annotations::{ACCESS_LOG, ACCESS_LOG_INTERVAL, CROSS_ZONE},
    connection_ends, health, proxy_protocol,
};
use crate::model::IgnoredAnnotation;

/// The prefixes of annotations that only load balancers of clouds have.
const PREFIXES: [&str; 3] =
    ["service.beta.kubernetes.io/", "service.kubernetes.io/qcloud-", "service.kubernetes.io/tke-"];

/// The annotations by which clouds make a load balancer internal, with the values that do so; an empty list means any
/// text that does not ask for a public load balancer ([`ASKS_FOR_PUBLIC`]).
pub(crate) const ASKS_FOR_INTERNAL: [(&str, &[&str]); 9] = [
    // GKE accepts both spellings, and Kubernetes 1.7.0 to 1.7.3 only lower case.
    ("networking.gke.io/load-balancer-type", &["Internal", "internal"]),
    ("cloud.google.com/load-balancer-type", &["Internal", "internal"]),
    ("service.beta.kubernetes.io/aws-load-balancer-internal", &[]),
    ("service.beta.kubernetes.io/azure-load-balancer-internal", &["true"]),
    ("service.kubernetes.io/ibm-load-balancer-cloud-provider-ip-type", &["private"]),
    ("service.beta.kubernetes.io/openstack-internal-load-balancer", &["true"]),
    ("service.beta.kubernetes.io/cce-load-balancer-internal-vpc", &["true"]),
    ("service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", &[]),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-address-type", &["intranet"]),
];

/// Values of the annotations in [`ASKS_FOR_INTERNAL`] that ask for a public load balancer.
pub(crate) const ASKS_FOR_PUBLIC: [&str; 5] = ["", "false", "External", "public", "internet"];

const NOT_INTERNAL: &str = "this value does not ask for an internal load balancer";
const TLS: &str = "TLS is not terminated here, and the port stays as it is: let the backends, or a proxy that is the \
                   backend, terminate TLS";
const LOGS: &str = "the flow log is a file of the node (--flow-log): ship it with a log collector";
/// Annotations of clouds that have an effect, apart from annotations about health checks, timeouts, the PROXY protocol
/// and internal load balancers.
const SERVED: [&str; 3] = [CROSS_ZONE, ACCESS_LOG, ACCESS_LOG_INTERVAL];
const ATTRIBUTES: &str = "of these attributes, only proxy_protocol_v2.enabled has an effect";
const BILL: &str = "it is about the bill of a cloud";
const CLOUD: &str = "it configures an object of a cloud, which this load balancer does not have";

/// The name of an annotation; the values that need no report, because they ask for what happens anyway; and why all
/// other values of the annotation have no effect.
type Ignored = (&'static str, &'static [&'static str], &'static str);

const IGNORED: [Ignored; 17] = [
    ("service.beta.kubernetes.io/aws-load-balancer-ssl-cert", &[], TLS),
    ("service.beta.kubernetes.io/aws-load-balancer-ssl-ports", &[], TLS),
    ("service.beta.kubernetes.io/aws-load-balancer-ssl-negotiation-policy", &[], TLS),
    (
        "service.beta.kubernetes.io/aws-load-balancer-backend-protocol",
        &["tcp", "ssl"],
        "backends receive the bytes of the client unchanged, without headers of a proxy",
    ),
    ("service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-name", &[], LOGS),
    ("service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-prefix", &[], LOGS),
    ("service.beta.kubernetes.io/aws-load-balancer-additional-resource-tags", &[], BILL),
    (
        "service.beta.kubernetes.io/aws-load-balancer-healthcheck-success-codes",
        &["200-399"],
        "the statuses 200 to 399 are good",
    ),
    (
        "service.beta.kubernetes.io/aws-load-balancer-extra-security-groups",
        &[],
        "set spec.loadBalancerSourceRanges to limit who may connect",
    ),
    (
        "service.beta.kubernetes.io/aws-load-balancer-security-groups",
        &[],
        "set spec.loadBalancerSourceRanges to limit who may connect",
    ),
    (
        "service.beta.kubernetes.io/aws-load-balancer-type",
        &["nlb"],
        "this is always a load balancer of layer 4",
    ),
    (
        "service.kubernetes.io/qcloud-loadbalancer-internal-subnetid",
        &[],
        "it makes the load balancer internal, but names a subnet of a cloud: the address is from an internal pool",
    ),
    (
        "service.kubernetes.io/qcloud-loadbalancer-backends-label",
        &[],
        "select the nodes that announce the address by nodeSelectors of an L2Advertisement or BGPAdvertisement",
    ),
    ("service.kubernetes.io/qcloud-loadbalancer-internet-charge-type", &[], BILL),
    (
        "service.kubernetes.io/qcloud-loadbalancer-internet-max-bandwidth-out",
        &[],
        "there is no limit on the bandwidth of a Service",
    ),
    ("service.kubernetes.io/tke-existed-lbid", &[], CLOUD),
    (
        "service.kubernetes.io/local-svc-only-bind-node-with-pod",
        &["false"],
        "with externalTrafficPolicy: Local only nodes with a pod of the Service announce its address",
    ),
];

const OF_TKE: [&str; 3] = [
    "service.kubernetes.io/loadbalance-type",
    "service.kubernetes.io/service.extensiveParameters",
    "service.kubernetes.io/service.listenerParameters",
];

/// The names of the known annotations of clouds that have no effect. Values that ask for what happens anyway need no
/// report.
pub fn ignored_names() -> impl Iterator<Item = &'static str> {
    IGNORED.into_iter().map(|(name, ..)| name).chain(OF_TKE)
}

/// Whether the annotation of this name configures load balancers of clouds. The agent reports such an annotation if it
/// has no effect.
pub fn is_of_cloud(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || ignored_names().any(|known| known == name)
        || ASKS_FOR_INTERNAL.iter().any(|(known, _)| *known == name)
}

/// The annotations of clouds that have no effect, with the reasons.
pub(super) fn ignored(annotations: &BTreeMap<String, String>) -> Vec<IgnoredAnnotation> {
    let of_cloud =
        annotations.iter().filter(|(name, _)| is_of_cloud(name) && !health::AWS.contains(&name.as_str()));
    let ignored = of_cloud.filter_map(|(name, value)| {
        let why = why(name, value.trim())?;
        Some(IgnoredAnnotation { annotation: name.as_str().into(), value: value.as_str().into(), why })
    });
    ignored.collect()
}

/// Why an annotation of a cloud has no effect; `None` if it has an effect, or asks for what happens anyway.
fn why(name: &str, value: &str) -> Option<&'static str> {
    if let Some((_, meant, why)) = IGNORED.iter().find(|(known, ..)| *known == name) {
        return (!meant.contains(&value)).then_some(why);
    }
    if name == proxy_protocol::AWS_ATTRIBUTES {
        return proxy_protocol::has_other_attributes(value).then_some(ATTRIBUTES);
    }
    if let Some((_, asking)) = ASKS_FOR_INTERNAL.iter().find(|(known, _)| *known == name) {
        let is_known = asking.is_empty() || asking.contains(&value) || ASKS_FOR_PUBLIC.contains(&value);
        return (!is_known).then_some(NOT_INTERNAL);
    }
    if SERVED.contains(&name)
        || connection_ends::AWS.contains(&name)
        || proxy_protocol::OF_AWS.contains(&name)
    {
        return None;
    }
    Some(if OF_TKE.contains(&name) { CLOUD } else { "this load balancer does not know it" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(annotations: &[(&str, &str)]) -> Vec<String> {
        let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        ignored(&owned.collect()).into_iter().map(|ignored| ignored.annotation.to_string()).collect()
    }

    #[test]
    fn annotation_without_effect_is_reported_once() {
        for name in ignored_names() {
            assert_eq!(reported(&[(name, "x")]), [name]);
        }
    }

    #[test]
    fn annotation_that_asks_for_what_happens_anyway_is_not_reported() {
        let aws = "service.beta.kubernetes.io/aws-load-balancer-";
        for (name, value) in [
            ("backend-protocol", "tcp"),
            ("type", "nlb"),
            ("access-log-enabled", "true"),
            ("access-log-emit-interval", "5"),
            ("cross-zone-load-balancing-enabled", "false"),
            ("internal", "true"),
            ("healthcheck-interval", "20"),
            ("connection-draining-enabled", "true"),
            ("connection-draining-timeout", "60"),
            ("connection-idle-timeout", "60"),
            ("proxy-protocol", "*"),
            ("target-group-attributes", "proxy_protocol_v2.enabled=true"),
        ] {
            assert_eq!(reported(&[(&format!("{aws}{name}"), value)]), [] as [String; 0], "{name}");
        }
        assert_eq!(
            reported(&[("cloud.google.com/load-balancer-type", "Internal"), ("a/b", "c")]),
            [] as [String; 0]
        );
    }

    #[test]
    fn value_that_makes_no_load_balancer_internal_is_reported() {
        for (name, asking) in ASKS_FOR_INTERNAL.into_iter().filter(|(_, asking)| !asking.is_empty()) {
            assert_eq!(reported(&[(name, "10.0.0.0/8")]), [name]);
            let known = asking.iter().chain(&ASKS_FOR_PUBLIC);
            known.for_each(|value| assert_eq!(reported(&[(name, value)]), [""; 0], "{name}: {value}"));
        }
    }

    #[test]
    fn attributes_without_effect_are_reported() {
        let name = "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes";
        let attributes = "proxy_protocol_v2.enabled=true,stickiness.enabled=true";
        assert_eq!(reported(&[(name, attributes)]), [name]);
    }

    #[test]
    fn unknown_annotation_of_a_known_prefix_is_reported() {
        let unknown = "service.beta.kubernetes.io/aws-load-balancer-new";
        assert_eq!(reported(&[(unknown, "x")]), [unknown]);
    }
}
