//! Settings of the node.

use lb_common::{Address, Service, Settings, settings_flags};
use lb_ebpf::rules::client::{self, ClientSide};

use super::{
    context::HookContext,
    maps::{INSIDE_DEVICES, SETTINGS, SETTINGS_SLOT},
};

/// The settings in use; `None` until an agent has written some.
#[inline(always)]
pub(crate) fn current() -> Option<&'static Settings> {
    let slot = *SETTINGS_SLOT.get(0)? & 1;
    SETTINGS.get(slot).filter(|settings| settings.ports != 0)
}

/// The service as this client may use it, and whether the client is internal.
#[inline(always)]
pub(super) fn for_client(context: &HookContext, client: &Address, service: Service) -> (Service, bool) {
    let internal = service.depends_on_client() && side(context.device, client).is_internal();
    (service.for_client(internal), internal)
}

/// Whether a packet with this source, from this device, comes from an internal client.
#[inline(never)]
fn side(device: u32, source: &Address) -> ClientSide {
    client::side(
        || current().is_some_and(|settings| settings.internal.contains(source)),
        // SAFETY: the program does not read the element.
        || unsafe { INSIDE_DEVICES.get(&device) }.is_some(),
    )
}

/// Whether the address is in the range of cluster IPs.
#[inline(never)]
pub(crate) fn is_in_service_range(address: &Address) -> bool {
    current().is_some_and(|settings| settings.service_ranges.contains(address))
}

/// Whether packets to unused addresses in the range of cluster IPs are dropped.
#[inline(never)]
pub(crate) fn drops_unknown_vips() -> bool {
    current().is_some_and(|settings| settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0)
}
