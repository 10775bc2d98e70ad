//! The next hop of packets that bypass the stack: looked up about once a second, and stored in the flow.

use lb_common::{
    DeviceInfo,
    conntrack::{NextHop, Tick, Tuple, next_hop_flags},
    device_flags,
};

use super::{ANY_LENGTH, Found, found, lookup};
use crate::datapath::{context::HookContext, maps::DEVICES};

/// The properties of the device; zeros if it has none.
#[inline(always)]
pub(crate) fn device(index: u32) -> DeviceInfo {
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. If the map
    // reuses the memory meanwhile, the copy is that of another device with an entry.
    unsafe { DEVICES.get(&index) }.copied().unwrap_or(DeviceInfo { mtu: 0, flags: 0 })
}

/// Looks up the next hop of packets with the tuple `to`.
#[inline(never)]
pub(crate) fn renew(context: &HookContext, to: &Tuple, hop: &mut NextHop, now: Tick) {
    note(lookup(context, to, ANY_LENGTH, 0), hop, now);
}

/// Stores the result of a route lookup. If the neighbour is not resolved yet, the current packet goes through the
/// stack, which resolves the neighbour, and the next packet looks it up again.
#[inline(always)]
pub(crate) fn note(result: Found, hop: &mut NextHop, now: Tick) {
    hop.flags = 0;
    hop.resolved_at = if result == Found::WithoutNeighbour { Tick(0) } else { now };
    let Ok(route) = found() else { return };
    if result == Found::Route {
        (hop.destination, hop.source) = route.macs();
        (hop.device, hop.mtu) = (route.device, route.mtu());
        let flags = device(route.device).flags;
        hop.flags = next_hop_flags::KNOWN | next_hop_flags::FRESH;
        if flags & device_flags::XDP_REDIRECT_TARGET != 0 {
            hop.flags |= next_hop_flags::XDP_REDIRECT_TARGET;
        }
        if flags & device_flags::REDIRECT_PEER != 0 {
            hop.flags |= next_hop_flags::REDIRECT_PEER;
        }
    }
}
