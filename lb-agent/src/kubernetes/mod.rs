//! The Kubernetes source: watches an API server for Services, EndpointSlices, ServiceCIDRs, the Node of this agent and,
//! if the programs decapsulate tunnelled packets, all other Nodes.
//!
//! A watch of each kind (list, then follow) returns events, which [`objects::Objects`] turns into changes. `Objects`
//! keeps only the name of each object, and hashes that show whether the object has changed. While the API server is
//! unreachable, the last known state stays in force. `docs/kubernetes.md` says what the agent does when something
//! fails. [`addresses`] is a separate task, which assigns addresses to Services of type LoadBalancer.

pub mod addresses;
pub mod announce;
mod client;
mod conditions;
mod crds;
pub mod events;
mod kind;
mod metallb;
mod names;
mod node;
mod objects;
mod pace;
mod run;
#[cfg(test)]
mod tolerance_test;
mod watch;
mod watched;

pub(crate) use self::watch::at;
pub use self::{
    client::{ApiServer, KubernetesError},
    events::Events,
    names::follow_names,
    node::NodeInfo,
    run::{Published, run},
};
