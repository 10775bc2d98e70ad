//! How packets of a flow leave past the stack: asked once in a while, remembered in the flow.

use lb_common::{
    DeviceInfo,
    conntrack::{NextHop, Tick, Tuple, next_hop_flags},
    device_flags,
};

use super::route::{self, Found};
use crate::datapath::{context::HookContext, maps::DEVICES};

/// What is special about the device; zeros if nothing is.
#[inline(always)]
pub(in crate::datapath) fn device(index: u32) -> DeviceInfo {
    // SAFETY: copied at once; where another device takes its place meanwhile, that one is of the same kind.
    unsafe { DEVICES.get(&index) }.copied().unwrap_or(DeviceInfo { mtu: 0, flags: 0 })
}

/// Asks for the way of packets `to`, and notes the answer.
#[inline(never)]
pub(in crate::datapath) fn renew(context: &HookContext, to: &Tuple, hop: &mut NextHop, now: Tick) {
    /// So short that it always fits: what we want is to be told the MTU.
    const ANY: u16 = 1;
    note(route::look_up(context, to, ANY, 0), hop, now);
}

/// Notes a route that was just looked up, whatever came of it; except that a neighbour is not known yet, which the packet that
/// goes through the stack for that will change.
#[inline(always)]
pub(in crate::datapath) fn note(found: Found, hop: &mut NextHop, now: Tick) {
    hop.flags = 0;
    hop.resolved_at = if found == Found::WithoutNeighbour { Tick(0) } else { now };
    let Ok(route) = route::found() else { return };
    if found == Found::Route {
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
