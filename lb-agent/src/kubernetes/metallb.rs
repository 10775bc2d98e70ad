//! The API paths of MetalLB's kinds, whose CRDs may be installed while the agent runs.

use std::{borrow::Cow, marker::PhantomData};

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;

use super::kind::Kind;

/// A kind of the API group `metallb.io`.
pub(super) trait MetalLb: Kind {
    /// The kind's name in API paths.
    const PLURAL: &str;
    /// The API version in which the agent reads the kind.
    const VERSION: &str = "v1beta1";
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
        K::NAME.into()
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
