//! The limits on new connections of Services.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LruHashMap},
    helpers::generated::bpf_ktime_get_coarse_ns,
    macros::btf_map,
};
use lb_common::{Address, ConnectionLimits, Outcome, Service, ServiceClient, capacity};
use lb_ebpf::{
    parse::Packet,
    rules::{limit, token_bucket::TokenBucket},
};

use crate::datapath::words;

/// The limits of service ports, by [`Service::id`].
#[btf_map]
static LIMITS: HashMap<u32, ConnectionLimits, { capacity::LIMITS }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// The token buckets of the limits: the times (ns of the coarse clock) at which the buckets will be full again. If
/// there are too many clients, the LRU map evicts those that have not connected for the longest time. A client without
/// an entry has a full bucket.
#[btf_map]
static LIMIT_BUCKETS: LruHashMap<ServiceClient, u64, { capacity::LIMIT_BUCKETS }> = LruHashMap::new();

/// Number of attempts to take a token from a bucket that other CPUs use at the same time. If all attempts fail, the
/// program admits the connection: that many collisions are rare, and a connection within the limit must not fail.
const ATTEMPTS: u32 = 4;

/// Takes the tokens for a new connection. If `only_routed` is true, as in the XDP program, a connection that needs
/// tokens is left to tc ([`Outcome::OtherHook`]), so that the connection takes the tokens only once.
#[inline(always)]
pub(crate) fn take_tokens(packet: &Packet, service: &Service, only_routed: bool) -> Result<(), Outcome> {
    if !limit::applies(service, packet.tuple.protocol, packet.segment.is_syn()) {
        Ok(())
    } else if only_routed {
        Err(Outcome::OtherHook)
    } else if limit_take(&raw const packet.tuple.source, service.id) == 0 {
        Err(Outcome::ConnectionLimited)
    } else {
        Ok(())
    }
}

/// Takes a token from each bucket that applies to the client; returns 1, or 0 if one of the buckets is empty. (A global
/// function: the verifier checks it once, and assumes that any pointer may be null.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn limit_take(client: *const Address, service: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Address`, or is null.
    let Some(client) = (unsafe { client.as_ref() }) else { return 0 };
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. If the map
    // reuses the memory meanwhile, the limits of another service apply to this one connection.
    let Some(&limits) = (unsafe { LIMITS.get(&service) }) else { return 1 };
    // SAFETY: the helper takes nothing and only returns a number.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    for (key, rate) in limit::buckets(&limits, service, client) {
        if rate.is_limit() && !take(&key, &limit::bucket(rate), now) {
            return 0;
        }
    }
    1
}

/// Takes a token from the bucket with this key; returns false if the bucket is empty.
#[inline(never)]
fn take(key: &ServiceClient, bucket: &TokenBucket, now: u64) -> bool {
    let Some(state) = LIMIT_BUCKETS.get_ptr_mut(key) else {
        let full_at = now + bucket.interval;
        // An LRU map evicts another entry if it is full. If the insertion still fails, the connection is admitted
        // without a token.
        LIMIT_BUCKETS.insert(key, &full_at, 0).unwrap_or_default();
        return true;
    };
    for _ in 0..ATTEMPTS {
        // SAFETY: the map allocates all elements in advance, so their memory stays mapped while the program runs. A
        // volatile load of an aligned word is never torn.
        let full_at = unsafe { state.read_volatile() };
        let Some(later) = bucket.take(full_at, now) else { return false };
        // SAFETY: `state` leads to the same aligned word. Programs change this word only atomically once the element
        // exists. If the map reuses the element for another client meanwhile, the token is taken from that client's
        // bucket.
        if unsafe { words::compare_exchange(state, full_at, later) } {
            return true;
        }
    }
    true
}
