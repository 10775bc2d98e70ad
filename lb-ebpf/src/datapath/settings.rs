//! What holds for every packet of the node.

use lb_common::{Address, Service, Settings, settings_flags};

use super::{
    context::HookContext,
    maps::{INSIDE_DEVICES, SETTINGS, SETTINGS_SLOT},
};

/// The settings that count now; `None` as long as no agent has written any.
#[inline(always)]
pub(crate) fn current() -> Option<&'static Settings> {
    let slot = *SETTINGS_SLOT.get(0)? & 1;
    SETTINGS.get(slot).filter(|settings| settings.ports != 0)
}

/// The record as it is for who has sent this packet, and whether that one is inside the cluster.
#[inline(always)]
pub(super) fn for_client(context: &HookContext, client: &Address, service: Service) -> (Service, bool) {
    let inside = service.depends_on_client() && is_inside(context.device, client);
    (service.for_client(inside), inside)
}

/// Whether a packet with this source, from this device, comes from inside the cluster.
#[inline(never)]
fn is_inside(device: u32, source: &Address) -> bool {
    current().is_some_and(|settings| settings.internal.contains(source))
        // SAFETY: only whether there is an entry counts.
        || unsafe { INSIDE_DEVICES.get(&device) }.is_some()
}

/// Whether the address belongs to the cluster IPs.
#[inline(never)]
pub(crate) fn is_in_service_range(address: &Address) -> bool {
    current().is_some_and(|settings| settings.service_ranges.contains(address))
}

/// Whether what is sent to an address of the cluster IPs that nobody has is dropped.
#[inline(never)]
pub(crate) fn drops_unknown_vips() -> bool {
    current().is_some_and(|settings| settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0)
}
