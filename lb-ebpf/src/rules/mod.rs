//! The decisions of the data plane, each defined once. The programs (`datapath/`, `sockets/`) call them, and `lb-agent
//! explain` calls most of them.
//!
//! A rule is a pure function over values that its caller has looked up; a closure stands for a lookup that is rarely
//! needed. A rule with several answers returns an enum without fields, which fits into one register.
//!
//! ```text
//! admission   may a flow begin with this packet, from this client, for this service
//! announce    does the node answer for an address that it announces
//! client      is the client internal to the cluster, and does its backend answer it directly
//! dns         does a query go to the DNS server of the agent on this node
//! flow        does an entry of the flow table apply to the packet, may another flow replace it
//! forwarding  hairpin, tunnel, masqueraded or not; may the flow be routed
//! fragments   how later fragments are treated if the first one gets no flow
//! icmp_limit  how many ICMP errors the node sends
//! limit       how many connections may begin, for all clients and for each one
//! proxy_protocol  what happens to segments of flows with a PROXY protocol header
//! source_port which source ports sockets of the node may also use, and how many a new connection tries
//! token_bucket  how often something may happen
//! tunnel      may the packet be in a tunnel that ends at this node
//! unlisted    an address and port that no Service has
//! socket      what a system call returns
//! ```

pub mod admission;
pub mod announce;
pub mod client;
pub mod dns;
pub mod flow;
pub mod forwarding;
pub mod fragments;
pub mod icmp_limit;
pub mod limit;
pub mod proxy_protocol;
pub mod socket;
pub mod source_port;
pub mod token_bucket;
pub mod tunnel;
pub mod unlisted;
