//! Services: lookup of frontends and backends.

pub(crate) mod admit;
pub(crate) mod limit;
pub(crate) mod vips;

use aya_ebpf::helpers::generated::bpf_loop;
use lb_common::{Address, Backend, Outcome, Service, ServiceKey, conntrack::Tuple};
use lb_ebpf::service::schedule::{self, BackendSearch};

use crate::datapath::maps::{BACKENDS, SERVICES, TABLES};

/// Number of attempts to read a record that the agent keeps replacing. After the last attempt, a packet that would
/// begin a flow is dropped, and a system call fails. A known flow keeps its backend.
const ATTEMPTS: u32 = 4;

/// The service of the destination of `tuple`.
#[inline(always)]
pub(crate) fn lookup(tuple: &Tuple) -> Result<Service, Outcome> {
    find(&ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol))
}

/// Whether the destination of `tuple` is a frontend.
#[inline(always)]
pub(crate) fn exists(tuple: &Tuple) -> bool {
    let key = ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol);
    // SAFETY: the program does not read the element.
    unsafe { SERVICES.get(&key) }.is_some()
}

/// A copy of the service of a frontend, so that the agent cannot change it during its use.
#[inline(always)]
pub(crate) fn find(key: &ServiceKey) -> Result<Service, Outcome> {
    for _ in 0..ATTEMPTS {
        // SAFETY: the memory of an element stays mapped while the program runs, every bit pattern is a valid `Service`,
        // and the record is copied at once. The map may reuse the memory for another key meanwhile; the record's seal
        // shows that.
        let record = *unsafe { SERVICES.get(key) }.ok_or(Outcome::NoService)?;
        if record.is_sealed(key) {
            return Ok(record);
        }
    }
    Err(Outcome::TornService)
}

#[inline(always)]
pub(crate) fn backend(slot: u32) -> Option<&'static Backend> {
    // SAFETY: array elements live as long as the program runs. The agent writes a slot only while no service record
    // leads to it and no program that read an older record still runs.
    BACKENDS.get_ptr(slot).map(|backend| unsafe { &*backend })
}

/// The slot of the backend `address:port` of `service`; [`schedule::NONE`] if the service has no such backend.
#[inline(always)]
pub(crate) fn find_backend(service: &Service, address: &Address, port: u16) -> u32 {
    let slot = search(service, address, port);
    match backend(slot) {
        Some(backend) if backend.address == *address && backend.port == port => slot,
        _ => schedule::NONE,
    }
}

/// The slot of the backend `address:port`; port 0 finds the first backend with the address. If the service has no such
/// backend, the result is the slot of another backend or [`schedule::NONE`]: the caller must compare the backend in the
/// slot.
#[inline(never)]
pub(crate) fn search(service: &Service, address: &Address, port: u16) -> u32 {
    let mut search = BackendSearch::new(service, *address, port);
    let context = (&raw mut search).cast();
    // SAFETY: `step` has the signature that the kernel calls it with, and `search` outlives the call and is not used
    // during it.
    unsafe { bpf_loop(BackendSearch::STEPS, step as *mut _, context, 0) };
    search.slot()
}

/// Compares one backend; returns 1 to end the search. The kernel calls this function, so the verifier does not unroll
/// the loop.
extern "C" fn step(_index: u32, context: *mut core::ffi::c_void) -> i64 {
    // SAFETY: `search` gave `bpf_loop` a pointer to its own value, which nothing else uses during the call.
    let search = unsafe { &mut *context.cast::<BackendSearch>() };
    match search.next().and_then(backend) {
        Some(backend) => {
            search.note(backend);
            0
        }
        None => 1,
    }
}

/// An entry of `TABLES`. As with `BACKENDS`, the agent writes only entries that no service record refers to.
#[inline(always)]
pub(crate) fn entry(slot: u32) -> Option<u32> {
    TABLES.get(slot).copied()
}
