//! Announcing by BGP. The agent speaks no BGP: it offers routes to a BGP daemon on the node, and writes the configuration of
//! one (BIRD) from MetalLB's objects.
//!
//! ```text
//! advertisement  BGPAdvertisement: which pools are announced, as which routes, with which attributes
//! community      values of communities, and their names
//! peer           BGPPeer and BFDProfile: to whom
//! routes         the routes that this node offers
//! bird           the configuration of BIRD
//! ```
//!
//! A route means that the node serves the addresses now. Its attributes are a matter of the configuration, which changes with
//! the objects only, so that no Service changes it.

mod advertisement;
mod bird;
mod community;
mod peer;
mod routes;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use self::{
    advertisement::BgpAdvertisement,
    bird::{Configuration, PROTOCOL, configuration, without_passwords},
    community::Community,
    peer::{BfdProfile, Peer},
    routes::{Offer, routes},
};
use crate::model::ObjectName;

/// A valid object.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// `BGPAdvertisement`
    Advertisement(BgpAdvertisement),
    /// `BGPPeer`
    Peer(Box<Peer>),
    /// `Community`: names of communities with their values.
    Communities(BTreeMap<String, Community>),
    /// `BFDProfile`
    Profile(BfdProfile),
}

/// The valid objects, by name.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Objects {
    /// `BGPAdvertisement`
    pub advertisements: BTreeMap<ObjectName, BgpAdvertisement>,
    /// `BGPPeer`
    pub peers: BTreeMap<ObjectName, Peer>,
    /// `Community`: names of communities with their values.
    pub communities: BTreeMap<ObjectName, BTreeMap<String, Community>>,
    /// `BFDProfile`
    pub profiles: BTreeMap<ObjectName, BfdProfile>,
}

impl Objects {
    /// Adds or replaces an object.
    pub fn set(&mut self, name: &ObjectName, object: Object) {
        let name = name.clone();
        match object {
            Object::Advertisement(advertisement) => _ = self.advertisements.insert(name, advertisement),
            Object::Peer(peer) => _ = self.peers.insert(name, *peer),
            Object::Communities(names) => _ = self.communities.insert(name, names),
            Object::Profile(profile) => _ = self.profiles.insert(name, profile),
        }
    }

    /// Removes an object.
    pub fn remove(&mut self, name: &ObjectName, object: &Object) {
        match object {
            Object::Advertisement(_) => _ = self.advertisements.remove(name),
            Object::Peer(_) => _ = self.peers.remove(name),
            Object::Communities(_) => _ = self.communities.remove(name),
            Object::Profile(_) => _ = self.profiles.remove(name),
        }
    }
}
