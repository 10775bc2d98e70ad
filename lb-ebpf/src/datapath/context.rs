//! The hook that a program runs on, and the context for helpers that need it.

use core::ffi::c_void;

use lb_common::{EventHook, conntrack::Flow};

/// The context of one run of a program.
#[derive(Clone, Copy)]
pub(crate) struct HookContext {
    /// The raw context of the program.
    pub(super) raw: *mut c_void,
    /// Interface index of the device that the packet is at.
    pub(super) device: u32,
    /// The mark of the packet (`skb->mark`); 0 at XDP, where packets have none.
    pub(super) mark: u32,
}

/// The hook that a tc program runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// The packet enters the node.
    Ingress,
    /// The packet leaves the node.
    Egress,
    /// The packet leaves by the catch device, and will enter the node again. As [`Self::Egress`], except that no flow
    /// begins here.
    Catch,
}

impl Hook {
    /// Whether this is the egress of a device.
    #[inline(always)]
    pub(crate) const fn is_egress(self) -> bool {
        matches!(self, Self::Egress | Self::Catch)
    }

    /// The name of this hook in events.
    #[inline(always)]
    pub(crate) const fn event_hook(self) -> EventHook {
        match self {
            Self::Ingress => EventHook::Ingress,
            Self::Egress | Self::Catch => EventHook::Egress,
        }
    }

    /// Whether packets of `flow` are translated at this hook.
    #[inline(always)]
    pub(super) fn translates(self, flow: &Flow) -> bool {
        lb_ebpf::rules::flow::is_translated_at(flow, self.is_egress())
    }
}
