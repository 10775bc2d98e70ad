//! `ClientIP` session affinity: connections of one client to one service port go to one backend.

use lb_common::{Address, Affinity, Backend, Service, ServiceClient};
use lb_ebpf::service::schedule;

use crate::datapath::{clock::now, maps::AFFINITY, service};

/// The slot of the backend that the client is pinned to; [`schedule::NONE`] if the service no longer has that backend,
/// or the client is not pinned.
#[inline(never)]
pub(crate) fn find(client: &Address, service: &Service) -> u32 {
    // SAFETY: the map allocates all elements in advance, so their memory stays mapped while a program runs, and the
    // value is copied at once. An LRU map may reuse the element meanwhile; then the copy names another client's
    // backend. If this service has that backend, any client may use it; if not, `find_backend` rejects it.
    let Some(&affinity) = (unsafe { AFFINITY.get(&key(client, service.id)) }) else {
        return schedule::NONE;
    };
    if !affinity.is_valid(now(), service.affinity_seconds) {
        return schedule::NONE;
    }
    service::find_backend(service, &affinity.address, affinity.port)
}

/// Pins the client to this backend.
#[inline(never)]
pub(crate) fn remember(client: &Address, service: u32, backend: &Backend) {
    let affinity = Affinity { address: backend.address, port: backend.port, zeros: 0, last_used: now() };
    // An LRU map evicts another entry if it is full. If the insertion still fails, the next connection is rebalanced.
    AFFINITY.insert(&key(client, service), &affinity, 0).unwrap_or_default();
}

#[inline(always)]
fn key(client: &Address, service: u32) -> ServiceClient {
    ServiceClient { client: *client, service }
}
