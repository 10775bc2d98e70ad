//! The objects that say what is announced by BGP, and to whom.

use std::collections::BTreeMap;

use super::{
    advertisement::BgpAdvertisement,
    community::Community,
    peer::{BfdProfile, Peer},
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
