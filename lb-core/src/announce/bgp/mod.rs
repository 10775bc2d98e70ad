//! Announcing by BGP. The agent speaks no BGP: it offers routes to a BGP daemon on the node, and writes the configuration of
//! one (BIRD) from MetalLB's objects.
//!
//! ```text
//! advertisement  BGPAdvertisement: which pools are announced, as which routes, with which attributes
//! community      values of communities, and their names
//! objects        all of them
//! peer           BGPPeer and BFDProfile: to whom
//! routes         the routes that this node offers
//! bird           the configuration of BIRD
//! token          texts of objects within it
//! ```
//!
//! A route means that the node serves the addresses now. Its attributes are a matter of the configuration, which changes with
//! the objects only, so that no Service changes it.

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
    bird::{Configuration, PROTOCOL, configuration, without_passwords},
    community::Community,
    objects::{Object, Objects},
    peer::{BfdProfile, Peer},
    routes::{Adopted, Offer, routes},
};
