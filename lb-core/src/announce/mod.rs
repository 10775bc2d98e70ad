//! Decides which node announces which address of a load balancer: at layer 2 on which devices, and by BGP to which
//! routers.
//!
//! ```text
//! scope          which pools an advertisement announces, from which nodes
//! advertisement  MetalLB's L2Advertisement: which pools are announced, by which nodes, on which devices
//! holders        the Services that have each address, and the nodes with endpoints
//! cluster        the nodes of a cluster as members that share addresses
//! devices        the devices on which a node can announce, as it reports them
//! coverage       the addresses that no advertisement covers
//! election       the nodes that may announce an address, the best first
//! schedule       when an announcement is repeated
//! voters         the members that grant the right to announce, while nodes come and go
//! evidence       the grants that a candidate has received
//! freshness      distinguishes a new request from a duplicate of an earlier one
//! lease          the right to announce, for nodes that share addresses
//! bgp            the routes that a node offers, and the configuration of its BGP daemon
//! ```
//!
//! At layer 2 an election only proposes a node, because nodes see changes at different times. A node answers ARP
//! requests and neighbour solicitations for an address only while it has the right to announce the address.

pub mod advertisement;
pub mod bgp;
pub mod cluster;
pub mod coverage;
pub mod devices;
pub mod election;
mod evidence;
pub mod freshness;
pub mod holders;
pub mod lease;
pub mod schedule;
mod scope;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
pub mod voters;
