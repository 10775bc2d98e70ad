//! Asking the kernel for routes.

use aya_ebpf::helpers::generated::bpf_fib_lookup;
use lb_common::{Address, Outcome, conntrack::Tuple};

use crate::datapath::{context::HookContext, maps::scratch};

/// What the kernel takes and gives when asked for a route: `struct bpf_fib_lookup`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::datapath) struct Route {
    family: u8,
    protocol: u8,
    source_port: u16,
    destination_port: u16,
    /// Octets of the packet, host byte order; 0 asks for no check. Then the MTU, if the route was found.
    length: u16,
    /// The device that the packet came in through; then the one that it leaves through.
    pub(in crate::datapath) device: u32,
    service_class: u32,
    source: [u32; 4],
    destination: [u32; 4],
    table: u32,
    /// Of the device, then of the next hop.
    macs: [[u8; 6]; 2],
}

const _: () = assert!(size_of::<Route>() == size_of::<aya_ebpf::bindings::bpf_fib_lookup>());

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// What came of it: `BPF_FIB_LKUP_RET_*`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::datapath) enum Found {
    /// Everything.
    Route,
    /// A route whose next hop has not been asked for its MAC address yet.
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

/// Looks for the route of a packet `to` with `length` octets (0: of any length) that came in here; `flags` are
/// `BPF_FIB_LOOKUP_*`. The route is in `SCRATCH`.
#[inline(never)]
pub(in crate::datapath) fn look_up(context: &HookContext, to: &Tuple, length: u16, flags: u32) -> Found {
    let Ok(scratch) = scratch() else { return Found::Nothing };
    let route = &mut scratch.route;
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
    let mut ask = |flags| {
        let size = size_of::<Route>() as i32;
        // SAFETY: `route` is as large as the kernel is told; the context is valid for the whole run of the program.
        unsafe { bpf_fib_lookup(context.raw, core::ptr::from_mut(route).cast(), size, flags) }
    };
    let mut result = ask(flags);
    if result == -EINVAL && flags != 0 {
        // A kernel that does not know these flags (before 6.7): what they would have told is not there, see `source`.
        result = ask(0);
    }
    Found::of(result)
}

/// What a helper returns that does not know a flag.
const EINVAL: i64 = 22;

impl Route {
    /// The address that the node itself would speak from; `None` where the kernel does not tell that (before 6.7).
    #[inline(always)]
    pub(in crate::datapath) fn source(&self) -> Option<Address> {
        let is_v4 = self.family == AF_INET;
        let source =
            if is_v4 { Address::from_v4_word(self.source[0]) } else { Address::from_words(self.source) };
        (self.source != [0; 4]).then_some(source)
    }

    /// Octets of the largest packet that goes this way, if the length was to be checked.
    #[inline(always)]
    pub(in crate::datapath) const fn mtu(&self) -> u16 {
        self.length
    }

    /// The MAC addresses of the next hop and of the device towards it.
    #[inline(always)]
    pub(in crate::datapath) const fn macs(&self) -> ([u8; 6], [u8; 6]) {
        let [source, destination] = self.macs;
        (destination, source)
    }
}

/// The route that was looked up last.
#[inline(always)]
pub(in crate::datapath) fn found() -> Result<&'static Route, Outcome> {
    Ok(&scratch()?.route)
}
