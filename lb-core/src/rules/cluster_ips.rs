//! The rules of the API server for cluster IPs and IP families of a Service
//! (`ValidateServiceClusterIPsRelatedFields` in `pkg/apis/core/validation`).

use std::net::IpAddr;

use super::{FieldError, duplicate, forbidden, invalid, new_ip, one_of, stored_ip, unsupported};
use crate::{api::ServiceSpec, family::Family};

const SINGLE: &str = "spec.clusterIP";
const LIST: &str = "spec.clusterIPs";

/// In how many IP families a Service has cluster IPs: `spec.ipFamilyPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyPolicy {
    /// Both families if the cluster has both, else one.
    PreferDualStack,
    /// Both families.
    RequireDualStack,
    /// One family.
    SingleStack,
}

impl FamilyPolicy {
    const ALL: [Self; 3] = [Self::PreferDualStack, Self::RequireDualStack, Self::SingleStack];

    /// The policy's name as Kubernetes spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PreferDualStack => "PreferDualStack",
            Self::RequireDualStack => "RequireDualStack",
            Self::SingleStack => "SingleStack",
        }
    }
}

/// The cluster IPs and families that a new Service requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requested {
    /// The families in `ipFamilies`; if `ipFamilies` names none, the families of `ips`. Each family once.
    pub families: Vec<Family>,
    /// The addresses in `clusterIPs` or `clusterIP`, in the order of `families`; none for a headless or `ExternalName`
    /// Service.
    pub ips: Vec<IpAddr>,
    /// `ipFamilyPolicy`; if unset, the one that the API server would write.
    pub policy: FamilyPolicy,
}

/// Returns what a new Service requests, and an error for each rule that it breaks. The function does not check
/// whether this node can give the Service what it requests.
pub fn requested(spec: &ServiceSpec) -> (Requested, Vec<FieldError>) {
    let mut errors = Vec::new();
    let policy = policy(spec, &mut errors);
    let families = families(spec, &mut errors);
    let ips = new_ips(spec, &mut errors);
    let has_several = families.len() > 1 || ips.len() > 1;
    if errors.is_empty() {
        match_families(spec, &families, &ips, &mut errors);
        if policy == Some(FamilyPolicy::SingleStack) && has_several {
            let why =
                "must be RequireDualStack or PreferDualStack when several families or addresses are given";
            errors.push(FieldError::new("spec.ipFamilyPolicy", invalid("SingleStack", why)));
        }
    }
    let families =
        if families.is_empty() { ips.iter().map(|ip| Family::of(*ip)).collect() } else { families };
    let implied = if has_several { FamilyPolicy::RequireDualStack } else { FamilyPolicy::SingleStack };
    (Requested { families, ips, policy: policy.unwrap_or(implied) }, errors)
}

/// The cluster IPs of a Service that an API server has stored; none for a headless one.
///
/// # Errors
///
/// The first rule that an address breaks.
pub fn stored(spec: &ServiceSpec) -> Result<Vec<IpAddr>, FieldError> {
    if spec.is_headless() {
        return Ok(Vec::new());
    }
    let mut errors = Vec::new();
    let ips = list(LIST, &spec.requested_ips(), stored_ip, &mut errors);
    errors.into_iter().next().map_or(Ok(ips), Err)
}

fn policy(spec: &ServiceSpec, errors: &mut Vec<FieldError>) -> Option<FamilyPolicy> {
    let name = spec.ip_family_policy.as_deref()?;
    if let Err(why) = one_of(name, &FamilyPolicy::ALL.map(FamilyPolicy::as_str)) {
        errors.push(FieldError::new("spec.ipFamilyPolicy", why));
    }
    FamilyPolicy::ALL.into_iter().find(|policy| policy.as_str() == name)
}

/// The families in `ipFamilies`, each once.
fn families(spec: &ServiceSpec, errors: &mut Vec<FieldError>) -> Vec<Family> {
    let mut families = Vec::new();
    for (index, name) in spec.ip_families.iter().flatten().enumerate() {
        let why = match Family::from_name(name) {
            None => unsupported(name, &Family::ALL.map(Family::as_str)),
            Some(family) if families.contains(&family) => duplicate(name),
            Some(family) => {
                families.push(family);
                continue;
            }
        };
        errors.push(FieldError::new(format!("spec.ipFamilies[{index}]"), why));
    }
    families
}

/// The addresses in `clusterIPs` or `clusterIP`; none for a headless or `ExternalName` Service.
fn new_ips(spec: &ServiceSpec, errors: &mut Vec<FieldError>) -> Vec<IpAddr> {
    let (field, texts) = field(spec);
    if spec.is_external_name() {
        if !texts.is_empty() {
            errors.push(FieldError::new(field, forbidden("may not be set for ExternalName services")));
        }
        return Vec::new();
    }
    let single = spec.cluster_ip.as_deref().filter(|ip| !ip.is_empty());
    if single.is_some_and(|single| texts.first() != Some(&single)) {
        errors.push(FieldError::new(field, invalid(&texts, "first value must match `clusterIP`")));
    }
    if !spec.is_headless() {
        return list(field, &texts, new_ip, errors);
    }
    if texts.len() > 1 {
        errors.push(FieldError::new(field, invalid(&texts, "'None' must be the first and only value")));
    }
    if spec.has_node_ports() {
        let why = format!("may not be set to 'None' for {} services", spec.service_type());
        errors.push(FieldError::new(field, invalid("None", why)));
    }
    Vec::new()
}

