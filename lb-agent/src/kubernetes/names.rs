//! The watches that DNS names need: all Services, EndpointSlices and Namespaces. The proxy's own watches leave out
//! headless Services and their slices, and discard the ports of Services that another proxy serves (those with the
//! label `service.kubernetes.io/service-proxy-name`).

use std::{convert::Infallible, sync::Arc, time::SystemTime};

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use lb_core::{
    api::{EndpointSlice, ObjectMeta, Service},
    convert::{ConvertError, Converted},
    dns::{self, NameChange, Unread},
    model::ObjectName,
};
use lb_dns::Names;
use serde::Deserialize;
use tracing::warn;

use super::{
    client::{ApiServer, KubernetesError, watching_client},
    kind::{self, Kind},
    watch::Watch,
    watched::Read,
};

/// Any Service, also a headless one or one of another proxy. [`Kind::change`] reduces it to what DNS names need.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct NamedService(Service);

/// An EndpointSlice of any Service, which [`Kind::change`] reduces to what DNS names need.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct NamedSlice(EndpointSlice);

/// A Namespace: its DNS name exists even if the Namespace has no Service.
#[derive(Clone, Debug, Deserialize)]
struct NamedNamespace {}

impl Read for NamedNamespace {
    type Schema = core::Namespace;
}

impl Kind for NamedNamespace {
    const NAME: &str = "Namespace";
    const NAMESPACED: bool = false;
    type Change = NameChange;

    fn change(&self, name: &ObjectName) -> Result<Converted<NameChange>, ConvertError> {
        Ok(NameChange::Namespace(name.clone(), true).into())
    }

    fn gone(name: ObjectName) -> NameChange {
        NameChange::Namespace(name, false)
    }
}

impl Read for NamedService {
    type Schema = core::Service;
}

impl Kind for NamedService {
    const NAME: &str = "Service";
    const NAMESPACED: bool = true;
    type Change = NameChange;

    fn change(&self, _name: &ObjectName) -> Result<Converted<NameChange>, ConvertError> {
        Ok(dns::service(&self.0, None)?.into())
    }

    fn gone(name: ObjectName) -> NameChange {
        NameChange::Service(name, None)
    }

    fn service(name: &ObjectName, metadata: &ObjectMeta) -> Option<ObjectName> {
        Service::service(name, metadata)
    }
}

impl Read for NamedSlice {
    type Schema = discovery::EndpointSlice;
}

impl Kind for NamedSlice {
    const NAME: &str = "EndpointSlice";
    const NAMESPACED: bool = true;
    type Change = NameChange;

    fn change(&self, _name: &ObjectName) -> Result<Converted<NameChange>, ConvertError> {
        Ok(dns::endpoint_slice(&self.0)?.into())
    }

    fn gone(name: ObjectName) -> NameChange {
        NameChange::Slice(name, None)
    }

    fn service(name: &ObjectName, metadata: &ObjectMeta) -> Option<ObjectName> {
        EndpointSlice::service(name, metadata)
    }
}

/// Follows the API server. `names` are synchronised once the API server has listed all Services and EndpointSlices, and
/// has listed, or has refused to list, all Namespaces. If the API server refuses, Namespaces without Services have no
/// names. While the API server does not answer, names keep their last state; the proxy's watches report why.
///
/// # Errors
///
/// A configuration without a usable API server. A server that does not answer is retried forever.
pub async fn follow_names(server: ApiServer, names: Arc<Names>) -> Result<Infallible, KubernetesError> {
    let (client, _) = watching_client(server).await?;
    let now = SystemTime::now();
    let mut services: Watch<NamedService> = Watch::new(client.clone(), kind::all(), now);
    let mut slices: Watch<NamedSlice> = Watch::new(client.clone(), kind::all(), now);
    let mut namespaces: Watch<NamedNamespace> = Watch::new(client, kind::all(), now);
    let mut unread = Unread::default();
    let mut warned = false;
    loop {
        let changes = tokio::select! {
            changes = services.next() => changes,
            changes = slices.next() => changes,
            changes = namespaces.next() => changes,
        };
        names.apply(changes.ok_or(KubernetesError::Ended)?);
        let services_unread = services.unread().into_iter().chain(slices.unread()).collect();
        if unread.services != services_unread {
            unread.services = services_unread;
            names.set_unread(unread.clone());
        }
        if namespaces.is_settled() && !namespaces.is_listed() && !std::mem::replace(&mut warned, true) {
            warn!(
                "the API server refuses to list Namespaces, so names in a namespace without Services do not exist: allow \
                 the agent to list and watch them"
            );
        }
        if services.is_listed() && slices.is_listed() && namespaces.is_settled() {
            names.set_synchronised();
        }
    }
}
