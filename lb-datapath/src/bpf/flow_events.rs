//! Events of the programs for the flow log. The ring buffer is not pinned, so each agent has its own.

use aya::{
    Ebpf,
    maps::{Array, MapData, MapError, RingBuf},
};
use lb_common::FlowEvent;

use crate::error::DatapathError;

/// Name of the ring buffer of events.
pub(crate) const MAP: &str = "FLOW_EVENTS";
/// Name of the map that counts events for which the ring buffer had no room.
const LOST: &str = "FLOW_EVENTS_LOST";

/// The only reader of the events for the flow log.
pub struct FlowEvents {
    ring: RingBuf<MapData>,
    lost: Array<MapData, u64>,
}

impl std::fmt::Debug for FlowEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowEvents").finish_non_exhaustive()
    }
}

impl FlowEvents {
    /// Takes the maps of events out of a loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let mut map =
            |name| ebpf.take_map(name).ok_or_else(|| DatapathError::Object(format!("map {name} is missing")));
        let failed = |error: MapError| DatapathError::Object(error.to_string());
        let (ring, lost) = (map(MAP)?, map(LOST)?);
        Ok(Self { ring: ring.try_into().map_err(failed)?, lost: lost.try_into().map_err(failed)? })
    }

    /// The oldest event that was not read yet; `None` if all were read.
    pub fn next_event(&mut self) -> Option<FlowEvent> {
        let bytes = self.ring.next()?;
        Some(bytemuck::pod_read_unaligned(bytes.get(..size_of::<FlowEvent>())?))
    }

    /// How many events were lost, because the ring buffer was full.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn lost(&self) -> Result<u64, DatapathError> {
        self.lost.get(&0, 0).map_err(|error| DatapathError::Object(error.to_string()))
    }
}
