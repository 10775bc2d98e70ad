use bytemuck::{Pod, Zeroable};

use crate::conntrack::{Tick, Tuple};

/// An element of the ring buffer `FLOW_EVENTS`. While the agent keeps a flow log, the programs emit an event when a
/// flow of a Service begins, when a RST or the FINs of both ends (in a tunnelled flow, the client's FIN) have closed
/// the flow, and when a program deletes the flow's entries. The agent learns everything else from the flow table.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowEvent {
    /// When the program emitted the event, in nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
    /// The tuple of the client's packets: the key of the forward entry.
    pub from: Tuple,
    /// [`crate::conntrack::Flow::to`] of the forward entry; but with [`FlowEventKind::Begun`], for a flow that is
    /// masqueraded through the stack, the source is the node's address.
    pub to: Tuple,
    /// [`crate::conntrack::Flow::traffic`] of the forward entry and the reverse entry.
    pub traffic: [u64; 2],
    /// [`crate::conntrack::Flow::packets`] of both entries.
    pub packets: [u32; 2],
    /// The [`crate::Service::id`] of the flow's service port.
    pub service: u32,
    /// When the programs last saw a packet that shows that the client is there: [`crate::conntrack::Phase::last_used`].
    pub last_seen: Tick,
    /// What has happened to the flow: a [`FlowEventKind`].
    pub kind: u8,
    /// With [`FlowEventKind::Begun`], why this backend was chosen: a [`crate::Choice`].
    pub choice: u8,
    /// With [`FlowEventKind::Begun`], the [`crate::Service::scheduler`].
    pub scheduler: u8,
    /// The [`crate::conntrack::flow_flags`] of the forward entry.
    pub flags: u8,
    /// The index of the flow's phase in [`crate::conntrack::Phase::ALL`]. With [`FlowEventKind::Begun`] it is always
    /// that of [`crate::conntrack::Phase::Opening`], even for UDP.
    pub phase: u8,
    /// Padding, always 0. (Separate from `zeros`: LLVM would fill one field of three bytes by a call to `memset`.)
    pub zero: u8,
    /// Padding, always 0.
    pub zeros: u16,
}

const _: () = assert!(size_of::<FlowEvent>() == 128);

/// What has happened to a flow.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEventKind {
    /// The flow has begun. `traffic` and `packets` are the counts that earlier flows with the same tuple have left; the
    /// new flow adds to them.
    Begun = 0,
    /// Both FINs (in a tunnelled flow, the client's) or a RST have ended the connection; the entries of the flow stay
    /// for a while. Only time, `from` and phase are meaningful: the other fields describe one direction, and the last
    /// packets are still to be counted.
    Closed = 1,
    /// A new flow has taken the slot of one of this flow's entries, because all slots where the new entry may be were
    /// occupied.
    Evicted = 2,
    /// A new connection from the same client port has replaced the flow; or a new flow has taken the flow's source
    /// port; or the flow was over, and its client has connected to the backend from the same port without the VIP.
    Replaced = 3,
}

impl FlowEventKind {
    /// All kinds, in the order of their values.
    pub const ALL: [Self; 4] = [Self::Begun, Self::Closed, Self::Evicted, Self::Replaced];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_in_all_is_the_value() {
        for (index, kind) in FlowEventKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }
}
