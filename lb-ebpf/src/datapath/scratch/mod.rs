//! `SCRATCH`: memory for values that do not fit on the stack, which has 512 bytes for a whole call chain.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use lb_common::{
    Outcome,
    conntrack::{Flow, Tuple},
    crc32c::CrcChange,
};
use lb_ebpf::{
    forward::tunnel::Tunnel,
    proxy_protocol::{LONGEST, Options, TcpBytes},
    reject::MESSAGE,
};

pub(crate) mod route;
pub(crate) mod setup;
pub(crate) mod socket;

use self::{
    route::Route,
    setup::{FlowRequest, FlowSetup, Keys},
    socket::SocketTuple,
};

/// The longest frame that [`Scratch::frame`] can hold, in bytes.
pub(crate) const MAX_FRAME: usize = 2048;

/// This CPU's element of `SCRATCH`, looked up once and borrowed field by field.
///
/// References to different fields may exist at once. A function that holds a reference to a field calls no function
/// that borrows the same field (`lb-common/tests/scratch.rs` checks this).
#[derive(Clone, Copy)]
pub(crate) struct Scratch(*mut Fields);

/// Looks up this CPU's element of `SCRATCH`.
#[inline(always)]
pub(crate) fn scratch() -> Result<Scratch, Outcome> {
    SCRATCH.get_ptr_mut(0).map(Scratch).ok_or(Outcome::RewriteFailed)
}

/// Declares the fields, each with a method that borrows only this field.
macro_rules! fields {
    ($($(#[doc = $doc:literal])+ $field:ident: $type:ty,)+) => {
        /// Value of `SCRATCH`.
        struct Fields {
            $($field: $type,)+
        }

        impl Scratch {
            $(
                $(#[doc = $doc])+
                #[inline(always)]
                pub(crate) fn $field(self) -> &'static mut $type {
                    // SAFETY: the pointer leads to a map element, which lives as long as the program runs. The element
                    // belongs to this CPU alone, and programs on these hooks run with bottom halves disabled, so no
                    // other program uses the element before this one ends. No reference to the whole element exists,
                    // and the functions of this program never hold two references to one field (see `Scratch`). The
                    // kernel fills the element with zeros, which are valid for every field.
                    unsafe { &mut (*self.0).$field }
                }
            )+
        }
    };
}

fields! {
    /// The flow that the packet requests.
    request: FlowRequest,
    /// The flow that is being created.
    setup: FlowSetup,
    /// Keys and places of entries that may be deleted together, because a flow ends, is replaced or is evicted.
    keys: Keys,
    /// The key of the entry that is looked up or changed in the overflow.
    overflow_key: Tuple,
    /// The flow that is written into an entry of the overflow.
    overflow_flow: Flow,
    /// Key of the flow that an ICMP error is about.
    error_key: Tuple,
    /// The tunnel that the current packet came through, or that the current ICMP error is about.
    tunnel: Tunnel,
    /// The route of the last lookup.
    route: Route,
    /// The SCTP checksum that is being updated.
    crc: CrcChange,
    /// The socket that is being looked up.
    socket: SocketTuple,
    /// The TCP header that is being changed.
    tcp: TcpBytes,
    /// The change of the options of the TCP header in `tcp`.
    options: Options,
    /// The PROXY protocol header that is being sent.
    proxy_header: [u8; LONGEST],
    /// The ICMP message that is being built.
    message: [u8; MESSAGE],
    /// A frame that is set aside while its `sk_buff` carries other frames.
    frame: [u8; MAX_FRAME],
}

#[btf_map]
static SCRATCH: PerCpuArray<Fields, 1> = PerCpuArray::new();
