//! `ClientIP` session affinity: connections of one client to one service port go to one backend.

use lb_common::{Address, Affinity, AffinityKey, Backend, Service};
use lb_ebpf::service::schedule;

use super::conntrack::now;
use crate::datapath::{maps::AFFINITY, service};

/// The slot of the backend that the client belongs to; [`schedule::NONE`] where it belongs to none that the service
/// still has.
#[inline(never)]
pub(crate) fn find(client: &Address, service: &Service) -> u32 {
    // SAFETY: the value is copied at once. One that was reused meanwhile names a backend of another service; then it is
    // none of ours, or as good as any.
    let Some(&affinity) = (unsafe { AFFINITY.get(&key(client, service.id)) }) else {
        return schedule::NONE;
    };
    if !affinity.is_valid(now(), service.affinity_seconds) {
        return schedule::NONE;
    }
    service::find_backend(service, &affinity.address, affinity.port)
}

/// Notes that the client has made a connection to this backend.
#[inline(never)]
pub(crate) fn remember(client: &Address, service: u32, backend: &Backend) {
    let affinity = Affinity { address: backend.address, port: backend.port, zeros: 0, last_used: now() };
    // An LRU map always has room; should this fail nevertheless, the next connection is balanced anew.
    AFFINITY.insert(&key(client, service), &affinity, 0).unwrap_or_default();
}

#[inline(always)]
fn key(client: &Address, service: u32) -> AffinityKey {
    AffinityKey { client: *client, service }
}
