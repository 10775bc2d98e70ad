//! Reads events of the programs from the ring buffer `EVENTS`; `MONITOR` makes the programs emit them.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    path::PathBuf,
};

use aya::maps::{MapData, MapInfo, RingBuf};
use lb_common::{Event, monitor};

use crate::{
    bpf::{
        bpffs::{Folder, Lock},
        layout,
        table::Table,
    },
    error::DatapathError,
    state::conntrack::{Conntrack, monotonic_nanoseconds},
};

/// Number of ticks for which programs emit events after the last [`Monitor::extend`]: about three seconds.
const LEASE: u32 = 3;

/// The only reader of events. Programs emit events as long as [`Self::extend`] is called every second. They stop when
/// the monitor is dropped; if its process is killed, they stop a few seconds later.
pub struct Monitor {
    switch: Table<u32, u64>,
    ring: RingBuf<MapData>,
    /// Start of this monitor in nanoseconds of `CLOCK_MONOTONIC`. Older events are left over from an earlier monitor.
    since: u64,
    lost_before: u64,
    /// Path of the pin of `switch`.
    pin: PathBuf,
    /// Kernel id of `switch`.
    id: u32,
    _lock: Lock,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").finish_non_exhaustive()
    }
}

impl Monitor {
    /// Makes the programs emit events, and opens the ring buffer.
    ///
    /// # Errors
    /// Another monitor is running, or the maps cannot be opened.
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let lock = folder.lock_monitor()?;
        let pin = folder.map(layout::MONITOR.name);
        let switch = Table::open(&layout::MONITOR, &pin)?;
        let inspect = |error| DatapathError::file("inspect the pinned map", &pin, io::Error::other(error));
        let id = MapInfo::from_pin(&pin).map_err(inspect)?.id();
        let ring = open_ring(folder)?;
        let since = monotonic_nanoseconds();
        let mut monitor = Self { switch, ring, since, lost_before: 0, pin, id, _lock: lock };
        monitor.lost_before = monitor.lost_ever()?;
        monitor.extend()?;
        Ok(monitor)
    }

    /// Makes the programs emit events for about three more seconds.
    ///
    /// # Errors
    /// The map cannot be written, or the data plane has other maps now.
    pub fn extend(&self) -> Result<(), DatapathError> {
        // A missing pin is no error: the agent pins its maps again.
        if MapInfo::from_pin(&self.pin).is_ok_and(|info| info.id() != self.id) {
            return Err(DatapathError::MadeAnew);
        }
        self.set(u64::from(Conntrack::now().0 + LEASE))
    }

    /// The oldest event that was not read yet; `None` if all were read.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let event: Event = {
                let bytes = self.ring.next()?;
                bytemuck::pod_read_unaligned(bytes.get(..size_of::<Event>())?)
            };
            if event.time >= self.since {
                return Some(event);
            }
        }
    }

    /// How many events were lost since this monitor was opened, because the ring buffer was full.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn lost(&self) -> Result<u64, DatapathError> {
        Ok(self.lost_ever()?.wrapping_sub(self.lost_before))
    }

    fn lost_ever(&self) -> Result<u64, DatapathError> {
        Ok(self.switch.get(&monitor::LOST)?.unwrap_or(0))
    }

    fn set(&self, until: u64) -> Result<(), DatapathError> {
        self.switch.update_all(&[monitor::UNTIL], &[until])
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // If this fails, the programs stop emitting events when the lease ends.
        self.set(0).unwrap_or_default();
    }
}

impl AsRawFd for Monitor {
    /// The descriptor of the ring buffer, which is readable when there are events.
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

fn open_ring(folder: &Folder) -> Result<RingBuf<MapData>, DatapathError> {
    let path = folder.map(layout::EVENTS.name);
    let failed = |error| DatapathError::file("open the pinned map", &path, io::Error::other(error));
    RingBuf::try_from(layout::EVENTS.open_by_aya(&path)?).map_err(failed)
}
