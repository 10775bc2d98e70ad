//! Lookup of the properties of a device, which the agent writes to `DEVICES`.

use lb_common::DeviceInfo;

use super::maps::DEVICES;

/// The properties of the device; zeros if `DEVICES` has no entry for it.
#[inline(always)]
pub(crate) fn info(index: u32) -> DeviceInfo {
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. If the map
    // reuses the memory meanwhile, the copy is that of another device with an entry.
    unsafe { DEVICES.get(&index) }.copied().unwrap_or(DeviceInfo::UNKNOWN)
}
