//! Counts the connections of sockets to backends, from `connect(2)` to the release of the socket.
//!
//! The packets of these sockets are not translated, so no flow counts them. `SOCKET_COUNTS` has the counts of each
//! backend. For schedulers that use the number of active flows, a connection also counts as an active flow of the
//! backend.

use core::ptr;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::{HashMap, SkStorage},
    helpers::generated::bpf_sk_storage_get,
    macros::btf_map,
    programs::SockContext,
};
use bytemuck::Zeroable as _;
use lb_common::{Backend, Endpoint, SocketCounter, SocketCounts, capacity};

use super::call::Call;
use crate::datapath::{flow::active_flows, words};

/// How many connections to each backend have begun and ended.
#[btf_map]
static SOCKET_COUNTS: HashMap<
    SocketCounter,
    SocketCounts,
    { capacity::SOCKET_COUNTS },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// For each socket with a counted connection: the key in `SOCKET_COUNTS` of the counts that include the connection. The
/// kernel stores the key in the socket itself, and frees it with the socket.
#[btf_map]
static COUNTED_SOCKETS: SkStorage<SocketCounter> = SkStorage::new();

/// Counts a connection that begins, if there is memory for the backend's counts and for the socket's key. The caller
/// has already called [`end`] for the socket's previous connection.
#[inline(never)]
pub(super) fn begin(call: &Call, service: u32, backend: &Backend) {
    let mut counter = SocketCounter {
        service,
        active_flows_slot: backend.active_flows_slot,
        backend: Endpoint::new(backend.address, backend.port),
    };
    let Some(counts) = counts_of(&counter) else { return };
    if call.store(&COUNTED_SOCKETS, &mut counter) {
        // SAFETY: the memory of an element stays mapped while the program runs; all programs change the count
        // atomically.
        unsafe { words::add(&raw mut counts.begun, 1) };
        active_flows::begin(counter.active_flows_slot);
    }
}

/// Counts the end of a socket's connection, if [`begin`] has counted the connection.
#[inline(always)]
pub(super) fn end(call: &Call) {
    // SAFETY: the storage lives as long as the socket, which outlives the call.
    if let Some(counter) = unsafe { call.stored(&COUNTED_SOCKETS).as_mut() } {
        count_end(counter);
    }
}

/// Counts the end of the connection of a socket that the kernel releases. Returns whether the socket has had a counted
/// connection.
#[inline(always)]
pub(super) fn release(ctx: &SockContext) -> bool {
    let map = ptr::from_ref(&COUNTED_SOCKETS).cast_mut().cast();
    // SAFETY: for programs of this type the helper takes the context, which is the socket. The storage lives as long as
    // the socket, which outlives the run of the program.
    let counter =
        unsafe { bpf_sk_storage_get(map, ctx.as_ptr(), ptr::null_mut(), 0).cast::<SocketCounter>().as_mut() };
    match counter {
        Some(counter) => {
            count_end(counter);
            true
        }
        None => false,
    }
}

/// Counts the end of a connection, and clears the socket's key, so that the end counts only once. (If two threads
/// connect the same UDP socket at once, an end may count twice. [`SocketCounts::active`] never falls below 0.)
#[inline(always)]
fn count_end(counter: &mut SocketCounter) {
    if counter.backend.port == 0 {
        return;
    }
    if let Some(counts) = SOCKET_COUNTS.get_ptr_mut(&*counter) {
        // SAFETY: as in `begin`.
        unsafe { words::add(&raw mut (*counts).ended, 1) };
        active_flows::connection_ended(counter.active_flows_slot);
    }
    *counter = SocketCounter::zeroed();
}

/// The counts of a backend; `None` if the map has no room for more backends.
#[inline(always)]
fn counts_of(counter: &SocketCounter) -> Option<&'static mut SocketCounts> {
    if SOCKET_COUNTS.get_ptr(counter).is_none() {
        // Another CPU may insert the counts first.
        SOCKET_COUNTS.insert(counter, &SocketCounts::zeroed(), u64::from(BPF_NOEXIST)).unwrap_or_default();
    }
    // SAFETY: the memory of an element stays mapped while the program runs; the program changes the counts only
    // atomically.
    unsafe { SOCKET_COUNTS.get_ptr_mut(counter)?.as_mut() }
}
