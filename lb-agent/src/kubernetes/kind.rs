use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::Resource;
use lb_core::{
    convert::{self, ConvertError},
    model::{Change, ObjectName},
};
use serde::de::DeserializeOwned;

/// kube-proxy's selector of labels, for both kinds: not what another proxy serves, not what nobody does.
pub(super) const LABELS: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// A kind of objects that is watched.
pub(super) trait Kind:
    Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static
{
    /// `kind`
    const NAME: &str;
    /// kube-proxy's selector of fields.
    const FIELDS: Option<&str>;

    /// The object as the rest of the agent sees it.
    fn change(&self) -> Result<Change, ConvertError>;

    /// The object is gone.
    fn gone(name: ObjectName) -> Change;
}

impl Kind for Service {
    const NAME: &str = "Service";
    const FIELDS: Option<&str> = Some("spec.clusterIP!=None");

    fn change(&self) -> Result<Change, ConvertError> {
        convert::service(self)
    }

    fn gone(name: ObjectName) -> Change {
        Change::Service(name, None)
    }
}

impl Kind for EndpointSlice {
    const NAME: &str = "EndpointSlice";
    const FIELDS: Option<&str> = None;

    fn change(&self) -> Result<Change, ConvertError> {
        convert::endpoint_slice(self)
    }

    fn gone(name: ObjectName) -> Change {
        Change::EndpointSlice(name, None)
    }
}
