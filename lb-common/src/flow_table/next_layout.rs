//! The layout of the feature `next-layout`, for tests of upgrades and downgrades: the description of a slot, whose key
//! and flow have other fields than in the normal layout.

use super::Slot;
use crate::layout::describe;

describe!(Slot {
    control,
    key.source,
    key.destination,
    key.source_port,
    key.destination_port,
    key.zero,
    key.protocol,
    key.zeros,
    flow.ahead,
    flow.to.source,
    flow.to.destination,
    flow.to.source_port,
    flow.to.destination_port,
    flow.to.zero,
    flow.to.protocol,
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
