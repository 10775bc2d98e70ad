//! The maps `ANNOUNCED` (addresses that the node announces at layer 2) and `ANNOUNCE_HEARD` (answers and conflicts).

use std::collections::BTreeMap;

use lb_common::{AnnounceKey, Announcement, Heard};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
};

/// The maps of announcements. Only one instance at a time may be used for writing.
#[derive(Debug)]
pub struct Announcements {
    announced: Table<AnnounceKey, Announcement>,
    heard: Table<AnnounceKey, Heard>,
}

impl Announcements {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        Ok(Self {
            announced: Table::open(&layout::ANNOUNCED, &folder.map(layout::ANNOUNCED.name))?,
            heard: Table::open(&layout::ANNOUNCE_HEARD, &folder.map(layout::ANNOUNCE_HEARD.name))?,
        })
    }

    /// The clock of deadlines: nanoseconds of `CLOCK_BOOTTIME`, which continues while the machine is suspended.
    pub fn now() -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // `CLOCK_BOOTTIME` starts at boot and is never negative.
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
    }

    /// The announcements in the map, including those whose deadline has passed.
    pub fn get(&self) -> Result<BTreeMap<AnnounceKey, Announcement>, DatapathError> {
        self.announced.entries()
    }

    /// Makes the map contain exactly these announcements. Deletes unwanted announcements first, so that the programs
    /// stop answering for the unwanted addresses as early as possible.
    pub fn set(&mut self, wanted: &BTreeMap<AnnounceKey, Announcement>) -> Result<(), DatapathError> {
        let present = self.get()?;
        let gone: Vec<AnnounceKey> =
            present.keys().filter(|key| !wanted.contains_key(*key)).copied().collect();
        self.announced.delete_all(&gone)?;
        let changed = wanted.iter().filter(|(key, value)| present.get(key) != Some(*value));
        let (keys, values): (Vec<AnnounceKey>, Vec<Announcement>) = changed.unzip();
        for key in keys.iter().filter(|key| !present.contains_key(key)) {
            self.heard.insert_new(key, &Heard::default())?;
        }
        self.announced.update_all(&keys, &values)
    }

    /// For each address and device that `known` accepts: the numbers of answers, failures and conflicts, and the last
    /// claim of another machine. Deletes the elements of all other addresses and devices from `ANNOUNCE_HEARD`.
    pub fn heard(
        &mut self,
        known: impl Fn(&AnnounceKey) -> bool,
    ) -> Result<BTreeMap<AnnounceKey, Heard>, DatapathError> {
        let (heard, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.heard.entries()?.into_iter().partition(|(key, _)| known(key));
        self.heard.delete_all(&Vec::from_iter(gone.into_keys()))?;
        Ok(heard)
    }
}
