//! Tests of the agent and its programs with real sockets in network namespaces.
//!
//! These tests need root and `target/debug/lb-agent`, and fail without them. `cargo xtask test` builds the agent and
//! runs the tests. So does `cargo build -p lb-agent && cargo test -p lb-tests --test netns --
//! --test-threads=3`, but it does not build the agent that the tests of upgrades to another layout need.
#![expect(clippy::unwrap_used, reason = "a test panics when the testbed fails")]

mod addresses;
mod affinity;
mod agent_restart;
mod agent_upgrade;
mod announce;
mod attack;
mod attack_rates;
mod balancing;
mod bed;
mod bgp;
mod bugreport;
mod clock;
mod connection_ends;
mod connections;
mod deploy;
mod devices;
mod dns;
mod dsr;
mod edits;
mod endpoint_health;
mod environment;
mod explain;
mod faults;
mod flood;
mod flow_log;
mod forwarding;
mod fragments;
mod hairpin;
mod health;
mod ipvs;
mod kube_ipvs;
mod lan;
mod leftovers;
mod limits;
mod live_commands;
mod load_balancers;
mod masquerade;
mod neighbours;
mod no_agent;
mod node;
mod node_ports;
mod passthrough;
mod path_mtu;
mod pins;
mod policies;
mod port_collisions;
mod pressure;
mod profile;
mod proxy_protocol;
mod reject;
mod schedulers;
mod sctp;
mod soak;
mod soak_without_agent;
mod socket_lifetime;
mod socket_policies;
mod sockets;
mod stale_udp;
mod supervisor;
mod survival;
mod testbed;
mod transfer;
mod virtio;
mod web;
mod xdp;
