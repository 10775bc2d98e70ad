//! The source of a cluster: an API server that is watched for Services and EndpointSlices.
//!
//! A watch of each kind (list, then follow) gives events; [`objects::Objects`] turns them into changes and keeps of
//! every object no more than its name and version. An API server that is away costs nothing but news: the last state
//! stays. `docs/kubernetes.md` says what happens under each fault.

mod client;
pub mod events;
mod kind;
mod node;
mod objects;
mod pace;
mod run;
#[cfg(test)]
mod tolerance_test;
mod trouble;
mod watch;
mod watched;

pub use self::{
    client::{ApiServer, KubernetesError},
    events::Events,
    node::NodeInfo,
    run::{Published, run},
};
