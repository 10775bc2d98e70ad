//! Looking up what a packet is for.

use lb_common::{Backend, Outcome, Service, ServiceKey, conntrack::Tuple};

use super::maps::{BACKENDS, SERVICES, TABLES};

/// Reads of a record that the agent is replacing before we give up.
const ATTEMPTS: u32 = 4;

/// The service that the destination of `tuple` belongs to.
#[inline(always)]
pub(super) fn lookup(tuple: &Tuple) -> Result<Service, Outcome> {
    find(&ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol))
}

/// Whether the destination of `tuple` is a frontend.
#[inline(always)]
pub(super) fn exists(tuple: &Tuple) -> bool {
    let key = ServiceKey::new(tuple.destination, tuple.destination_port, tuple.protocol);
    // SAFETY: nothing is read.
    unsafe { SERVICES.get(&key) }.is_some()
}

/// The service of a frontend, copied, so that it cannot change under us.
#[inline(always)]
pub(crate) fn find(key: &ServiceKey) -> Result<Service, Outcome> {
    for _ in 0..ATTEMPTS {
        // SAFETY: the record is copied at once; that it may be reused for another key meanwhile is what the seal is
        // for.
        let record = *unsafe { SERVICES.get(key) }.ok_or(Outcome::NoService)?;
        if record.is_sealed(key) {
            return Ok(record);
        }
    }
    Err(Outcome::TornService)
}

/// The backend in a slot.
#[inline(always)]
pub(crate) fn backend(slot: u32) -> Option<&'static Backend> {
    // SAFETY: array elements live as long as the map, and the map as long as the program. The agent writes a slot only
    // while no service record leads to it and no program that followed an older record still runs.
    BACKENDS.get_ptr(slot).map(|backend| unsafe { &*backend })
}

/// What is in a slot of `TABLES`. As for backends, what a record leads to is not written.
#[inline(always)]
pub(super) fn entry(slot: u32) -> Option<u32> {
    TABLES.get(slot).copied()
}
