use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use kube::runtime::watcher;
use lb_core::{
    api::{EndpointSlice, Node, ObjectMeta, Service, ServiceCidr},
    convert::{self, ConvertError, Converted, HEADLESS, Origin, SERVICE_NAME},
    family::Family,
    model::{Change, ObjectName, Trigger},
    rules,
    strings::Strings,
};

use super::{
    node::{NodeInfo, PeerNode},
    watched::Read,
};

/// Annotation of an EndpointSlice with the time of the change in the cluster that caused its newest version.
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Maximum number of objects in one page of a list. Pages bound how much undecoded JSON is in memory at once.
const PAGE: u32 = 200;

/// A kind of Kubernetes objects that the agent watches.
pub(super) trait Kind: Read {
    /// The name of the kind, as in the field `kind` of its objects.
    const NAME: &str;
    /// Whether objects of the kind have a namespace, which messages then show before the name.
    const NAMESPACED: bool;
    /// Whether some supported API servers do not have the kind.
    const OPTIONAL: bool = false;
    /// What the agent does with an object of which it has never read a valid version, for example because an edit made
    /// the object invalid before the agent started. The end of a sentence for `lb-agent status`.
    const AFTER_RESTART: &str = "it is left out";
    /// What the receiver of the watch gets for a changed object.
    type Change: Send;

    /// Converts an object with this name to a change.
    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError>;

    /// Replaces strings in a change by equal strings of earlier changes, to share memory.
    fn share(_change: &mut Self::Change, _strings: &mut Strings) {}

    /// The change that reports that the object with this name was deleted.
    fn gone(name: ObjectName) -> Self::Change;

    /// The Service whose data are incomplete while the object with this name and metadata is unreadable; `None` if the
    /// object belongs to no Service.
    fn service(_name: &ObjectName, _metadata: &ObjectMeta) -> Option<ObjectName> {
        None
    }

    /// The time of the change in the cluster that caused the object's newest version, for the latency metric.
    fn triggered(&self) -> Option<Trigger> {
        None
    }
}

/// A kind whose change is the name of an object with the object's content, or with `None` if the object was deleted.
pub(super) trait Keyed: Read {
    /// As [`Kind::NAME`].
    const NAME: &str;
    /// As [`Kind::NAMESPACED`].
    const NAMESPACED: bool;
    /// As [`Kind::OPTIONAL`].
    const OPTIONAL: bool = false;
    /// As [`Kind::AFTER_RESTART`].
    const AFTER_RESTART: &str = "it is left out";
    /// What the receiver of the watch gets for an object that exists.
    type Content: Send;

    /// The content of the object with this name, and what was left out of it.
    fn content(&self, name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError>;
}

impl<K: Keyed> Kind for K {
    const NAME: &str = <K as Keyed>::NAME;
    const NAMESPACED: bool = <K as Keyed>::NAMESPACED;
    const OPTIONAL: bool = <K as Keyed>::OPTIONAL;
    const AFTER_RESTART: &str = <K as Keyed>::AFTER_RESTART;
    type Change = (ObjectName, Option<K::Content>);

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        Ok(self.content(name)?.map(|content| (name.clone(), Some(content))))
    }

    fn gone(name: ObjectName) -> Self::Change {
        (name, None)
    }
}

/// Selects all Services that are not headless: those that kube-proxy selects, and those that other proxies serve. If
/// the agent did not know the Services of other proxies, the programs would treat their cluster IPs as unassigned.
pub(super) fn services() -> watcher::Config {
    all().fields("spec.clusterIP!=None")
}

/// Selects the EndpointSlices that kube-proxy selects: not those of headless Services.
pub(super) fn endpoint_slices() -> watcher::Config {
    all().labels(&format!("!{HEADLESS}"))
}

/// Selects the object with this name.
pub(super) fn named_object(name: &str) -> watcher::Config {
    all().fields(&format!("metadata.name={name}"))
}

