//! The map `INSIDE_DEVICES`: devices through which packets of internal clients enter.

use std::collections::BTreeSet;

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
};

/// The map `INSIDE_DEVICES`. Only one instance may be used at a time.
#[derive(Debug)]
pub struct InternalDevices {
    map: Table<u32, u32>,
}

impl InternalDevices {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        Ok(Self { map: Table::open(&layout::INSIDE_DEVICES, &folder.map("INSIDE_DEVICES"))? })
    }

    /// The interface indices of the devices in the map.
    pub fn get(&self) -> Result<BTreeSet<u32>, DatapathError> {
        Ok(self.map.entries()?.into_keys().collect())
    }

    /// Makes the map contain exactly these interface indices.
    pub fn set(&mut self, devices: &BTreeSet<u32>) -> Result<(), DatapathError> {
        let present = self.get()?;
        let gone: Vec<u32> = present.difference(devices).copied().collect();
        let new: Vec<u32> = devices.difference(&present).copied().collect();
        self.map.delete_all(&gone)?;
        self.map.update_all(&new, &vec![1; new.len()])
    }
}
