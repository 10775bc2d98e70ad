//! Settings of the node: two slots and an index of the active one, so that no program sees half of a change.

use std::sync::Arc;

use lb_common::{Settings, filter::ServiceRanges};

use crate::{
    bpf::{bpffs::Folder, grace, layout, table::Table},
    error::DatapathError,
    state::filter::Filter,
};

/// The maps `SETTINGS` and `SETTINGS_SLOT`. Use one instance at a time.
#[derive(Debug)]
pub struct SettingsMap {
    slots: Table<u32, Settings>,
    active: Table<u32, u32>,
    filter: Arc<Filter>,
}

impl SettingsMap {
    pub(crate) fn open(folder: &Folder, filter: &Arc<Filter>) -> Result<Self, DatapathError> {
        Ok(Self {
            slots: Table::open(&layout::SETTINGS, &folder.map("SETTINGS"))?,
            active: Table::open(&layout::SETTINGS_SLOT, &folder.map("SETTINGS_SLOT"))?,
            filter: Arc::clone(filter),
        })
    }

    /// The settings in force.
    pub fn get(&self) -> Result<Settings, DatapathError> {
        let slot = self.slot()?;
        // Every index of an array has a value.
        Ok(self.slots.get(&slot)?.unwrap_or_else(bytemuck::Zeroable::zeroed))
    }

    /// Switches to these settings. Returns when no program uses the previous ones.
    pub fn set(&mut self, settings: &Settings) -> Result<(), DatapathError> {
        self.filter.set_ranges(&ServiceRanges::covering(&settings.service_ranges));
        if self.get()? == *settings {
            return Ok(());
        }
        let other = 1 - self.slot()?;
        self.slots.update_all(&[other], &[*settings])?;
        self.active.update_all(&[0], &[other])?;
        // After the grace period the previous slot may be written again.
        grace::wait()
    }

    /// The slot that programs read, 0 or 1.
    fn slot(&self) -> Result<u32, DatapathError> {
        Ok(self.active.get(&0)?.unwrap_or(0) & 1)
    }
}
