//! Where a program runs, for helpers that ask for it.

use core::ffi::c_void;

/// The run of a program on a packet.
#[derive(Clone, Copy)]
pub(crate) struct HookContext {
    /// The raw context of the program.
    pub(super) raw: *mut c_void,
    /// Interface index of the device that the packet is at.
    pub(super) device: u32,
}
