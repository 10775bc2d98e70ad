//! The events that the programs emit for `monitor`.

use aya::maps::{Array, MapData, RingBuf};
use lb_common::{Event, monitor};
use lb_datapath::Conntrack;

use super::Testbed;

impl Testbed {
    /// Makes the programs emit events for this number of ticks from now on.
    pub(crate) fn enable_events(&mut self, ticks: u32) {
        let until = Conntrack::now().0 + ticks;
        self.monitor().set(monitor::UNTIL, u64::from(until), 0).unwrap();
    }

    pub(crate) fn disable_events(&mut self) {
        self.monitor().set(monitor::UNTIL, 0, 0).unwrap();
    }

    /// The events since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut ring: RingBuf<_> = self.object.map_mut("EVENTS").unwrap().try_into().unwrap();
        let mut events = Vec::new();
        while let Some(bytes) = ring.next() {
            events.push(bytemuck::pod_read_unaligned(&bytes));
        }
        events
    }

    /// Number of events that did not fit into the ring buffer.
    pub(crate) fn lost_events(&mut self) -> u64 {
        self.monitor().get(&monitor::LOST, 0).unwrap()
    }

    pub(super) fn monitor(&mut self) -> Array<&mut MapData, u64> {
        self.object.map_mut("MONITOR").unwrap().try_into().unwrap()
    }
}
