//! Connection tracking: the entries of the flow table and the life cycle of a flow.
//!
//! A flow has two entries, one for each direction; a tunnelled flow has only that of the client's direction. An entry
//! holds the whole translated tuple, which gives the key of the reverse entry (`entry.to.reversed()`). It records only
//! what *its own direction* has sent. So a packet of an established flow needs one lookup, and the CPUs of both
//! directions write to different cache lines. The rare events that depend on both directions (such as a RST, a SYN on
//! an existing entry, or expiry) look at both entries.
//!
//! ```text
//! tuple     key of an entry                    observe   what a packet changes in the entry of its direction
//! flow      value of an entry                  phase     the state of a flow
//! next_hop  cache of routes for bypassing      timeout   the timeout of each phase: TCP, UDP, SCTP
//! segment   TCP flags, SCTP chunks             expiry    seconds left: the timeout, longer when masqueraded, shorter
//!                                                        under pressure
//! capacity  connections of a machine           tick      the clock
//! ```

mod capacity;
mod expiry;
#[cfg(test)]
mod fixtures;
mod flow;
mod next_hop;
#[cfg(feature = "next-layout")]
mod next_layout;
mod observe;
mod phase;
mod segment;
mod tick;
mod timeout;
mod tuple;

pub use self::{
    capacity::{default_connections, flow_slots},
    expiry::{Pressure, seconds_left, seconds_left_under},
    flow::{Flow, flow_flags, seen},
    next_hop::{CachedNextHop, NextHop, NextHopKey, RouteInputs, next_hop_flags},
    phase::Phase,
    segment::{Segment, chunk, tcp_flags},
    tick::Tick,
    tuple::Tuple,
};
