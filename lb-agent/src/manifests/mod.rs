//! The source that needs no Kubernetes: a folder of manifests.
//!
//! The agent reads the folder as `kubectl apply -f DIR` does: every `*.yaml`, `*.yml` and `*.json` file in it, without
//! subfolders, with any number of documents. It uses `v1 Service`, `discovery.k8s.io/v1 EndpointSlice`, `v1 Endpoints`,
//! lists of objects, `IPAddressPool` and other kinds of MetalLB, and the labels of `v1 Namespace`. It ignores objects
//! of other kinds, and hidden files.
//!
//! The agent replaces the API server: it applies the same defaults, rejects most of what the API server would reject,
//! and allocates cluster IPs, node ports and the addresses of Services of type LoadBalancer. An error in an object
//! affects only that object: its last good state stays in force. After a restart, the agent reads the last good
//! state of Services and endpoints from the kernel's maps.

mod addresses;
mod bgp;
mod condition;
mod documents;
mod file;
mod folder;
mod options;
mod parse;
mod read;
mod run;
mod schema;
mod settle;
#[cfg(test)]
mod tests;
mod validate;
mod watch;

pub use self::{
    condition::{Condition, DocumentLocation, Location, Severity},
    folder::{Content, Edit, Manifests, Update},
    options::ManifestsOptions,
    run::{ManifestsError, Published, run},
};