/// The field in which a new Service requests cluster IPs, and its items.
fn field(spec: &ServiceSpec) -> (&'static str, Vec<&str>) {
    let list: Vec<&str> = spec.cluster_ips.iter().flatten().map(String::as_str).collect();
    if list.is_empty() { (SINGLE, spec.requested_ips()) } else { (LIST, list) }
}

/// The path of an item of the field.
fn item(field: &str, index: usize) -> String {
    if field == LIST { format!("{LIST}[{index}]") } else { field.to_owned() }
}

/// Parses the addresses of the field: at most one of each family.
fn list(
    field: &str,
    texts: &[&str],
    parse: fn(&str) -> Result<IpAddr, &'static str>,
    errors: &mut Vec<FieldError>,
) -> Vec<IpAddr> {
    if texts.len() > Family::ALL.len() {
        errors.push(FieldError::new(field, invalid(texts, "may only hold up to 2 values")));
    }
    let mut ips = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        match parse(text) {
            Ok(ip) => ips.push(ip),
            Err(why) => errors.push(FieldError::new(item(field, index), invalid(text, why))),
        }
    }
    if let [first, second] = ips[..]
        && Family::of(first) == Family::of(second)
    {
        let why = "may specify no more than one IP for each IP family";
        errors.push(FieldError::new(field, invalid(texts, why)));
    }
    ips
}

