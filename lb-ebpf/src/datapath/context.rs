//! The context of a program, for helpers that need it.

use core::ffi::c_void;

/// The context of one run of a program.
#[derive(Clone, Copy)]
pub(crate) struct HookContext {
    /// The raw context of the program.
    pub(super) raw: *mut c_void,
    /// Interface index of the device that the packet is at.
    pub(super) device: u32,
}
