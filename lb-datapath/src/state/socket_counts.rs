//! The map `SOCKET_COUNTS`: for each backend, how many connections the socket programs have translated in `connect(2)`,
//! and how many of these have ended.

use std::collections::BTreeMap;

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

    /// Deletes the counters of backends that have been idle for [`LONG`] passes, or for [`SHORT`] passes if more than
    /// half of the map is in use. Returns the deleted counters. If a connection to such a backend has begun since
    /// `counts` was read, this connection is no longer counted.
    pub(crate) fn delete_idle(
        &self,
        counts: &BTreeMap<SocketCounter, SocketCounts>,
        idle: &mut IdleBackends,
    ) -> Result<Vec<SocketCounter>, DatapathError> {
        let is_nearly_full = counts.len() > self.map.capacity() as usize / 2;
        let lasting = idle.note(counts, if is_nearly_full { SHORT } else { LONG });
        self.map.delete_all(&lasting)?;
        Ok(lasting)
    }
}

/// Number of passes without a connection after which the counter of a backend is deleted: usually `LONG`, which is an
/// hour if passes are five seconds apart, but `SHORT` if more than half of the map is in use.
const LONG: u32 = 720;
const SHORT: u32 = 2;

/// For each backend to which no socket is connected: the number of passes in a row that have found no connection, and
/// the number of connections that have ever begun.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdleBackends(BTreeMap<SocketCounter, (u32, u64)>);

impl IdleBackends {
    /// Adds a pass that has read `counts`. Returns and drops the backends that have had no connection in the last
    /// `patience` passes.
    fn note(&mut self, counts: &BTreeMap<SocketCounter, SocketCounts>, patience: u32) -> Vec<SocketCounter> {
        let (mut idle, mut lasting) = (BTreeMap::new(), Vec::new());
        for (counter, counts) in counts.iter().filter(|(_, counts)| counts.active() == 0) {
            let known = self.0.get(counter).filter(|(_, begun)| *begun == counts.begun);
            let passes = known.map_or(1, |(passes, _)| passes + 1);
            if passes >= patience {
                lasting.push(*counter);
            } else {
                idle.insert(*counter, (passes, counts.begun));
            }
        }
        self.0 = idle;
        lasting
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{Address, Endpoint};

    use super::*;

    #[test]
    fn backend_is_idle_as_long_as_no_connection_begins() {
        let counter = |port| SocketCounter {
            service: 1,
            active_flows_slot: 0,
            backend: Endpoint::new(Address::from_v4([10, 1, 0, 5]), port),
        };
        let mut idle = IdleBackends::default();
        let mut pass = |counts: &[(u16, u64, u64)]| {
            let counts = counts
                .iter()
                .map(|(port, begun, ended)| (counter(*port), SocketCounts { begun: *begun, ended: *ended }));
            idle.note(&counts.collect(), 3).iter().map(|counter| counter.backend.port).collect::<Vec<_>>()
        };
        assert_eq!(pass(&[(1, 5, 5), (2, 5, 4), (3, 5, 5)]), [0; 0]);
        // A connection to port 3 begins and ends between two passes.
        assert_eq!(pass(&[(1, 5, 5), (2, 5, 4), (3, 6, 6)]), [0; 0]);
        assert_eq!(pass(&[(1, 5, 5), (2, 5, 4), (3, 6, 6)]), [1]);
        assert_eq!(pass(&[(2, 5, 5), (3, 6, 6)]), [3]);
        assert_eq!(pass(&[(2, 5, 6)]), [0; 0], "more ends than beginnings are no connection, either");
        assert_eq!(pass(&[(2, 5, 6)]), [2]);
    }
}