/// Selects all objects of the kind, in pages of [`PAGE`].
pub(super) fn all() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// Replaces the name in `change` by a clone of `name`, which shares the memory of its strings with `name`.
fn named(name: &ObjectName, change: Change) -> Change {
    match change {
        Change::Service(_, service) => Change::Service(name.clone(), service),
        Change::EndpointSlice(_, slice) => Change::EndpointSlice(name.clone(), slice),
    }
}

impl Read for Service {
    type Schema = core::Service;
}

impl Kind for Service {
    const NAME: &str = "Service";
    const NAMESPACED: bool = true;
    type Change = Change;

    fn change(&self, name: &ObjectName) -> Result<Converted<Change>, ConvertError> {
        Ok(convert::service(self, Origin::Cluster)?.map(|change| named(name, change)))
    }

    fn share(change: &mut Change, strings: &mut Strings) {
        strings.share(change);
    }

    fn gone(name: ObjectName) -> Change {
        Change::Service(name, None)
    }

    fn service(name: &ObjectName, _metadata: &ObjectMeta) -> Option<ObjectName> {
        Some(name.clone())
    }
}

impl Read for EndpointSlice {
    type Schema = discovery::EndpointSlice;
}

impl Kind for EndpointSlice {
    const NAME: &str = "EndpointSlice";
    const NAMESPACED: bool = true;
    type Change = Change;

    fn change(&self, name: &ObjectName) -> Result<Converted<Change>, ConvertError> {
        Ok(convert::endpoint_slice(self)?.map(|change| named(name, change)))
    }

    fn share(change: &mut Change, strings: &mut Strings) {
        strings.share(change);
    }

    fn gone(name: ObjectName) -> Change {
        Change::EndpointSlice(name, None)
    }

    fn service(name: &ObjectName, metadata: &ObjectMeta) -> Option<ObjectName> {
        let service = metadata.label(SERVICE_NAME).filter(|service| !service.is_empty())?;
        Some(ObjectName { namespace: name.namespace.clone(), name: service.into() })
    }

    fn triggered(&self) -> Option<Trigger> {
        let family = Family::ALL.into_iter().find(|family| family.as_str() == self.address_type)?;
        let text = self.metadata.annotation(TRIGGER_TIME)?;
        Some(Trigger { family, time: text.parse::<jiff::Timestamp>().ok()?.into() })
    }
}

impl Read for Node {
    type Schema = core::Node;
}

impl Kind for Node {
    const NAME: &str = "Node";
    const NAMESPACED: bool = false;
    type Change = Option<NodeInfo>;

    fn change(&self, _name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        Ok(Some(NodeInfo::new(self)).into())
    }

    fn gone(_name: ObjectName) -> Self::Change {
        None
    }
}

impl Read for PeerNode {
    type Schema = core::Node;
}

impl Keyed for PeerNode {
    const NAME: &str = "Node";
    const NAMESPACED: bool = false;
    type Content = Vec<IpAddr>;

    fn content(&self, _name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(self.addresses().into())
    }
}

impl Read for ServiceCidr {
    type Schema = networking::ServiceCIDR;
}

impl Keyed for ServiceCidr {
    const NAME: &str = "ServiceCIDR";
    const NAMESPACED: bool = false;
    const OPTIONAL: bool = true;
    type Content = Vec<IpNet>;

    fn content(&self, name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        let texts = self.spec.cidrs.iter().flatten();
        let parse = |(index, text): (usize, &String)| {
            text.parse::<IpNet>().map(|cidr| cidr.trunc()).map_err(|error| ConvertError {
                kind: <Self as Keyed>::NAME,
                object: name.name.to_string(),
                field: format!("spec.cidrs[{index}]"),
                why: rules::invalid(text, error),
            })
        };
        let texts = texts.enumerate().filter(|(_, text)| !text.is_empty());
        let cidrs: Vec<IpNet> = texts.map(parse).collect::<Result<_, _>>()?;
        Ok(cidrs.into())
    }
}
