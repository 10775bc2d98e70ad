//! The kinds of objects that the agent watches for announcements at layer 2 and by BGP.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use lb_core::{
    announce::{
        advertisement::Advertisement,
        bgp::{BfdProfile, BgpAdvertisement, Community, Peer},
        cluster::Member,
        voters::Voters,
    },
    api,
    convert::{ConvertError, Converted},
    model::ObjectName,
};
use serde::Deserialize;

use super::super::{
    kind::{Keyed, Kind},
    metallb::{MetalLb, ROUTES_AND_SESSIONS_STAY},
    node::node_ips,
    watched::Read,
};

impl MetalLb for api::L2Advertisement {
    const NAME: &str = "L2Advertisement";
    const PLURAL: &str = "l2advertisements";
    type Content = Advertisement;

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(Advertisement::new(self)?.into())
    }
}

impl MetalLb for api::BgpAdvertisement {
    const NAME: &str = "BGPAdvertisement";
    const PLURAL: &str = "bgpadvertisements";
    const AFTER_RESTART: &str = ROUTES_AND_SESSIONS_STAY;
    type Content = BgpAdvertisement;

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(BgpAdvertisement::new(self)?.into())
    }
}

impl MetalLb for api::BgpPeer {
    const NAME: &str = "BGPPeer";
    const PLURAL: &str = "bgppeers";
    const VERSION: &str = "v1beta2";
    const AFTER_RESTART: &str = ROUTES_AND_SESSIONS_STAY;
    type Content = Peer;

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(Peer::new(self)?.into())
    }
}

impl MetalLb for api::Community {
    const NAME: &str = "Community";
    const PLURAL: &str = "communities";
    type Content = BTreeMap<String, Community>;

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(Community::names(self)?.into())
    }
}

impl MetalLb for api::BfdProfile {
    const NAME: &str = "BFDProfile";
    const PLURAL: &str = "bfdprofiles";
    type Content = BfdProfile;

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        let (value, left_out) = BfdProfile::new(self)?;
        Ok(Converted { value, left_out })
    }
}

/// A Node of the cluster, which the agent reads as a [`Member`].
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct AnyNode(api::Node);

impl Read for AnyNode {
    type Schema = core::Node;
}

impl Keyed for AnyNode {
    const NAME: &str = "Node";
    const NAMESPACED: bool = false;
    type Content = Member;

    fn content(&self, _name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(Member::new(&self.0, node_ips(&self.0.status)).into())
    }
}

/// The ConfigMap with the voters, as decoded from JSON.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct VotersObject {
    #[serde(default)]
    metadata: api::ObjectMeta,
    #[serde(default)]
    data: BTreeMap<String, String>,
}

/// The content and the version of the ConfigMap with the voters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The voters; `None` if the content is not what agents write.
    pub(super) voters: Option<Voters>,
    /// The `resourceVersion` of the ConfigMap.
    pub(super) version: Option<String>,
}

/// Parses the voters; returns the name of the first invalid field as the error.
pub(super) fn voters(data: &BTreeMap<String, String>) -> Result<Voters, &'static str> {
    let generation = data.get(GENERATION).and_then(|text| text.parse().ok());
    let generation = generation.filter(|generation| *generation <= Voters::LAST).ok_or(GENERATION)?;
    let names = data.get(NAMES).ok_or(NAMES)?.split_whitespace().map(Into::into).collect();
    Ok(Voters { generation, names })
}

const GENERATION: &str = "generation";
/// Key, in the ConfigMap's data, of the voters' names, which are separated by spaces.
const NAMES: &str = "voters";

impl Read for VotersObject {
    type Schema = core::ConfigMap;
}

impl Kind for VotersObject {
    const NAME: &str = "ConfigMap";
    const NAMESPACED: bool = true;
    /// The content and version of the ConfigMap; `None` if it was deleted.
    type Change = Option<Found>;

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        let version = self.metadata.resource_version.clone();
        let (voters, left_out) = match voters(&self.data) {
            Ok(voters) => (Some(voters), Vec::new()),
            Err(field) => {
                let (object, field) = (name.to_string(), format!("data.{field}"));
                let why = "not what agents write here; they replace it".to_owned();
                (None, vec![ConvertError { kind: Self::NAME, object, field, why }])
            }
        };
        Ok(Converted { value: Some(Found { voters, version }), left_out })
    }

    fn gone(_name: ObjectName) -> Self::Change {
        None
    }
}

/// A ConfigMap with these voters. `replaces` is the `resourceVersion` of the ConfigMap that it replaces; `None` for a
/// new ConfigMap.
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
        let version = Some("5".to_owned());
        let found = Found { voters: Some(voters), version: version.clone() };
        assert_eq!(read.change(&name).unwrap().value, Some(found));
        for (field, value) in [
            (GENERATION, None),
            (NAMES, None),
            (GENERATION, Some("-1")),
            (GENERATION, Some("18446744073709551615")),
            (GENERATION, Some("18446744073709551616")),
        ] {
            let mut broken = written.clone();
            match value {
                Some(value) => broken["data"][field] = value.into(),
                None => _ = broken["data"].as_object_mut().unwrap().remove(field),
            }
            let broken: VotersObject = serde_json::from_value(broken).unwrap();
            let Converted { value, left_out } = broken.change(&name).unwrap();
            // The agent replaces the unreadable ConfigMap, so it needs the version.
            assert_eq!(value, Some(Found { voters: None, version: version.clone() }));
            assert!(left_out[0].field.contains(field));
        }
    }
}
