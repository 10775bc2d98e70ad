//! Connections of sockets that programs have translated in `connect(2)`: the map `SOCKET_COUNTS`.

use std::collections::{BTreeMap, BTreeSet};

use lb_common::{SocketCounter, SocketCounts};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
};

/// The map `SOCKET_COUNTS`.
#[derive(Clone, Debug)]
pub(crate) struct SocketCountsMap {
    map: Table<SocketCounter, SocketCounts>,
}

impl SocketCountsMap {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let map = &layout::SOCKET_COUNTS;
        Ok(Self { map: Table::open(map, &folder.map(map.name))? })
    }

    /// The counts of each backend.
    pub(crate) fn get(&self) -> Result<BTreeMap<SocketCounter, SocketCounts>, DatapathError> {
        self.map.entries()
    }

    /// Forgets the backends that had no connection both when `earlier` was returned and now. Returns all backends
    /// without a connection. (A connection that begins at this moment may be lost from the counts.)
    pub(crate) fn forget_idle(
        &self,
        counts: &BTreeMap<SocketCounter, SocketCounts>,
        earlier: &BTreeSet<SocketCounter>,
    ) -> Result<BTreeSet<SocketCounter>, DatapathError> {
        let idle = counts.iter().filter(|(_, counts)| counts.active() == 0).map(|(counter, _)| *counter);
        let idle: BTreeSet<SocketCounter> = idle.collect();
        let lasting: Vec<SocketCounter> = idle.intersection(earlier).copied().collect();
        self.map.delete_all(&lasting)?;
        Ok(idle)
    }

    /// Forgets all backends, because no program counts the ends of connections any more.
    pub(crate) fn clear(&self) -> Result<(), DatapathError> {
        self.map.delete_all(&self.get()?.into_keys().collect::<Vec<_>>())
    }
}
