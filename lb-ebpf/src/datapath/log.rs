//! Logging through aya-log. The level is a constant of the loaded program. The level is "off" unless the agent sets
//! another level; if it is "off", the verifier removes this code.

use aya_ebpf::EbpfContext;
use aya_log_ebpf::debug;

use super::{
    context::HookContext,
    scratch::{scratch, setup::FlowSetup},
};

/// The program's context in the form that aya-log takes.
struct Context(*mut core::ffi::c_void);

impl EbpfContext for Context {
    fn as_ptr(&self) -> *mut core::ffi::c_void {
        self.0
    }
}

/// Logs the backend of a new flow.
#[inline(never)]
pub(super) fn new_flow(context: &HookContext) {
    let Ok(scratch) = scratch() else { return };
    let FlowSetup { from, to, .. } = scratch.setup();
    debug!(
        &Context(context.raw),
        "{:i}:{} -> {:i}:{} goes to {:i}:{}",
        *from.source.bytes(),
        from.source_port,
        *from.destination.bytes(),
        from.destination_port,
        *to.destination.bytes(),
        to.destination_port
    );
}
