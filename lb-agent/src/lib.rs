//! The agent: watches Services and EndpointSlices and keeps the maps of the data plane in step with them.

pub mod datapath;
pub mod manifests;
