//! The agent: watches Services and EndpointSlices and keeps the maps of the data plane up to date.

pub mod announce;
pub mod cli;
pub mod commands;
pub mod config;
pub mod daemon;
#[cfg(test)]
mod deploy_test;
pub mod explain;
pub mod flow_log;
pub mod health;
pub mod host_rules;
mod http_server;
#[cfg(test)]
mod http_test;
pub mod kubernetes;
pub mod leftovers;
mod log_few;
pub mod manifests;
pub mod metrics;
pub mod node;
pub mod probe;
mod stop;
pub mod zpages;
