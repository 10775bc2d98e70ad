//! The tc and XDP programs, packet by packet, through `BPF_PROG_TEST_RUN`. Needs root. No program is attached.
//!
//! A case is a base packet, a mutation of the one property under test, and the result: the return code, the packet
//! (built from scratch by etherparse with its own checksums, never with our checksum code), the counters (that of the
//! outcome increases by one and *no other one changes*), and the entries of the flow table if they matter.
//!
//! ```text
//! testbed   maps, programs, and a packet through one      packets   builds packets: input and expectation
//! stage     addresses that the cases share                report    prints and saves a wrong packet
//! wire      a namespace with wires, for XDP and routes    test_run  the kernel's command
//! clock     the clock of the programs
//! ```
#![expect(clippy::unwrap_used, reason = "tests")]

mod clock;
mod packets;
mod report;
mod stage;
mod test_run;
mod testbed;
mod wire;

mod affinity;
mod announce;
mod decapsulate;
mod early;
mod events;
mod explain;
mod filter;
mod forged;
mod fragments;
mod full;
mod headers;
mod icmp;
mod life;
mod limits;
mod link_layer;
mod masquerade;
mod new_flow;
mod next_hop;
mod node_dns;
mod of_node;
mod policies;
mod proxy_protocol;
mod races;
mod random;
mod reject;
mod schedulers;
mod sctp;
mod traffic;
mod tunnel;
mod verifier;
mod vips;
mod xdp;
