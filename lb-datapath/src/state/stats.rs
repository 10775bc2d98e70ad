//! The map `STATS`: counters of packets and system calls by outcome.

use aya::maps::{MapData, PerCpuArray};
use lb_common::Outcome;

use crate::{
    bpf::{bpffs::Folder, layout},
    error::DatapathError,
};

/// The map `STATS`, opened for reading.
pub struct Stats {
    counters: PerCpuArray<MapData, u64>,
}

impl std::fmt::Debug for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stats").finish_non_exhaustive()
    }
}

impl Stats {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let path = folder.map(layout::STATS.name);
        let failed = |error| DatapathError::file("open the pinned map", &path, std::io::Error::other(error));
        let map = layout::STATS.open_by_aya(&path)?;
        Ok(Self { counters: PerCpuArray::try_from(map).map_err(failed)? })
    }

    /// Number of packets and system calls with each [`Outcome`] since the map was created, summed over all CPUs.
    pub fn read(&self) -> Result<[u64; Outcome::COUNT], DatapathError> {
        let mut sums = [0; Outcome::COUNT];
        for (outcome, sum) in Outcome::ALL.into_iter().zip(&mut sums) {
            *sum = self.read_one(outcome)?;
        }
        Ok(sums)
    }

    /// Number of packets and system calls with this [`Outcome`], as in [`read`](Self::read).
    pub fn read_one(&self, outcome: Outcome) -> Result<u64, DatapathError> {
        let values = self.counters.get(&(outcome as u32), 0).map_err(|error| DatapathError::Map {
            action: "read from",
            map: layout::STATS.name,
            source: std::io::Error::other(error),
        })?;
        Ok(values.iter().fold(0, |sum: u64, value| sum.wrapping_add(*value)))
    }
}
