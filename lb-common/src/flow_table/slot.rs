use bytemuck::{Pod, Zeroable};

#[cfg(feature = "user")]
use super::{Control, Places};
use crate::conntrack::{Flow, Tuple};

/// Element of `FLOWS`: a place for one entry. Zeros are a slot that has never been used.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Slot {
    /// The [`Control`](super::Control) word. In some of its states the other fields have no meaning.
    pub control: u64,
    /// The tuple of packets that the entry translates.
    pub key: Tuple,
    /// The flow: how the entry translates these packets.
    pub flow: Flow,
}

const _: () = assert!(size_of::<Slot>() == 48 + size_of::<Flow>());
// A slot fills two neighbouring cache lines (three in the next layout), because the array begins at a page.
const _: () = assert!(size_of::<Slot>().is_multiple_of(64));

#[cfg(not(feature = "next-layout"))]
crate::layout::describe!(Slot {
    control,
    key.source,
    key.destination,
    key.source_port,
    key.destination_port,
    key.protocol,
    key.zero,
    key.zeros,
    flow.to.source,
    flow.to.destination,
    flow.to.source_port,
    flow.to.destination_port,
    flow.to.protocol,
    flow.to.zero,
    flow.to.zeros,
    flow.service,
    flow.last_seen,
    flow.next_seq,
    flow.last_ack,
    flow.address_delta,
    flow.port_delta,
    flow.seen,
    flow.flags,
    flow.syns = "flow.asked",
    flow.active_flows_slot = "flow.counter",
    flow.packets,
    flow.traffic,
});

impl Slot {
    /// A slot with a live entry, for a tuple with these places.
    #[cfg(feature = "user")]
    pub const fn with_entry(places: &Places, key: Tuple, flow: Flow) -> Self {
        let Control(control) = Control::NEVER_USED.claimed(false).tentative(places.fingerprint()).live();
        Self { control, key, flow }
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Slot {}
