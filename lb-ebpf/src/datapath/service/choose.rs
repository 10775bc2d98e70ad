//! The choice of a backend for a new flow, by the scheduler of its service.
//!
//! A packet that the XDP program leaves to tc is chosen for twice, and must get the same backend: else those whose flows
//! only tc can begin would get less than their share. So chance is a hash of the packet and the moment, and a turn is over
//! only when its flow has begun.

use aya_ebpf::{
    Global,
    bindings::BPF_NOEXIST,
    btf_maps::LruPerCpuHashMap,
    helpers::generated::{bpf_get_smp_processor_id, bpf_loop},
    macros::btf_map,
};
use lb_common::{
    Scheduler, Service,
    conntrack::{Tuple, seen},
    hash,
};
use lb_ebpf::service::schedule::{self, Load};

use crate::datapath::flow::{
    active_flows, affinity,
    conntrack::{self, now},
};

/// What hashing schedulers hash with; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static HASH_SEED: Global<u64> = Global::new(hash::DEFAULT_SEED);

/// What chance depends on besides; the agent sets it to a number that nobody knows.
#[unsafe(no_mangle)]
static CHANCE_SEED: Global<u64> = Global::new(0);

/// How many flows of a service this CPU has sent on its way, by service id: where `rr` and `wrr` are in their sequence.
/// Each CPU has its own, so that no two write to one cache line. Which service is forgotten when there are too many does
/// not matter: it starts anew.
#[btf_map]
static TURNS: LruPerCpuHashMap<u32, u32, 16_384> = LruPerCpuHashMap::new();

/// The slot of the backend for a new flow of `tuple`: the client's own where the service has affinity, else the scheduler's
/// choice; [`schedule::NONE`] where no backend takes new flows. `affine` is called where it is the former.
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

/// Another slot than the one of the backend that the client of `tuple` has asked in vain: then the next one.
#[inline(never)]
pub(in crate::datapath) fn another(tuple: &Tuple, service: &Service, slot: u32) -> u32 {
    let (Some(flow), Some(backend)) = (conntrack::lookup(tuple), super::backend(slot)) else {
        return slot;
    };
    let (address, port) = (&flow.to.destination, flow.to.destination_port);
    let answered = flow.seen & seen::ACK != 0;
    if answered || (address, port) != (&backend.address, backend.port) {
        return slot;
    }
    let next = slot.wrapping_add(1);
    if next < service.backends_base.wrapping_add(service.backends_count) {
        next
    } else {
        service.backends_base
    }
}

#[inline(never)]
fn scheduled(tuple: &Tuple, service: &Service) -> u32 {
    // An unknown scheduler is one of a newer agent: any backend is better than none.
    let scheduler = Scheduler::try_from(service.scheduler).unwrap_or_default();
    let entries = schedule::entries(service);
    if entries == 0 {
        return schedule::NONE;
    }
    if scheduler.uses_active_flows() {
        return least(scheduler, service, schedule::scale(chance(tuple), service.backends_count));
    }
    let nth = match scheduler {
        Scheduler::RoundRobin | Scheduler::WeightedRoundRobin => {
            turn(service.id).wrapping_add(cpu()) % entries
        }
        Scheduler::SourceHash | Scheduler::DestinationHash | Scheduler::Maglev => {
            schedule::hashed(scheduler, tuple, HASH_SEED.load(), entries)
        }
        _ => schedule::scale(chance(tuple), entries),
    };
    schedule::slot(service, nth, super::entry)
}

/// A search for the backend that is best off.
struct Search {
    scheduler: Scheduler,
    base: u32,
    count: u32,
    /// The place that is looked at next.
    place: u32,
    /// The slot of the best one so far.
    slot: u32,
    best: Load,
}

/// The slot of the backend with the least load. Of equals it is the first one from the place `start` on: nodes that know
/// nothing of each other must not all begin with the same backend.
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
    // SAFETY: `look_at_next` has the signature that the kernel calls it with, and `search` outlives the call.
    unsafe { bpf_loop(service.backends_count, look_at_next as *mut _, context, 0) };
    search.slot
}

/// Looks at one backend; 1 ends the search. Called by the kernel, so that the verifier walks it once, however many backends
/// there are.
extern "C" fn look_at_next(_index: u32, context: *mut core::ffi::c_void) -> i64 {
    // SAFETY: it is what `least` gave to `bpf_loop`.
    let search = unsafe { &mut *context.cast::<Search>() };
    let slot = search.base.wrapping_add(search.place);
    search.place += 1;
    if search.place >= search.count {
        search.place = 0;
    }
    let Some(backend) = super::backend(slot) else { return 1 };
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

/// A backend has been chosen and its flow has begun.
#[inline(always)]
pub(crate) fn made(service: u32, scheduler: u8) {
    if scheduler == Scheduler::RoundRobin as u8 || scheduler == Scheduler::WeightedRoundRobin as u8 {
        end_turn(service);
    }
}

/// A number that is as good as any, but the same for the same packet within a second.
#[inline(always)]
fn chance(tuple: &Tuple) -> u32 {
    let ports = u32::from(tuple.source_port) << 16 | u32::from(tuple.destination_port);
    (hash::of_endpoint(CHANCE_SEED.load() ^ u64::from(now().0), &tuple.source, ports) >> 32) as u32
}

/// CPUs start at different places, so that the first flows of each do not meet at one backend.
#[inline(always)]
fn cpu() -> u32 {
    // SAFETY: takes nothing and has no side effects.
    unsafe { bpf_get_smp_processor_id() }
}

/// The number of the next turn of a service on this CPU.
#[inline(always)]
fn turn(service: u32) -> u32 {
    // SAFETY: the value is of this CPU alone. Two programs that share it by interruption may take the same turn.
    TURNS.get_ptr_mut(&service).map_or(0, |turns| unsafe { *turns })
}

#[inline(never)]
fn end_turn(service: u32) {
    match TURNS.get_ptr_mut(&service) {
        // SAFETY: as for `turn`.
        Some(turns) => unsafe { *turns = (*turns).wrapping_add(1) },
        // Should there be no room, every turn is the first one.
        None => TURNS.insert(&service, &1, u64::from(BPF_NOEXIST)).unwrap_or_default(),
    }
}
