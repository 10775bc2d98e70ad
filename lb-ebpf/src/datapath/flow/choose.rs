//! The choice of a backend for a new flow, by the scheduler of its service.
//!
//! If the XDP program chooses a backend whose flows only tc can create, it leaves the packet to tc, which chooses
//! again. Both must choose the same backend: otherwise tc would often choose a backend whose flows XDP can create, and
//! the backends whose flows only tc can create would get fewer flows than their share. So a random choice is a hash of
//! the packet and the tick, and a round-robin turn ends only when its flow has begun.

use aya_ebpf::{
    Global,
    bindings::BPF_NOEXIST,
    btf_maps::LruPerCpuHashMap,
    helpers::generated::{bpf_get_smp_processor_id, bpf_loop},
    macros::btf_map,
};
use lb_common::{Scheduler, Service, conntrack::Tuple, hash};
use lb_ebpf::service::schedule::{self, Load, Method};

use super::{active_flows, affinity, conntrack};
use crate::datapath::{clock::now, service};

/// The seed of hashing schedulers; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static HASH_SEED: Global<u64> = Global::new(hash::DEFAULT_SEED);

/// The secret seed of random choices; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static CHANCE_SEED: Global<u64> = Global::new(0);

/// Number of flows that this CPU has created for each service, by service id: `rr` and `wrr` use it as the position in
/// their sequence. Each CPU has its own counter, so no two CPUs write to one cache line. If the map evicts a service,
/// its sequence starts again, which is harmless.
#[btf_map]
static TURNS: LruPerCpuHashMap<u32, u32, 16_384> = LruPerCpuHashMap::new();

/// The slot of the backend for a new flow of `tuple`. If the service has affinity and the client is pinned to a
/// backend, this is the slot of that backend, and the function calls `affine`. Otherwise the scheduler chooses.
/// [`schedule::NONE`] if no backend takes new flows.
#[inline(always)]
pub(crate) fn choose(tuple: &Tuple, service: &Service, affine: impl FnOnce()) -> u32 {
    if service.affinity_seconds > 0 {
        let slot = affinity::find(&tuple.source, service);
        if slot != schedule::NONE {
            affine();
            return slot;
        }
    }
    scheduled(tuple, service)
}

/// The slot for another attempt of the client of `tuple`: the next slot of the service if the client's flow leads to
/// the backend in `slot`, the client has not acknowledged an answer of that backend, and the next backend takes new
/// flows; else `slot`.
#[inline(never)]
pub(crate) fn another(tuple: &Tuple, service: &Service, slot: u32) -> u32 {
    let (Some(flow), Some(backend)) = (conntrack::lookup(tuple), service::backend(slot)) else {
        return slot;
    };
    let weight = |slot| service::backend(slot).map_or(0, |backend| backend.weight);
    schedule::retried(service, flow, backend, slot, weight)
}

#[inline(never)]
fn scheduled(tuple: &Tuple, service: &Service) -> u32 {
    // A newer agent may use a scheduler that this program does not have: any backend is better than none.
    let scheduler = Scheduler::try_from(service.scheduler).unwrap_or_default();
    let entries = schedule::entries(service);
    if entries == 0 {
        return schedule::NONE;
    }
    let nth = match Method::of(scheduler) {
        Method::Load => {
            return least(scheduler, service, schedule::scale(chance(tuple), service.backends_count));
        }
        Method::Turn => turn(service.id).wrapping_add(cpu()) % entries,
        Method::Hash => {
            schedule::hashed(schedule::of_hash(scheduler, service), tuple, HASH_SEED.load(), entries)
        }
        Method::Random => schedule::scale(chance(tuple), entries),
    };
    schedule::slot(service, nth, service::entry)
}

/// A search for the backend with the least load.
struct Search {
    scheduler: Scheduler,
    base: u32,
    count: u32,
    /// The index of the next backend in the slice.
    place: u32,
    /// The slot of the best backend so far.
    slot: u32,
    best: Load,
}

/// The slot of the backend with the least load. Among equals it is the first one from index `start` on: nodes choose
/// independently of each other, and must not all begin with the same backend.
#[inline(always)]
fn least(scheduler: Scheduler, service: &Service, start: u32) -> u32 {
    let mut search = Search {
        scheduler,
        base: service.backends_base,
        count: service.backends_count,
        place: start,
        slot: schedule::NONE,
        best: Load { active: 0, weight: 0 },
    };
    let context = (&raw mut search).cast();
    // SAFETY: `look_at_next` has the signature that the kernel calls it with, and `search` outlives the call and is
    // not used during it.
    unsafe { bpf_loop(service.backends_count, look_at_next as *mut _, context, 0) };
    search.slot
}

/// Compares one backend; returns 1 to end the search. The kernel calls this function, so the verifier checks it once,
/// not once per backend.
extern "C" fn look_at_next(_index: u32, context: *mut core::ffi::c_void) -> i64 {
    // SAFETY: `least` gave `bpf_loop` a pointer to its `search`, which nothing else uses during the call.
    let search = unsafe { &mut *context.cast::<Search>() };
    let slot = search.base.wrapping_add(search.place);
    search.place += 1;
    if search.place >= search.count {
        search.place = 0;
    }
    let Some(backend) = service::backend(slot) else { return 1 };
    if backend.weight == 0 {
        return 0;
    }
    let load = Load { active: active_flows::active(backend.active_flows_slot), weight: backend.weight };
    let ends = load.is_best(search.scheduler);
    if ends || search.slot == schedule::NONE || load.is_less(&search.best, search.scheduler) {
        (search.slot, search.best) = (slot, load);
    }
    i64::from(ends)
}

/// Ends the turn of a service with a round-robin scheduler: a flow has begun with the chosen backend.
#[inline(always)]
pub(crate) fn flow_began(service: u32, scheduler: u8) {
    if schedule::takes_turns(scheduler) {
        end_turn(service);
    }
}

/// A pseudo-random number that is the same within a tick for packets with the same source address and ports.
#[inline(always)]
fn chance(tuple: &Tuple) -> u32 {
    let ports = u32::from(tuple.source_port) << 16 | u32::from(tuple.destination_port);
    (hash::of_endpoint(CHANCE_SEED.load() ^ u64::from(now().0), &tuple.source, ports) >> 32) as u32
}

/// The number of this CPU. Sequences start at different positions on different CPUs, so that their first flows do not
/// all get one backend.
#[inline(always)]
fn cpu() -> u32 {
    // SAFETY: the helper takes nothing and only returns a number.
    unsafe { bpf_get_smp_processor_id() }
}

/// The position of a service in its round-robin sequence on this CPU.
#[inline(always)]
fn turn(service: u32) -> u32 {
    // SAFETY: the pointer is that of an element for this CPU, whose memory stays mapped while the program runs. A
    // program that interrupts this one on the same CPU may read the same turn, which is harmless.
    TURNS.get_ptr_mut(&service).map_or(0, |turns| unsafe { *turns })
}

#[inline(never)]
fn end_turn(service: u32) {
    match TURNS.get_ptr_mut(&service) {
        // SAFETY: the pointer is that of an element for this CPU, whose memory stays mapped while the program runs. A
        // program that interrupts this one on the same CPU may lose a turn, which is harmless.
        Some(turns) => unsafe { *turns = (*turns).wrapping_add(1) },
        // If the insert fails, the next turn is the first one again.
        None => TURNS.insert(&service, &1, u64::from(BPF_NOEXIST)).unwrap_or_default(),
    }
}
