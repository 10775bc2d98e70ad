//! What holds for every packet of the node: two slots and a switch, so that no program sees half of a change.

use lb_common::Settings;

use crate::{
    bpf::{bpffs::Folder, grace, layout, table::Table},
    error::DatapathError,
};

/// The maps `SETTINGS` and `SETTINGS_SLOT`. Have one at a time.
#[derive(Debug)]
pub struct SettingsMap {
    slots: Table<u32, Settings>,
    active: Table<u32, u32>,
}

impl SettingsMap {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        Ok(Self {
            slots: Table::open(&layout::SETTINGS, &folder.map("SETTINGS"))?,
            active: Table::open(&layout::SETTINGS_SLOT, &folder.map("SETTINGS_SLOT"))?,
        })
    }

    /// The settings that count now.
    pub fn get(&self) -> Result<Settings, DatapathError> {
        let slot = self.slot()?;
        Ok(self.slots.get(&slot)?.unwrap_or_else(bytemuck::Zeroable::zeroed))
    }

    /// Switches to these settings; returns when no program uses others any more.
    pub fn set(&mut self, settings: &Settings) -> Result<(), DatapathError> {
        if self.get()? == *settings {
            return Ok(());
        }
        let other = 1 - self.slot()?;
        self.slots.update(&[other], &[*settings]).map_err(|(_, error)| error)?;
        self.active.update(&[0], &[other]).map_err(|(_, error)| error)?;
        // The slot that was active may be written again after this.
        grace::wait()
    }

    /// The slot that programs read: 0 or 1.
    fn slot(&self) -> Result<u32, DatapathError> {
        Ok(self.active.get(&0)?.unwrap_or(0) & 1)
    }
}
