//! The agent and an API server: the Services in the kernel when objects change, and when lists, watches and the server
//! fail.
//!
//! Needs root and `target/debug/lb-agent`, and fails without them. With `LB_TEST_KUBECONFIG=FILE` the module
//! [`contract`] and some tests of [`source`] use the API server of that file, which must allow cluster IPs in
//! 10.96.192.0/19. The other tests need the mock server of [`api_server`].
#![expect(clippy::unwrap_used, reason = "a test panics when the testbed fails")]

mod addresses;
mod announce;
mod api_server;
mod bed;
mod cluster;
mod contract;
mod dsr;
mod endpoint_health;
mod environment;
mod faults;
mod health;
mod kubectl;
mod migration;
mod missing_crds;
mod names;
mod names_follow;
mod node;
mod pod_exec;
mod running_agent;
mod segment;
mod selection;
mod source;
mod traffic;
