//! Route lookups by the kernel, and the next hops that they find.

pub(crate) mod next_hop;

use aya_ebpf::{bindings::BPF_FIB_LOOKUP_SKIP_NEIGH, helpers::generated::bpf_fib_lookup};
use lb_common::{Outcome, conntrack::Tuple};

use super::{
    context::HookContext,
    scratch::{route::Route, scratch},
    skb::{Exit, Skb},
};

/// The result of a lookup: `BPF_FIB_LKUP_RET_*`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FibResult {
    /// The whole route, with the MAC address of its next hop unless the lookup skips the neighbour
    /// (`BPF_FIB_LOOKUP_SKIP_NEIGH`).
    Route,
    /// A route whose next hop is not resolved to a MAC address yet.
    WithoutNeighbour,
    /// A route that takes only smaller packets.
    TooNarrow,
    /// No route by which the node may forward the packet: there is no route, the route leads to this node or nowhere,
    /// or the device that the packet came in through does not forward.
    Nothing,
}

impl FibResult {
    #[inline(always)]
    const fn of(result: i64) -> Self {
        match result {
            0 => Self::Route,
            7 => Self::WithoutNeighbour,
            8 => Self::TooNarrow,
            _ => Self::Nothing,
        }
    }
}

/// Flag: the lookup takes the mark of the packet into account (since Linux 6.10).
const BPF_FIB_LOOKUP_MARK: u32 = 1 << 5;

/// A length that fits every route. (With 0, the kernel would not report the MTU of the route.)
pub(crate) const ANY_LENGTH: u16 = 1;

/// Looks up the route of a packet that came in as `from` and becomes `to`. `length` is the size of the packet in bytes;
/// `flags` are `BPF_FIB_LOOKUP_*`. Writes the route to `SCRATCH`.
///
/// Like the stack, the lookup uses the source of `from` and the destination of `to`: netfilter translates destinations
/// before routing, sources afterwards. So `ip rule from POD` also applies to a pod's replies.
#[inline(never)]
pub(crate) fn lookup(context: &HookContext, from: &Tuple, to: &Tuple, length: u16, flags: u32) -> FibResult {
    let Ok(scratch) = scratch() else { return FibResult::Nothing };
    let route = scratch.route();
    *route = Route::request(from, to, length, context.device);
    route.set_mark(context.mark);
    let mut lookup = |flags| {
        let size = size_of::<Route>() as i32;
        // SAFETY: the helper reads and writes `size` bytes at `route`, which has that size and is borrowed mutably.
        // The context is valid for the whole run of the program.
        unsafe { bpf_fib_lookup(context.raw, core::ptr::from_mut(route).cast(), size, flags) }
    };
    let mut result = if context.mark == 0 { -EINVAL } else { lookup(flags | BPF_FIB_LOOKUP_MARK) };
    if result == -EINVAL {
        // There is no mark, or the kernel is older than 6.10 and cannot take it into account.
        result = lookup(flags);
    }
    if result == -EINVAL && flags != 0 {
        // The kernel does not support these flags (`BPF_FIB_LOOKUP_SRC` before 6.7).
        result = lookup(0);
        route.clear_source();
    }
    FibResult::of(result)
}

/// The error of a helper for an unknown flag.
const EINVAL: i64 = 22;

/// The route that was looked up last.
#[inline(always)]
pub(crate) fn found() -> Result<&'static Route, Outcome> {
    Ok(scratch()?.route())
}

/// Makes the packet, which came in as `from` and becomes `to`, leave through the device of its route, to the next hop
/// in `SCRATCH`: the program must look up no other route before it sends the packet. Returns the MTU of the route, or 0
/// if the kernel does not report it.
#[inline(always)]
pub(crate) fn resolve(skb: &mut Skb, from: &Tuple, to: &Tuple) -> Result<u32, Outcome> {
    let result = lookup(&skb.context(), from, to, ANY_LENGTH, BPF_FIB_LOOKUP_SKIP_NEIGH);
    if result == FibResult::Nothing {
        return Err(Outcome::NoRoute);
    }
    let route = found()?;
    skb.exit = Exit::neighbour(route.device);
    // Kernels before 6.3 cannot skip the neighbour, and report no MTU if the neighbour is not resolved.
    Ok(if result == FibResult::WithoutNeighbour { 0 } else { u32::from(route.mtu()) })
}
