//! Tests of everything that the agent creates or changes in the kernel: pins, maps, attachments, flows. Needs root.
//!
//! Each test runs in its own network and mount namespaces and leaves nothing behind.
//!
//! ```text
//! sandbox    the namespaces, the bpffs and the devices of a test    contents   services and endpoints as map contents
//! flows      flow table entries of a given age                      cost       CPU time of a function
//! ```
#![expect(clippy::unwrap_used, reason = "tests")]

mod contents;
mod cost;
mod flow_table;
mod flows;
mod sandbox;

mod attachment;
mod conntrack;
mod devices;
mod filter;
mod handover;
mod load;
mod maps;
mod memory;
mod pins;
mod status;
mod xdp;
