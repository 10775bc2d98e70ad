//! Reads the annotations that turn the PROXY protocol on.

use std::collections::BTreeMap;

use super::values::boolean;
use crate::model::ServiceSettings;

/// The annotation that gives backends a PROXY protocol header: `v2`.
pub const PROXY_PROTOCOL: &str = "lb.dev/proxy-protocol";

/// The annotation of AWS that, with the value `*`, turns the PROXY protocol on for all ports.
const AWS: &str = "service.beta.kubernetes.io/aws-load-balancer-proxy-protocol";
/// The annotation of AWS that lists attributes, each as `name=value`.
pub(super) const AWS_ATTRIBUTES: &str =
    "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes";
/// The attribute in [`AWS_ATTRIBUTES`] that turns the PROXY protocol on: `true` or `false`.
const AWS_ATTRIBUTE: &str = "proxy_protocol_v2.enabled";
/// The annotations of AWS that this module reads.
pub(super) const OF_AWS: [&str; 2] = [AWS, AWS_ATTRIBUTES];

/// Sets whether backends get a PROXY protocol header; records invalid annotations.
pub(super) fn read(annotations: &BTreeMap<String, String>, settings: &mut ServiceSettings) {
    let text = |name| annotations.get(name).map(|text| text.trim());
    let mut asks = false;
    if let Some(text) = text(PROXY_PROTOCOL) {
        asks |= settings.noted(PROXY_PROTOCOL, text, only(text, "v2")).is_some();
    }
    if let Some(text) = text(AWS) {
        asks |= settings.noted(AWS, text, only(text, "*")).is_some();
    }
    if let Some(value) = text(AWS_ATTRIBUTES).and_then(attribute) {
        asks |= settings.noted(AWS_ATTRIBUTES, value, boolean(value)).unwrap_or(false);
    }
    settings.proxy_protocol = asks;
}

/// Whether a list of attributes has an attribute other than [`AWS_ATTRIBUTE`].
pub(super) fn has_other_attributes(list: &str) -> bool {
    attributes(list).any(|(name, _)| name != AWS_ATTRIBUTE)
}

fn attribute(list: &str) -> Option<&str> {
    attributes(list).find(|(name, _)| *name == AWS_ATTRIBUTE).map(|(_, value)| value)
}

fn attributes(list: &str) -> impl Iterator<Item = (&str, &str)> {
    let named = |text: &str| !text.trim().is_empty();
    list.split(',').filter(move |text| named(text)).map(|text| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        (name.trim(), value.trim())
    })
}

fn only(text: &str, valid: &str) -> Result<(), String> {
    if text == valid { Ok(()) } else { Err(format!("give {valid:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> (bool, Vec<String>) {
        let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut settings = ServiceSettings::default();
        read(&owned.collect(), &mut settings);
        let errors = settings.annotation_errors.into_iter();
        (settings.proxy_protocol, errors.map(|error| error.why).collect())
    }

    #[test]
    fn annotations_turn_the_proxy_protocol_on() {
        for (annotations, expected) in [
            (&[][..], false),
            (&[(PROXY_PROTOCOL, " v2 ")], true),
            (&[(AWS, "*")], true),
            (&[(AWS_ATTRIBUTES, "proxy_protocol_v2.enabled=true")], true),
            (&[(AWS_ATTRIBUTES, "preserve_client_ip.enabled=true, proxy_protocol_v2.enabled = true")], true),
            (&[(AWS_ATTRIBUTES, "proxy_protocol_v2.enabled=false")], false),
            (&[(AWS_ATTRIBUTES, "stickiness.enabled=true,")], false),
        ] {
            assert_eq!(of(annotations), (expected, vec![]), "{annotations:?}");
        }
    }

    #[test]
    fn other_values_are_invalid() {
        for (name, value, why) in [
            (PROXY_PROTOCOL, "v1", "give \"v2\""),
            (PROXY_PROTOCOL, "true", "give \"v2\""),
            (AWS, "80", "give \"*\""),
            (AWS_ATTRIBUTES, "proxy_protocol_v2.enabled=yes", "give \"true\" or \"false\""),
        ] {
            assert_eq!(of(&[(name, value)]), (false, vec![why.to_owned()]), "{name}: {value}");
        }
    }
}
