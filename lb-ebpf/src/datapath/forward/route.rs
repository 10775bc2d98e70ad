//! Route lookups by the kernel.

use aya_ebpf::helpers::generated::bpf_fib_lookup;
use lb_common::{Address, Outcome, conntrack::Tuple};

use crate::datapath::{context::HookContext, scratch::scratch};

/// A route lookup: its arguments, then its results. `struct bpf_fib_lookup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Route {
    family: u8,
    protocol: u8,
    source_port: u16,
    destination_port: u16,
    /// Bytes of the packet, host byte order; 0 checks no size. Then the MTU, if the route was found.
    length: u16,
    /// The device that the packet came in through; then the one that it leaves through.
    pub(crate) device: u32,
    service_class: u32,
    source: [u32; 4],
    destination: [u32; 4],
    table: u32,
    /// The MAC address of the device, then that of the next hop.
    macs: [[u8; 6]; 2],
}

const _: () = assert!(size_of::<Route>() == size_of::<aya_ebpf::bindings::bpf_fib_lookup>());

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// The result of a lookup: `BPF_FIB_LKUP_RET_*`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// A route, and the MAC address of its next hop.
    Route,
    /// A route whose next hop is not resolved to a MAC address yet.
    WithoutNeighbour,
    /// A route that takes only smaller packets.
    TooNarrow,
    /// No route, or one that leads to this node or nowhere.
    Nothing,
}

impl Found {
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

/// A length so short that it always fits: such a lookup checks no size, and reports the MTU.
pub(crate) const ANY_LENGTH: u16 = 1;

/// Looks for the route of a packet `to` with `length` bytes (0: of any length) that came in here; `flags` are
/// `BPF_FIB_LOOKUP_*`. The route is in `SCRATCH`.
#[inline(never)]
pub(crate) fn lookup(context: &HookContext, to: &Tuple, length: u16, flags: u32) -> Found {
    let Ok(scratch) = scratch() else { return Found::Nothing };
    let route = scratch.route();
    let (is_v4, words) = (to.destination.is_v4(), to.destination.words());
    *route = Route {
        family: if is_v4 { AF_INET } else { AF_INET6 },
        protocol: to.protocol,
        source_port: 0,
        destination_port: 0,
        length,
        device: context.device,
        service_class: 0,
        source: [0; 4],
        destination: if is_v4 { [to.destination.v4_word(), 0, 0, 0] } else { words },
        table: 0,
        macs: [[0; 6]; 2],
    };
    let mut lookup = |flags| {
        let size = size_of::<Route>() as i32;
        // SAFETY: the helper reads and writes `size` bytes at `route`, which has that size and is borrowed mutably.
        // The context is valid for the whole run of the program.
        unsafe { bpf_fib_lookup(context.raw, core::ptr::from_mut(route).cast(), size, flags) }
    };
    let mut result = lookup(flags);
    if result == -EINVAL && flags != 0 {
        // A kernel that does not know these flags (`BPF_FIB_LOOKUP_SRC` before 6.7) does not report the source
        // either: see `source`.
        result = lookup(0);
    }
    Found::of(result)
}

/// The error of a helper for an unknown flag.
const EINVAL: i64 = 22;

impl Route {
    /// The address that the node itself would use as source; `None` before Linux 6.7, which does not report it.
    #[inline(always)]
    pub(crate) fn source(&self) -> Option<Address> {
        let is_v4 = self.family == AF_INET;
        let source =
            if is_v4 { Address::from_v4_word(self.source[0]) } else { Address::from_words(self.source) };
        (self.source != [0; 4]).then_some(source)
    }

    /// Bytes of the largest packet on this route, if the lookup checked a length.
    #[inline(always)]
    pub(crate) const fn mtu(&self) -> u16 {
        self.length
    }

    /// The MAC addresses of the next hop and of the device towards it.
    #[inline(always)]
    pub(crate) const fn macs(&self) -> ([u8; 6], [u8; 6]) {
        let [source, destination] = self.macs;
        (destination, source)
    }
}

/// The route that was looked up last.
#[inline(always)]
pub(crate) fn found() -> Result<&'static Route, Outcome> {
    Ok(scratch()?.route())
}
