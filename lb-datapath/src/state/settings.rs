//! The node's settings for the programs: two slots, and the index of the active one, so that no program sees half of a
//! change.

use std::sync::Arc;

use lb_common::{Settings, filter::ServiceRanges};

use crate::{
    bpf::{bpffs::Folder, grace, layout, table::Table},
    error::DatapathError,
    state::filter::Filter,
};

/// The maps `SETTINGS` and `SETTINGS_SLOT`. Only one instance may be used at a time.
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

    /// The settings that programs use now.
    pub fn get(&self) -> Result<Settings, DatapathError> {
        let slot = self.slot()?;
        // Every element of an array exists, so the default is never used.
        Ok(self.slots.get(&slot)?.unwrap_or_else(bytemuck::Zeroable::zeroed))
    }

    /// Switches programs to these settings. Returns when no program uses the previous settings any more.
    pub fn set(&mut self, settings: &Settings) -> Result<(), DatapathError> {
        self.filter.set_ranges(&ServiceRanges::covering(&settings.service_ranges));
        if self.get()? == *settings {
            return Ok(());
        }
        let other = 1 - self.slot()?;
        self.slots.update_all(&[other], &[*settings])?;
        self.active.update_all(&[0], &[other])?;
        // After this grace period the previous slot may be written again.
        grace::wait()
    }

    /// Number of the slot that programs read, 0 or 1.
    fn slot(&self) -> Result<u32, DatapathError> {
        Ok(self.active.get(&0)?.unwrap_or(0) & 1)
    }
}
