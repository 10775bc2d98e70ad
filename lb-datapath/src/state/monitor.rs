//! Listening to what the programs tell: the ring buffer `EVENTS`, and `MONITOR`, which makes them tell.

use std::os::fd::{AsRawFd, RawFd};

use aya::maps::{Map, MapData, RingBuf};
use lb_common::{Event, monitor};

use crate::{
    bpf::{
        bpffs::{Folder, Lock},
        layout::{self, Shape},
        table::Table,
    },
    error::DatapathError,
    state::conntrack::{Conntrack, monotonic_nanoseconds},
};

/// Ticks for which programs go on telling when nobody says anything any more: about three seconds.
const AFTERLIFE: u32 = 3;

/// The one who listens. The programs tell as long as it lives and [`Self::extend`] is called every second, and not for much
/// longer however it ends.
pub struct Monitor {
    switch: Table<u32, u64>,
    ring: RingBuf<MapData>,
    /// What is in the ring from before is not for us.
    since: u64,
    lost_before: u64,
    _lock: Lock,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").finish_non_exhaustive()
    }
}

impl Monitor {
    /// Begins to listen.
    ///
    /// # Errors
    /// Somebody else does, or there are no such maps.
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let lock = folder.lock_monitor()?;
        let switch = Table::open(&layout::MONITOR, &folder.map("MONITOR"))?;
        let ring = open_ring(folder)?;
        let since = monotonic_nanoseconds();
        let mut monitor = Self { switch, ring, since, lost_before: 0, _lock: lock };
        monitor.lost_before = monitor.lost_ever()?;
        monitor.extend()?;
        Ok(monitor)
    }

    /// Lets the programs tell for a while.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn extend(&self) -> Result<(), DatapathError> {
        self.set(u64::from(Conntrack::now().0 + AFTERLIFE))
    }

    /// The next event, oldest first; none where all were read.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let event: Event = {
                let octets = self.ring.next()?;
                bytemuck::pod_read_unaligned(octets.get(..size_of::<Event>())?)
            };
            if event.time >= self.since {
                return Some(event);
            }
        }
    }

    /// How many events found no room since this listens.
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
        self.switch.update(&[monitor::UNTIL], &[until]).map_err(|(_, error)| error)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Should this fail, the programs stop by themselves.
        self.set(0).unwrap_or_default();
    }
}

impl AsRawFd for Monitor {
    /// Readable when there are events.
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

fn open_ring(folder: &Folder) -> Result<RingBuf<MapData>, DatapathError> {
    let path = folder.map(layout::EVENTS.name);
    let found = Shape::of_pin(&path)?.ok_or_else(|| DatapathError::Absent(path.clone()))?;
    layout::EVENTS.check(&path, &found)?;
    let open = |error| DatapathError::file("open the pinned map", &path, std::io::Error::other(error));
    let map = Map::from_map_data(MapData::from_pin(&path).map_err(open)?).map_err(open)?;
    RingBuf::try_from(map).map_err(open)
}
