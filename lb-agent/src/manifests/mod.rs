//! The source that needs no Kubernetes: a folder of manifests.
//!
//! The folder is taken as `kubectl apply -f DIR` takes it: every `*.yaml`, `*.yml` and `*.json` file in it, but not in
//! folders within it, with any number of documents. `v1 Service`, `discovery.k8s.io/v1 EndpointSlice`, `v1 Endpoints`
//! and lists of them count; objects of other kinds may lie beside them. Hidden files are left alone.
//!
//! The agent stands in for the API server: it fills in the same defaults, refuses what the API server would refuse,
//! and gives out cluster IPs and node ports. A mistake costs only the object it is in, and that object stays in its
//! last good state; for an agent that is started with the mistake that is what the kernel holds of it.

mod addresses;
mod documents;
mod file;
mod folder;
mod names;
mod options;
mod parse;
mod problem;
mod read;
mod run;
mod settle;
#[cfg(test)]
mod tests;
mod validate;
mod watch;

pub use self::{
    folder::{Content, Edit, Manifests, Update},
    options::ManifestsOptions,
    problem::{DocumentPlace, Place, Problem, Severity},
    run::{ManifestsError, run},
};