/// Checks that each address is of the family at the same index of `ipFamilies`; skips addresses beyond the end of
/// `ipFamilies`.
fn match_families(spec: &ServiceSpec, families: &[Family], ips: &[IpAddr], errors: &mut Vec<FieldError>) {
    let (field, _) = field(spec);
    for (index, (ip, family)) in ips.iter().zip(families).enumerate() {
        if Family::of(*ip) != *family {
            let why = format!("expected an {} value as indicated by `ipFamilies[{index}]`", family.as_str());
            errors.push(FieldError::new(item(field, index), invalid(ip.to_string(), why)));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NO_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";

    fn spec(spec: Value) -> ServiceSpec {
        serde_json::from_value(spec).unwrap()
    }

    /// The errors of a new Service, each as `field: text`.
    fn errors(of: Value) -> Vec<String> {
        let (_, errors) = requested(&spec(of));
        errors.into_iter().map(|FieldError { field, why }| format!("{field}: {why}")).collect()
    }

    fn families(of: Value) -> (Vec<Family>, usize, FamilyPolicy) {
        let (Requested { families, ips, policy }, errors) = requested(&spec(of));
        assert_eq!(errors, []);
        (families, ips.len(), policy)
    }

    #[test]
    fn addresses_and_policy_imply_what_a_service_does_not_name() {
        use Family::{V4, V6};
        use FamilyPolicy::{PreferDualStack, RequireDualStack, SingleStack};
        for (of, expected) in [
            (json!({}), (vec![], 0, SingleStack)),
            (json!({"clusterIP": "", "clusterIPs": []}), (vec![], 0, SingleStack)),
            (json!({"clusterIP": "None"}), (vec![], 0, SingleStack)),
            (
                json!({"clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": ["IPv6"]}),
                (vec![V6], 0, SingleStack),
            ),
            (json!({"clusterIP": "fd00::1"}), (vec![V6], 1, SingleStack)),
            (json!({"clusterIPs": ["fd00::1", "10.0.0.1"]}), (vec![V6, V4], 2, RequireDualStack)),
            (
                json!({"clusterIPs": ["10.0.0.1", "fd00::1"], "ipFamilies": ["IPv4"]}),
                (vec![V4], 2, RequireDualStack),
            ),
            (json!({"ipFamilies": ["IPv6", "IPv4"]}), (vec![V6, V4], 0, RequireDualStack)),
            (
                json!({"ipFamilyPolicy": "PreferDualStack", "clusterIP": "10.0.0.1"}),
                (vec![V4], 1, PreferDualStack),
            ),
            (json!({"type": "ExternalName"}), (vec![], 0, SingleStack)),
        ] {
            assert_eq!(families(of.clone()), expected, "{of}");
        }
    }

    #[test]
    fn invalid_address_is_rejected_in_the_field_that_names_it() {
        let first =
            "spec.clusterIPs: Invalid value: [\"10.0.0.1\"]: first value must match `clusterIP`".to_owned();
        for (of, expected) in [
            (json!({"clusterIP": "10.0.0"}), format!("spec.clusterIP: Invalid value: \"10.0.0\": {NO_IP}")),
            (
                json!({"clusterIP": "10.0.0.01"}),
                format!("spec.clusterIP: Invalid value: \"10.0.0.01\": {NO_IP}"),
            ),
            (json!({"clusterIPs": [""]}), format!("spec.clusterIPs[0]: Invalid value: \"\": {NO_IP}")),
            (
                json!({"clusterIPs": ["10.0.0.1", "None"]}),
                format!("spec.clusterIPs[1]: Invalid value: \"None\": {NO_IP}"),
            ),
            (
                json!({"clusterIP": "::ffff:10.0.0.1"}),
                "spec.clusterIP: Invalid value: \"::ffff:10.0.0.1\": must not be an IPv4-mapped IPv6 address"
                    .to_owned(),
            ),
            (json!({"clusterIP": "10.0.0.2", "clusterIPs": ["10.0.0.1"]}), first.clone()),
            (json!({"clusterIP": "None", "clusterIPs": ["10.0.0.1"]}), first),
        ] {
            assert_eq!(errors(of.clone()), [expected], "{of}");
        }
    }

    #[test]
    fn headless_service_has_no_address_and_external_name_not_even_none() {
        let why = "may not be set for ExternalName services";
        for (of, expected) in [
            (
                json!({"clusterIPs": ["None", "10.0.0.1"]}),
                "spec.clusterIPs: Invalid value: [\"None\", \"10.0.0.1\"]: 'None' must be the first and only value"
                    .to_owned(),
            ),
            (
                json!({"clusterIP": "None", "type": "LoadBalancer"}),
                "spec.clusterIP: Invalid value: \"None\": may not be set to 'None' for LoadBalancer services".to_owned(),
            ),
            (json!({"clusterIP": "None", "type": "ExternalName"}), format!("spec.clusterIP: Forbidden: {why}")),
            (json!({"clusterIPs": ["10.0.0.1"], "type": "ExternalName"}), format!("spec.clusterIPs: Forbidden: {why}")),
        ] {
            assert_eq!(errors(of.clone()), [expected], "{of}");
        }
    }

    #[test]
    fn service_has_one_address_of_each_family_in_the_order_of_its_families() {
        for (of, expected) in [
            (
                json!({"clusterIPs": ["10.0.0.1", "10.0.0.2"]}),
                "spec.clusterIPs: Invalid value: [\"10.0.0.1\", \"10.0.0.2\"]: may specify no more than one IP for each \
                 IP family",
            ),
            (
                json!({"clusterIPs": ["10.0.0.1", "fd00::1", "10.0.0.2"]}),
                "spec.clusterIPs: Invalid value: [\"10.0.0.1\", \"fd00::1\", \"10.0.0.2\"]: may only hold up to 2 values",
            ),
            (
                json!({"clusterIP": "10.0.0.1", "ipFamilies": ["IPv6"]}),
                "spec.clusterIP: Invalid value: \"10.0.0.1\": expected an IPv6 value as indicated by `ipFamilies[0]`",
            ),
            (
                json!({"ipFamilyPolicy": "SingleStack", "clusterIPs": ["10.0.0.1", "fd00::1"], "ipFamilies": ["IPv4"]}),
                "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be RequireDualStack or PreferDualStack when \
                 several families or addresses are given",
            ),
        ] {
            assert_eq!(errors(of.clone()), [expected], "{of}");
        }
    }

    #[test]
    fn every_bad_family_and_policy_is_reported() {
        let bad = json!({"ipFamilyPolicy": "Dual", "ipFamilies": ["IPv4", "ipv6", "IPv4"], "clusterIP": "x"});
        assert_eq!(
            errors(bad),
            [
                "spec.ipFamilyPolicy: Unsupported value: \"Dual\": supported values: \"PreferDualStack\", \
                 \"RequireDualStack\", \"SingleStack\""
                    .to_owned(),
                "spec.ipFamilies[1]: Unsupported value: \"ipv6\": supported values: \"IPv4\", \"IPv6\""
                    .to_owned(),
                "spec.ipFamilies[2]: Duplicate value: \"IPv4\"".to_owned(),
                format!("spec.clusterIP: Invalid value: \"x\": {NO_IP}"),
            ]
        );
        assert_eq!(errors(json!({"ipFamilyPolicy": ""})), ["spec.ipFamilyPolicy: Required value"]);
    }

    #[test]
    fn stored_addresses_may_have_leading_zeros_and_empty_items() {
        let stored =
            |of: Value| stored(&spec(of)).map_err(|FieldError { field, why }| format!("{field}: {why}"));
        let first: IpAddr = [10, 0, 0, 1].into();
        assert_eq!(stored(json!({"clusterIPs": ["10.0.0.01"]})), Ok(vec![first]));
        assert_eq!(stored(json!({"clusterIP": "10.0.0.1", "clusterIPs": [""]})), Ok(vec![first]));
        assert_eq!(stored(json!({"clusterIP": "None"})), Ok(vec![]));
        let two = "spec.clusterIPs: Invalid value: [\"10.0.0.1\", \"10.0.0.2\"]: may specify no more than one IP for each IP family";
        assert_eq!(stored(json!({"clusterIPs": ["10.0.0.1", "10.0.0.2"]})), Err(two.to_owned()));
    }
}
