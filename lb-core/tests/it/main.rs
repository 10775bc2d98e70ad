//! Tests of the whole control plane against a fake kernel, which has only the maps.

mod categorize;
mod client;
mod connection_rules;
mod golden;
mod health;
mod kernel;
mod kube_proxy;
mod objects;
mod properties;
mod scale;
mod scenarios;
mod slow_start;
mod stale_udp;
mod unreadable;
mod world;
