//! Settings of the node.

use lb_common::{Address, Service, Settings, settings_flags};
use lb_ebpf::rules::client::{self, ClientSide};

use super::{
    context::HookContext,
    maps::{INSIDE_DEVICES, PEERS, SETTINGS, SETTINGS_SLOT},
};

/// The settings in use; `None` until an agent has written settings.
#[inline(always)]
pub(crate) fn current() -> Option<&'static Settings> {
    let slot = *SETTINGS_SLOT.get(0)? & 1;
    SETTINGS.get(slot).filter(|settings| settings.is_written())
}

/// The record of the service for this client, and whether the client is internal: [`client::for_client`].
#[inline(always)]
pub(super) fn for_client(context: &HookContext, client: &Address, service: Service) -> (Service, bool) {
    client::for_client(service, || is_internal(context, client))
}

/// Whether the client is in a network that the settings deny: [`Settings::denied`].
#[inline(always)]
pub(super) fn is_denied(client: &Address) -> bool {
    is_in(client, Ranges::Denied)
}

/// Whether the client is internal.
#[inline(always)]
pub(super) fn is_internal(context: &HookContext, client: &Address) -> bool {
    side(context.device, client).is_internal()
}

/// Whether a packet with this source, from this device, comes from an internal client.
#[inline(always)]
fn side(device: u32, source: &Address) -> ClientSide {
    client::side(
        || is_in(source, Ranges::Internal),
        // SAFETY: the program does not read the element.
        || unsafe { INSIDE_DEVICES.get(&device) }.is_some(),
    )
}

/// Whether the address is in one of the ranges of cluster IPs.
#[inline(always)]
pub(crate) fn is_in_service_range(address: &Address) -> bool {
    is_in(address, Ranges::Service)
}

/// Whether the address belongs to a node that may send tunnelled packets.
#[inline(always)]
pub(crate) fn is_peer(address: &Address) -> bool {
    is_in(address, Ranges::Peers) || is_node(address)
}

/// Whether the address belongs to another node. (A network of peers may also contain clients.)
#[inline(always)]
pub(crate) fn is_node(address: &Address) -> bool {
    // SAFETY: the program does not read the element.
    unsafe { PEERS.get(address) }.is_some()
}

/// Sets of networks in the settings.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Ranges {
    Internal = 0,
    Service = 1,
    Peers = 2,
    Denied = 3,
}

#[inline(always)]
fn is_in(address: &Address, ranges: Ranges) -> bool {
    settings_contain(address, ranges as u32) != 0
}

/// Whether the networks with the number `ranges` contain the address: 1 or 0. (A global function: the verifier checks
/// its loop once, for all arguments and callers, and assumes that any pointer may be null.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn settings_contain(address: *const Address, ranges: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Address`, or is null.
    let (Some(address), Some(settings)) = (unsafe { address.as_ref() }, current()) else { return 0 };
    let ranges = match ranges {
        0 => &settings.internal,
        1 => &settings.service_ranges,
        2 => &settings.peers,
        _ => &settings.denied,
    };
    u32::from(ranges.contains(address))
}

/// Whether the settings deny any networks: [`Settings::denied`].
#[inline(always)]
pub(crate) fn denies_sources() -> bool {
    settings_deny_sources() != 0
}

/// [`denies_sources`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn settings_deny_sources() -> u32 {
    u32::from(current().is_some_and(|settings| settings.denied.count > 0))
}

/// Whether next hops depend on the destination, the device and the protocol of packets alone.
#[inline(always)]
pub(crate) fn routes_by_destination() -> bool {
    current().is_some_and(|settings| settings.flags & settings_flags::ROUTES_BY_DESTINATION != 0)
}

/// Whether packets to unused addresses in the ranges of cluster IPs are dropped.
#[inline(never)]
pub(crate) fn drops_unknown_vips() -> bool {
    current().is_some_and(Settings::drops_unknown_vips)
}
