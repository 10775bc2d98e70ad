//! All maps of the data plane. Names and layouts are an interface: see `lb_common` and docs/maps.md.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray},
    macros::btf_map,
};
use lb_common::{
    Address, Affinity, AffinityKey, Backend, DeviceInfo, EndpointName, FragmentKey, FragmentPorts, Outcome,
    Service, ServiceKey, ServiceName, Settings, SourceRange, Vip, capacity,
    conntrack::{Flow, Tuple},
};
use lb_ebpf::parse::Packet;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Frontends: what a client speaks to → which backends serve it.
#[btf_map]
pub(super) static SERVICES: HashMap<ServiceKey, Service, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

/// Endpoints: an arena in which every service port owns one sorted, contiguous slice for each address family.
#[btf_map]
pub(super) static BACKENDS: Array<Backend, { capacity::BACKENDS }> = Array::new();

/// What schedulers choose from: an arena of places in slices of `BACKENDS`.
#[btf_map]
pub(super) static TABLES: Array<u32, { capacity::TABLES }> = Array::new();

/// Flows, an entry for each direction. Not an LRU map: a flood of new flows must not evict an established one. And with memory
/// for all of them from the beginning: a new flow would spend a half of its time on getting some.
#[btf_map]
pub(super) static CONNTRACK: HashMap<Tuple, Flow, { capacity::CONNTRACK }> = HashMap::new();

/// Ports of datagrams whose first fragment was translated.
#[btf_map]
pub(super) static FRAGMENTS: LruHashMap<FragmentKey, FragmentPorts, { capacity::FRAGMENTS }> =
    LruHashMap::new();

/// Backends of clients whose service has affinity. An LRU map: where there are too many clients, those that have not come
/// for the longest time are balanced anew.
#[btf_map]
pub(super) static AFFINITY: LruHashMap<AffinityKey, Affinity, { capacity::AFFINITY }> = LruHashMap::new();

/// What an address is where no port of it is a frontend.
#[btf_map]
pub(super) static VIPS: HashMap<Address, Vip, { capacity::VIPS }, NO_PREALLOC> = HashMap::new();

/// Who may use services that not everybody may use.
#[btf_map]
pub(super) static SOURCE_RANGES: LpmTrie<SourceRange, u32, { capacity::SOURCE_RANGES }, NO_PREALLOC> =
    LpmTrie::new();

/// Devices whose senders are clients inside the cluster, by interface index.
#[btf_map]
pub(super) static INSIDE_DEVICES: HashMap<u32, u32, { capacity::INSIDE_DEVICES }, NO_PREALLOC> =
    HashMap::new();

/// What packets may do past the stack, by interface index of the device where they would.
#[btf_map]
pub(super) static DEVICES: HashMap<u32, DeviceInfo, { capacity::DEVICES }, NO_PREALLOC> = HashMap::new();

/// What holds for every packet: two slots.
#[btf_map]
pub(super) static SETTINGS: Array<Settings, 2> = Array::new();

/// Which slot of `SETTINGS` counts.
#[btf_map]
pub(super) static SETTINGS_SLOT: Array<u32, 1> = Array::new();

/// Whether the programs of an earlier layout are on the same hooks: see [`lb_common::handover`].
#[btf_map]
pub(super) static HANDOVER: Array<u32, 1> = Array::new();

/// Packets by [`Outcome`].
#[btf_map]
pub(super) static STATS: PerCpuArray<u64, { Outcome::COUNT }> = PerCpuArray::new();

/// Room that the stack has not.
#[btf_map]
pub(super) static SCRATCH: PerCpuArray<Scratch, 1> = PerCpuArray::new();

/// Value of `SCRATCH`.
pub(super) struct Scratch {
    /// A flow that is to begin.
    pub(super) request: super::flow::create::Request,
    /// A flow that begins.
    pub(super) setup: super::flow::create::FlowSetup,
    /// Key of the flow that an ICMP error is about.
    pub(super) of_error: Tuple,
    /// The tunnel that the packet at hand came through.
    pub(super) tunnel: lb_ebpf::forward::tunnel::Tunnel,
    /// A route that is being looked up.
    pub(super) route: super::forward::route::Route,
    /// A checksum of SCTP that is being updated.
    pub(super) crc: lb_common::crc32c::Change,
    /// An ICMP message that is being built.
    pub(super) message: [u8; super::reject::MESSAGE],
}

/// The scratch room of this CPU. One user at a time: what takes it must not call another that does.
#[inline(always)]
pub(super) fn scratch() -> Result<&'static mut Scratch, Outcome> {
    let scratch = SCRATCH.get_ptr_mut(0).ok_or(Outcome::RewriteFailed)?;
    // SAFETY: the slot is of this CPU alone, and programs on these hooks run with bottom halves disabled, so that no
    // other of them can run here before this one is done.
    Ok(unsafe { &mut *scratch })
}

/// The packet that this CPU works on.
///
/// It lies in a map rather than on the stack because the verifier follows every value on the stack: there it would walk
/// the rest of the program once for each combination of what parsing can find out.
#[btf_map]
pub(super) static PACKET: PerCpuArray<Packet, 2> = PerCpuArray::new();

/// Room for the packet of this CPU.
#[inline(always)]
pub(super) fn packet() -> Result<&'static mut Packet, Outcome> {
    nth_packet(0)
}

/// Room for one in a tunnel.
#[inline(always)]
pub(super) fn inner_packet() -> Result<&'static mut Packet, Outcome> {
    nth_packet(1)
}

#[inline(always)]
fn nth_packet(slot: u32) -> Result<&'static mut Packet, Outcome> {
    let packet = PACKET.get_ptr_mut(slot).ok_or(Outcome::RewriteFailed)?;
    // SAFETY: as for `scratch`. The kernel fills new maps with zeros, which are a valid packet.
    Ok(unsafe { &mut *packet })
}

/// Names of service ports by id. No program reads them; they are part of the state that outlives the agent.
#[btf_map]
pub(super) static SERVICE_NAMES: HashMap<u32, ServiceName, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

/// Names of endpoints by address. No program reads them.
#[btf_map]
pub(super) static ENDPOINT_NAMES: HashMap<Address, EndpointName, { capacity::ENDPOINT_NAMES }, NO_PREALLOC> =
    HashMap::new();
