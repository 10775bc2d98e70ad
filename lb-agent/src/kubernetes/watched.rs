//! An object of a list or watch, as decoded from JSON.

use std::{borrow::Cow, fmt::Debug};

use k8s_openapi::apimachinery::pkg::apis::meta::v1;
use kube::Resource;
use lb_core::api::ObjectMeta;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

/// A kind of the Kubernetes API that is decoded as a type of `lb_core::api`.
pub(super) trait Read: DeserializeOwned + Clone + Debug + Send + 'static {
    /// The `k8s_openapi` type that defines the API path of the kind.
    type Schema: Resource<DynamicType = ()>;
}

/// An object whose content may be unreadable, so that one object of an unexpected form does not stop the watch.
/// Unreadable metadata count as empty.
#[derive(Clone, Debug)]
pub(super) struct Watched<K> {
    pub(super) metadata: ObjectMeta,
    /// The decoded object, or why it is unreadable.
    pub(super) object: Result<K, String>,
    /// The object's name, namespace and resource version, which the watch needs.
    version: v1::ObjectMeta,
}

impl<'de, K: Read> Deserialize<'de> for Watched<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let metadata = value.get("metadata").map(ObjectMeta::deserialize);
        let metadata = metadata.and_then(Result::ok).unwrap_or_default();
        let version = v1::ObjectMeta {
            name: metadata.name.clone(),
            namespace: metadata.namespace.clone(),
            resource_version: metadata.resource_version.clone(),
            ..v1::ObjectMeta::default()
        };
        let object = serde_path_to_error::deserialize(value).map_err(|error| error.to_string());
        Ok(Self { metadata, object, version })
    }
}

impl<K: Read> Resource for Watched<K> {
    type DynamicType = ();
    type Scope = <K::Schema as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::Schema::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::Schema::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::Schema::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::Schema::plural(&())
    }

    fn meta(&self) -> &v1::ObjectMeta {
        &self.version
    }

    fn meta_mut(&mut self) -> &mut v1::ObjectMeta {
        &mut self.version
    }
}
