//! Announcing by BGP. The agent speaks no BGP: it offers routes to a BGP daemon on the node, and writes the
//! configuration of the daemon BIRD from MetalLB's objects.
//!
//! ```text
//! advertisement  BGPAdvertisement: which pools are announced, as which routes, with which attributes
//! community      values of communities, and their names
//! objects        the valid objects of these kinds
//! peer           BGPPeer and BFDProfile: the routers that get the routes, and how their failure is detected
//! routes         the routes that this node offers
//! bird           the configuration of BIRD
//! token          names and texts of objects in that configuration
//! ```
//!
//! A route means that the node serves the addresses now. The attributes of routes are in the configuration of BIRD,
//! which depends on MetalLB's objects, the node's labels and the agent's options, never on a Service.

mod advertisement;
mod bird;
mod community;
mod objects;
mod peer;
mod routes;
#[cfg(test)]
mod tests;
mod token;

pub use self::{
    advertisement::BgpAdvertisement,
    bird::{Configuration, PROTOCOL, configuration, session_count, without_passwords},
    community::Community,
    objects::{Object, Objects, Unread},
    peer::{BfdProfile, Peer},
    routes::{Adopted, AnnouncedAddress, Offer, announced, is_refuted, routes},
};
