//! The maps of the data plane. Names and layouts are an interface: see `lb_common` and docs/maps.md. Other maps, such
//! as `SCRATCH`, `EVENTS`, `FILTER` and `EARLY_FRAGMENTS`, are defined next to the code that uses them.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray},
    macros::btf_map,
};
use lb_common::{
    Address, Affinity, Backend, DeviceInfo, DnsIntercept, EndpointName, FragmentKey, FragmentedDatagram,
    Outcome, Service, ServiceClient, ServiceKey, ServiceName, Settings, SourceRange, Vip, capacity,
    conntrack::{Flow, Tuple},
    flow_table::{Header, Slot},
};
use lb_ebpf::parse::Packet;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;

/// Frontends: address, port and protocol of a service → its backends.
#[btf_map]
pub(super) static SERVICES: HashMap<ServiceKey, Service, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

/// Endpoints: an arena of contiguous slices, each sorted by address and port. A frontend refers to at most two slices:
/// one for its clients, and with `SHORT_CIRCUIT` another slice for internal clients. Frontends of one service port with
/// equal backends share a slice.
#[btf_map]
pub(super) static BACKENDS: Array<Backend, { capacity::BACKENDS }> = Array::new();

/// Tables of schedulers: an arena of indices into slices of `BACKENDS`.
#[btf_map]
pub(super) static TABLES: Array<u32, { capacity::TABLES }> = Array::new();

/// The flow table: entries of flows, one for each direction. The agent maps it.
#[btf_map]
pub(super) static FLOWS: Array<Slot, { capacity::FLOWS }, MMAPABLE> = Array::new();

/// The seed and the state of the flow table. The agent maps it.
#[btf_map]
pub(super) static FLOW_TABLE: Array<Header, 1, MMAPABLE> = Array::new();

/// Flows for which the flow table had no place. Not an LRU map: a flood of new flows must not evict an established one.
#[btf_map]
pub(super) static CONNTRACK: HashMap<Tuple, Flow, { capacity::CONNTRACK }, NO_PREALLOC> = HashMap::new();

/// What the programs do with the later fragments of a datagram whose first fragment they have seen.
#[btf_map]
pub(super) static FRAGMENTS: LruHashMap<FragmentKey, FragmentedDatagram, { capacity::FRAGMENTS }> =
    LruHashMap::new();

/// Backends of clients of services with affinity. An LRU map: if there are too many clients, those that have not
/// connected for the longest time are rebalanced.
#[btf_map]
pub(super) static AFFINITY: LruHashMap<ServiceClient, Affinity, { capacity::AFFINITY }> = LruHashMap::new();

/// Virtual addresses and addresses of the node, with the treatment of packets to ports that no Service has.
#[btf_map]
pub(super) static VIPS: HashMap<Address, Vip, { capacity::VIPS }, NO_PREALLOC> = HashMap::new();

/// Networks whose clients may use a service port. They apply to those frontends of the port that have source ranges.
#[btf_map]
pub(super) static SOURCE_RANGES: LpmTrie<SourceRange, u32, { capacity::SOURCE_RANGES }, NO_PREALLOC> =
    LpmTrie::new();

/// Interface indices of devices through which packets of internal clients enter.
#[btf_map]
pub(super) static INSIDE_DEVICES: HashMap<u32, u32, { capacity::INSIDE_DEVICES }, NO_PREALLOC> =
    HashMap::new();

/// Addresses of other nodes of the cluster, which may send tunnelled packets to backends on this node.
#[btf_map]
pub(super) static PEERS: HashMap<Address, u32, { capacity::PEERS }, NO_PREALLOC> = HashMap::new();

/// The devices with programs, by interface index: which frames are for this node, and which packets may bypass the
/// stack.
#[btf_map]
pub(super) static DEVICES: HashMap<u32, DeviceInfo, { capacity::DEVICES }, NO_PREALLOC> = HashMap::new();

/// Endpoints of node-local DNS: where queries go, and what answers carry as their source.
#[btf_map]
pub(super) static DNS_INTERCEPT: HashMap<ServiceKey, DnsIntercept, { capacity::DNS_INTERCEPT }, NO_PREALLOC> =
    HashMap::new();

/// Settings of the node: two slots, of which one is in use.
#[btf_map]
pub(super) static SETTINGS: Array<Settings, 2> = Array::new();

/// The slot of `SETTINGS` that is in use.
#[btf_map]
pub(super) static SETTINGS_SLOT: Array<u32, 1> = Array::new();

/// Whether the programs of an earlier layout are on the same hooks: see [`lb_common::handover`].
#[btf_map]
pub(super) static HANDOVER: Array<u32, 1> = Array::new();

/// Counts packets and system calls by their [`Outcome`], on each CPU.
#[btf_map]
pub(super) static STATS: PerCpuArray<u64, { Outcome::COUNT }> = PerCpuArray::new();

/// The packets of this CPU. Slot 0 has the packet that the CPU processes. Slot 1 has the packet inside a tunnel: either
/// the packet in slot 0 came through that tunnel, or it is an ICMP error about that tunnel.
///
/// The packets are in a map rather than on the stack because the verifier tracks every value on the stack: it would
/// check the rest of the program once for each combination of results of parsing.
#[btf_map]
pub(super) static PACKET: PerCpuArray<Packet, 2> = PerCpuArray::new();

/// The packet that this CPU processes.
#[inline(always)]
pub(super) fn packet() -> Result<&'static mut Packet, Outcome> {
    nth_packet(0)
}

/// The packet inside a tunnel: either the processed packet came through that tunnel, or it is an ICMP error about that
/// tunnel.
#[inline(always)]
pub(super) fn inner_packet() -> Result<&'static mut Packet, Outcome> {
    nth_packet(1)
}

#[inline(always)]
fn nth_packet(slot: u32) -> Result<&'static mut Packet, Outcome> {
    let packet = PACKET.get_ptr_mut(slot).ok_or(Outcome::RewriteFailed)?;
    // SAFETY: the slot belongs to this CPU alone, and programs on these hooks run with bottom halves disabled, so no
    // other such program runs on this CPU before this one ends. Two borrows of a slot are never in use at the same
    // time. The fast path stores a packet in slot 0 before the slow path (`process_slow`, or `decide` of XDP) borrows
    // the slot; other code borrows slot 0 only after the slow path has used its borrow for the last time. `decapsulate`
    // or `tunnel_error` borrows slot 1, never both for one packet. The kernel fills new maps with zeros, a valid
    // packet.
    Ok(unsafe { &mut *packet })
}

/// Names of service ports by id. Only the agent and its commands read these names. They are in a map so that they are
/// available while no agent runs.
#[btf_map]
pub(super) static SERVICE_NAMES: HashMap<u32, ServiceName, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

/// Names of endpoints by address, for the agent and its commands. The programs only check whether an address has a
/// name: fragments from an endpoint may belong to a Service.
#[btf_map]
pub(super) static ENDPOINT_NAMES: HashMap<Address, EndpointName, { capacity::ENDPOINT_NAMES }, NO_PREALLOC> =
    HashMap::new();
