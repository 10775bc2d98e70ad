//! How packets of a flow leave past the stack: asked once in a while, remembered in the flow.

use lb_common::{
    DeviceInfo,
    conntrack::{Hop, Tick, Tuple, hop_flags},
    device_flags,
};

use super::{
    maps::DEVICES,
    place::Place,
    route::{self, Found},
};

/// What is special about the device; zeros if nothing is.
#[inline(always)]
pub(super) fn device(index: u32) -> DeviceInfo {
    // SAFETY: copied at once; where another device takes its place meanwhile, that one is of the same kind.
    unsafe { DEVICES.get(&index) }.copied().unwrap_or(DeviceInfo { mtu: 0, flags: 0 })
}

/// Asks for the way of packets `to`, and notes the answer.
#[inline(never)]
pub(super) fn renew(place: &Place, to: &Tuple, hop: &mut Hop, now: Tick) {
    /// So short that it always fits: what we want is to be told the MTU.
    const ANY: u16 = 1;
    note(route::look_up(place, to, ANY, 0), hop, now);
}

/// Notes a route that was just looked up, whatever came of it; except that a neighbour is not known yet, which the packet that
/// goes through the stack for that will change.
#[inline(always)]
pub(super) fn note(found: Found, hop: &mut Hop, now: Tick) {
    hop.flags = 0;
    hop.asked = if found == Found::WithoutNeighbour { Tick(0) } else { now };
    let Ok(route) = route::found() else { return };
    if found == Found::Route {
        (hop.destination, hop.source) = route.macs();
        (hop.device, hop.mtu) = (route.device, route.mtu());
        let flags = device(route.device).flags;
        hop.flags = hop_flags::KNOWN | hop_flags::FRESH;
        if flags & device_flags::TAKES_FRAMES != 0 {
            hop.flags |= hop_flags::TAKES_FRAMES;
        }
        if flags & device_flags::PEER != 0 {
            hop.flags |= hop_flags::PEER;
        }
    }
}
