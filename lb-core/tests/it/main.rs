//! The control plane as a whole, against a kernel that is a few maps.

mod categorize;
mod client;
mod golden;
mod kernel;
mod kube_proxy;
mod properties;
mod scale;
mod scenarios;
mod stale_udp;
mod world;
