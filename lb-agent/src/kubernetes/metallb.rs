//! MetalLB's kinds, whose CRDs may be installed while the agent runs.

use std::{borrow::Cow, fmt::Debug, marker::PhantomData};

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;
use lb_core::{
    convert::{ConvertError, Converted},
    model::ObjectName,
};
use serde::de::DeserializeOwned;

use super::{kind::Keyed, watched::Read};

/// What the agent does with an object for BGP of which it has never read a valid version. Routes are in the kernel, and
/// sessions in BIRD's file: both outlive the agent that created them.
pub(super) const ROUTES_AND_SESSIONS_STAY: &str =
    "it is left out, but routes and BGP sessions that an earlier agent made from it stay";

/// A kind of the API group `metallb.io`. Every such kind is [`Keyed`].
pub(super) trait MetalLb: DeserializeOwned + Clone + Debug + Send + 'static {
    /// The name of the kind, as in the field `kind` of its objects.
    const NAME: &str;
    /// The kind's name in API paths.
    const PLURAL: &str;
    /// The API version in which the agent reads the kind.
    const VERSION: &str = "v1beta1";
    /// As [`Keyed::AFTER_RESTART`].
    const AFTER_RESTART: &str = "it is left out";
    /// What the receiver of the watch gets for an object that exists.
    type Content: Send;

    /// The content of the object, and what was left out of it.
    fn content(&self) -> Result<Converted<Self::Content>, ConvertError>;
}

impl<K: MetalLb> Read for K {
    type Schema = Schema<K>;
}

impl<K: MetalLb> Keyed for K {
    const NAME: &str = <K as MetalLb>::NAME;
    const NAMESPACED: bool = true;
    const OPTIONAL: bool = true;
    const AFTER_RESTART: &str = <K as MetalLb>::AFTER_RESTART;
    type Content = <K as MetalLb>::Content;

    fn content(&self, _name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        MetalLb::content(self)
    }
}

/// Tells `kube` the API path of the kind `K`.
#[derive(Clone, Debug)]
pub(super) struct Schema<K> {
    metadata: ObjectMeta,
    kind: PhantomData<K>,
}

impl<K: MetalLb> Resource for Schema<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        <K as MetalLb>::NAME.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "metallb.io".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        K::VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
