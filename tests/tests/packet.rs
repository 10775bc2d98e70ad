//! The four tc programs, packet by packet, through `BPF_PROG_TEST_RUN`. Needs root, but no devices: nothing is attached.
//!
//! A case is a base packet, a mutation that shows the one thing that matters, and what becomes of it: the return code,
//! the packet (built anew by etherparse, checksums from scratch, never with our own checksum code), the counters (that
//! of the outcome moved by one and *no other one moved*), and the entries of `CONNTRACK` where they matter.
//!
//! ```text
//! bench     loads the object, runs a packet through a program      packets   builds packets: input and expectation
//! stage     the addresses and services the cases share             report    what a failure prints and writes
//! wire      a namespace with wires, for XDP and routes             test_run  the kernel's command
//! clock     the time as programs see it
//! ```
#![expect(clippy::unwrap_used, reason = "tests")]

mod packet {
    pub(crate) mod bench;
    pub(crate) mod clock;
    pub(crate) mod packets;
    pub(crate) mod report;
    pub(crate) mod stage;
    pub(crate) mod test_run;
    pub(crate) mod wire;

    mod affinity;
    mod decapsulate;
    mod early;
    mod events;
    mod explain;
    mod fragments;
    mod full;
    mod headers;
    mod icmp;
    mod life;
    mod masquerade;
    mod new_flow;
    mod policies;
    mod random;
    mod reject;
    mod schedulers;
    mod sctp;
    mod traffic;
    mod tunnel;
    mod verifier;
    mod vips;
    mod xdp;
}
