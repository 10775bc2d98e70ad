//! Maps that are sets: only their keys have a meaning, not their values.

use std::collections::BTreeSet;

use bytemuck::Pod;
use lb_common::{Address, Endpoint};

use crate::{
    bpf::{bpffs::Folder, layout::MapSpec, table::Table},
    error::DatapathError,
};

/// The map `INSIDE_DEVICES`: interface indices of the devices through which packets of internal clients enter.
pub type InternalDevices = KeySet<u32>;

/// The map `PEERS`: addresses of other nodes that may send tunnelled packets.
pub type PeerAddresses = KeySet<Address>;

/// The map `UNANSWERED`: backends that have left too many SYNs of a client unanswered.
pub type UnansweredBackends = KeySet<Endpoint>;

/// A map that is a set of keys. Only one instance for each map may be used at a time.
#[derive(Debug)]
pub struct KeySet<K> {
    map: Table<K, u32>,
}

impl<K: Pod + Ord> KeySet<K> {
    pub(crate) fn open(spec: &MapSpec, folder: &Folder) -> Result<Self, DatapathError> {
        Ok(Self { map: Table::open(spec, &folder.map(spec.name))? })
    }

    /// The keys in the map.
    pub fn get(&self) -> Result<BTreeSet<K>, DatapathError> {
        Ok(self.map.entries()?.into_keys().collect())
    }

    /// Deletes all keys from the map, and returns them.
    pub fn take(&mut self) -> Result<BTreeSet<K>, DatapathError> {
        let keys = self.get()?;
        self.map.delete_all(&keys.iter().copied().collect::<Vec<K>>())?;
        Ok(keys)
    }

    /// Makes the map contain exactly these keys.
    pub fn set(&mut self, keys: &BTreeSet<K>) -> Result<(), DatapathError> {
        let present = self.get()?;
        let gone: Vec<K> = present.difference(keys).copied().collect();
        let new: Vec<K> = keys.difference(&present).copied().collect();
        self.map.delete_all(&gone)?;
        self.map.update_all(&new, &vec![1; new.len()])
    }
}
