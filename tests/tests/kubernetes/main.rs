//! The agent and an API server: what happens to the Services in the kernel when objects change, and when lists,
//! watches and the server fail.
//!
//! Needs root and `target/release/lb-agent`, and fails without, like the other tests of this package. With
//! `LB_TEST_KUBECONFIG=FILE` the module [`contract`] uses the API server that the file leads to, which must give out
//! cluster IPs of 10.96.200.0/21; the others need faults that only the in-repo server has.
#![expect(clippy::unwrap_used, reason = "a test panics when the testbed fails")]

mod api_server;
mod bed;
mod cluster;
mod contract;
mod faults;
mod health;
mod node;
mod selection;
mod source;
mod traffic;
