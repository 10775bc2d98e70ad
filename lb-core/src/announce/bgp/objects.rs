//! The MetalLB objects that say what is announced by BGP, and to whom.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    advertisement::BgpAdvertisement,
    community::Community,
    peer::{BfdProfile, Peer},
};
use crate::model::ObjectName;

/// A valid object that concerns BGP.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A `BGPAdvertisement`: which routes to announce to which peers.
    Advertisement(BgpAdvertisement),
    /// A `BGPPeer`: a router that learns routes from nodes.
    Peer(Box<Peer>),
    /// A `Community` object: names of communities with their values.
    Communities(BTreeMap<String, Community>),
    /// A `BFDProfile`: how the failure of a router is detected.
    Profile(BfdProfile),
}

/// All valid objects that concern BGP, by kind and name.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Objects {
    /// The `BGPAdvertisement` objects.
    pub advertisements: BTreeMap<ObjectName, BgpAdvertisement>,
    /// The `BGPPeer` objects.
    pub peers: BTreeMap<ObjectName, Peer>,
    /// The `Community` objects, each with names of communities and their values.
    pub communities: BTreeMap<ObjectName, BTreeMap<String, Community>>,
    /// The `BFDProfile` objects.
    pub profiles: BTreeMap<ObjectName, BfdProfile>,
    /// The objects that exist, but that the agent has never been able to read.
    pub unread: Unread,
}

/// Names of objects that exist, but that the agent has never been able to read. An earlier agent may have read them
/// before an edit made them invalid. Then the routing table and BIRD's file still have the routes and sessions of the
/// objects' last good state, which this agent does not know.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Unread {
    /// `BGPAdvertisement` objects.
    pub advertisements: BTreeSet<ObjectName>,
    /// `BGPPeer` objects.
    pub peers: BTreeSet<ObjectName>,
    /// `IPAddressPool` objects.
    pub pools: BTreeSet<ObjectName>,
}

impl Unread {
    /// Whether the last good state of one of these objects may ask for routes.
    pub fn may_ask_for_routes(&self) -> bool {
        !(self.advertisements.is_empty() && self.pools.is_empty())
    }
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

    /// Removes the object of this name and of the kind of `object`, whose content does not matter.
    pub fn remove(&mut self, name: &ObjectName, object: &Object) {
        match object {
            Object::Advertisement(_) => _ = self.advertisements.remove(name),
            Object::Peer(_) => _ = self.peers.remove(name),
            Object::Communities(_) => _ = self.communities.remove(name),
            Object::Profile(_) => _ = self.profiles.remove(name),
        }
    }
}
