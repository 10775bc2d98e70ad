//! Masquerading: a client that a backend could not answer directly, or not through this node, gets the node's address.
//!
//! As in netfilter this is a translation of its own, behind the one from the VIP to the backend: the source is
//! exchanged where packets leave the node towards the backend, and back where the backend's packets enter. In between,
//! the stack, its reverse path filter and any network policy see the client's own address. So a masqueraded connection
//! is two flows; the first one gives the client's packets a source port that the second one owns on the node's address.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC, BPF_NOEXIST},
    helpers::generated::bpf_fib_lookup,
};
use lb_common::{
    Address, Backend, Outcome, backend_flags,
    conntrack::{Flow, Tuple, flow_flags},
};

use super::{
    conntrack::{forget_over, now},
    maps::{CONNTRACK, scratch},
    open::{Claim, EEXIST, Opening, Ports},
    settings,
    skb::Skb,
};

/// The source of a connection that is not masqueraded. (An `Option` on the stack would hold undefined octets.)
pub(super) const NOBODY: Address = Address::from_v6([0; 16]);

/// Whether the backend is the node itself: packets to it never leave.
#[inline(always)]
pub(super) fn is_here(backend: &Backend) -> bool {
    backend.flags & backend_flags::HOST != 0
}

/// The ports that masqueraded connections have.
#[inline(always)]
pub(super) fn ports() -> Result<Ports, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    Ok(Ports { first: u32::from(settings.first_port), count: u32::from(settings.ports) })
}

/// What the kernel takes and gives when asked for a route: `struct bpf_fib_lookup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Route {
    family: u8,
    protocol: u8,
    source_port: u16,
    destination_port: u16,
    length: u16,
    device: u32,
    service_class: u32,
    source: [u32; 4],
    destination: [u32; 4],
    table: u32,
    neighbours: [u32; 3],
}

const _: () = assert!(size_of::<Route>() == size_of::<aya_ebpf::bindings::bpf_fib_lookup>());

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// The address that packets of `to` get: the one that the node itself would speak to the backend from (as MASQUERADE
/// does), or where the kernel does not tell that (before 6.7), the one that the agent gives.
#[inline(never)]
pub(super) fn source(skb: &Skb, to: &Tuple) -> Result<Address, Outcome> {
    let route = &mut scratch()?.route;
    let (is_v4, words) = (to.destination.is_v4(), to.destination.words());
    *route = Route {
        family: if is_v4 { AF_INET } else { AF_INET6 },
        protocol: to.protocol,
        source_port: 0,
        destination_port: 0,
        length: 0,
        device: skb.ifindex(),
        service_class: 0,
        source: [0; 4],
        destination: if is_v4 { [to.destination.v4_word(), 0, 0, 0] } else { words },
        table: 0,
        neighbours: [0; 3],
    };
    // SAFETY: `route` is as large as the kernel is told; the context is valid for the whole run of the program.
    let result = unsafe {
        let flags = BPF_FIB_LOOKUP_SRC | BPF_FIB_LOOKUP_SKIP_NEIGH;
        bpf_fib_lookup(skb.as_ptr(), core::ptr::from_mut(route).cast(), size_of::<Route>() as i32, flags)
    };
    let found =
        if is_v4 { Address::from_v4_word(route.source[0]) } else { Address::from_words(route.source) };
    if result == 0 && route.source != [0; 4] { Ok(found) } else { fallback(is_v4) }
}

#[inline(always)]
fn fallback(is_v4: bool) -> Result<Address, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    let source = if is_v4 { settings.source_v4 } else { settings.source_v6 };
    if source == NOBODY { Err(Outcome::NoSourcePort) } else { Ok(source) }
}

/// Makes the two entries that exchange the client's address in `to` for the node's. The one for packets of the backend
/// must be free: that claims the source port.
#[inline(never)]
pub(super) fn claim(opening: &mut Opening) -> Claim {
    const REPLY: u8 = flow_flags::MASQUERADE | flow_flags::REPLY;
    const FORWARD: u8 = flow_flags::MASQUERADE | flow_flags::AT_EGRESS;
    opening.key = from_backend(opening);
    opening.flow = Flow::new(&opening.key, &opening.to.reversed(), opening.service, REPLY, now());
    let mut result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    if result == Err(EEXIST) && forget_over(&opening.key) {
        result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    }
    match result {
        Ok(()) => {}
        Err(EEXIST) => return Claim::Taken,
        Err(_) => return Claim::NoRoom,
    }
    let outside = Tuple { source: opening.node, ..opening.to };
    opening.flow = Flow::new(&opening.to, &outside, opening.service, FORWARD, now());
    if CONNTRACK.insert(&opening.to, &opening.flow, u64::from(BPF_ANY)).is_err() {
        release(opening);
        return Claim::NoRoom;
    }
    Claim::Made
}

/// What the backend sends.
#[inline(always)]
fn from_backend(opening: &Opening) -> Tuple {
    Tuple { destination: opening.node, ..opening.to.reversed() }
}

/// Gives up what [`claim`] made.
#[inline(never)]
pub(super) fn release(opening: &mut Opening) {
    // Nothing is lost if they are gone already.
    CONNTRACK.remove(&opening.to).unwrap_or_default();
    opening.key = from_backend(opening);
    CONNTRACK.remove(&opening.key).unwrap_or_default();
}
