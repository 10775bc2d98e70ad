//! The kinds that announcements watch.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{
    NamespaceResourceScope, api::core::v1 as core, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use lb_core::{
    announce::{advertisement::Advertisement, cluster::Member, voters::Voters},
    api,
    convert::{ConvertError, Converted},
    model::ObjectName,
};
use serde::Deserialize;

use super::super::{kind::Kind, node::node_ips, watched::Read};

/// The API path of `L2Advertisement`. Its CRD may be installed at any time.
#[derive(Clone, Debug, Default)]
pub(in crate::kubernetes) struct AdvertisementSchema(ObjectMeta);

impl Resource for AdvertisementSchema {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "L2Advertisement".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "metallb.io".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1beta1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "l2advertisements".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.0
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.0
    }
}

impl Read for api::L2Advertisement {
    type Schema = AdvertisementSchema;
}

impl Kind for api::L2Advertisement {
    const NAME: &str = "L2Advertisement";
    const NAMESPACED: bool = true;
    const OPTIONAL: bool = true;
    type Change = (ObjectName, Option<Advertisement>);

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        Ok((name.clone(), Some(Advertisement::new(self)?)).into())
    }

    fn gone(name: ObjectName) -> Self::Change {
        (name, None)
    }
}

/// Any Node, which may be a member.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct AnyNode(api::Node);

impl Read for AnyNode {
    type Schema = core::Node;
}

impl Kind for AnyNode {
    const NAME: &str = "Node";
    const NAMESPACED: bool = false;
    type Change = (ObjectName, Option<Member>);

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        let address = node_ips(&self.0.status).first().copied();
        Ok((name.clone(), Some(Member::new(&self.0, address))).into())
    }

    fn gone(name: ObjectName) -> Self::Change {
        (name, None)
    }
}

/// The ConfigMap with the voters.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct VotersObject {
    #[serde(default)]
    metadata: api::ObjectMeta,
    #[serde(default)]
    data: BTreeMap<String, String>,
}

const GENERATION: &str = "generation";
/// Key of the names of the voters, separated by spaces.
const NAMES: &str = "voters";

impl Read for VotersObject {
    type Schema = core::ConfigMap;
}

impl Kind for VotersObject {
    const NAME: &str = "ConfigMap";
    const NAMESPACED: bool = true;
    /// The voters, and the version of the object.
    type Change = Option<(Voters, Option<String>)>;

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        let invalid = |field: &str| {
            let why = "not what agents write here: delete the ConfigMap, and they make a new one".to_owned();
            ConvertError { kind: Self::NAME, object: name.to_string(), field: format!("data.{field}"), why }
        };
        let text = |field: &str| self.data.get(field).ok_or_else(|| invalid(field));
        let generation = text(GENERATION)?.parse().ok().ok_or_else(|| invalid(GENERATION))?;
        let names = text(NAMES)?.split_whitespace().map(Into::into).collect();
        Ok(Some((Voters { generation, names }, self.metadata.resource_version.clone())).into())
    }

    fn gone(_name: ObjectName) -> Self::Change {
        None
    }
}

/// The ConfigMap with these voters, to write in place of the version `replaces`.
pub(super) fn object(voters: &Voters, replaces: Option<String>) -> core::ConfigMap {
    let names: Vec<&str> = voters.names.iter().map(|name| &**name).collect();
    core::ConfigMap {
        metadata: ObjectMeta {
            name: Some(super::VOTERS.to_owned()),
            resource_version: replaces,
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([
            (GENERATION.to_owned(), voters.generation.to_string()),
            (NAMES.to_owned(), names.join(" ")),
        ])),
        ..core::ConfigMap::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voters_are_read_as_they_are_written() {
        let voters = Voters { generation: 7, names: ["a".into(), "b.example".into()].into() };
        let written = serde_json::to_value(object(&voters, Some("5".into()))).unwrap();
        let read: VotersObject = serde_json::from_value(written.clone()).unwrap();
        let name = ObjectName::new("kube-system", super::super::VOTERS);
        assert_eq!(read.change(&name).unwrap().value, Some((voters, Some("5".to_owned()))));
        for field in [GENERATION, NAMES] {
            let mut broken = written.clone();
            broken["data"].as_object_mut().unwrap().remove(field);
            let broken: VotersObject = serde_json::from_value(broken).unwrap();
            assert!(broken.change(&name).unwrap_err().field.contains(field));
        }
    }
}
