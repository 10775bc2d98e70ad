//! The programs on packets: two tc hooks and XDP.
//!
//! Both tc hooks run [`process`]. The device through which a client's packets enter the node owns the translation:
//! they are DNATed at its ingress, before the stack routes them, and replies are translated back at its egress,
//! after the stack has routed them. So neither a backend's device nor reverse path filters ever see an address
//! that does not belong there. Where the client's address itself must not reach the backend, a second translation
//! exchanges it at the other end: see [`flow::masquerade`].
//!
//! Nearly every packet takes the [`fast_path`], which is one function. All others take the [`slow_path`]. Its rarer parts are
//! subprograms (`#[inline(never)]`), because all frames of a call chain share 512 bytes of stack. A subprogram returns one
//! register, hence a plain [`Outcome`].

mod context;
pub(crate) mod events;
mod fast_path;
pub(crate) mod flow;
mod forward;
mod fragments;
mod icmp;
mod log;
mod maps;
mod reject;
mod rewrite;
pub(crate) mod service;
pub(crate) mod settings;
mod skb;
mod slow_path;
pub(crate) mod stats;
pub(crate) mod xdp;

use lb_common::{
    EventHook, Outcome,
    conntrack::{Flow, flow_flags},
};

use self::forward::decapsulate;
pub(crate) use self::skb::Skb;

/// The hook that a tc program runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// The packet enters the node.
    Ingress,
    /// The packet leaves the node.
    Egress,
}

impl Hook {
    /// The name of this hook in events.
    #[inline(always)]
    pub(crate) const fn of_event(self) -> EventHook {
        match self {
            Self::Ingress => EventHook::Ingress,
            Self::Egress => EventHook::Egress,
        }
    }

    /// Whether packets of `flow` are translated here.
    #[inline(always)]
    fn translates(self, flow: &Flow) -> bool {
        (flow.flags & flow_flags::AT_EGRESS != 0) == (self == Self::Egress)
    }
}

/// Decides about a packet and rewrites it accordingly. `Ok` and `Err` both carry the outcome; `Err` is the early way
/// out.
#[inline(always)]
pub(crate) fn process(skb: &mut Skb, hook: Hook) -> Result<Outcome, Outcome> {
    let packet = maps::packet()?;
    match slow_path::process(skb, packet, hook) {
        Err(outcome) if hook == Hook::Ingress && decapsulate::may_be_tunnel(outcome, packet) => {
            match decapsulate::process(skb) {
                decapsulate::NOT_OURS => Err(outcome),
                done => Ok(done),
            }
        }
        done => done,
    }
}
