//! The interface between the BPF programs and the agent: the layout of the maps that both use, and the pure algorithms
//! that both sides run.
//!
//! Every struct that is a map key or value is `repr(C)` without padding (`bytemuck::Pod` rejects padding at compile
//! time), and an assertion checks its size. A change of its layout needs a new [`LAYOUT_VERSION`].
#![no_std]
#![forbid(unsafe_op_in_unsafe_fn)]

#[cfg(test)]
extern crate std;

mod address;
mod announce;
pub mod checksum;
pub mod conntrack;
pub mod crc32c;
mod device;
pub mod dns;
mod event;
pub mod filter;
mod flow_event;
pub mod flow_table;
mod fragment;
pub mod hash;
pub mod layout;
mod limit;
mod names;
#[cfg(feature = "next-layout")]
mod next_layout;
mod outcome;
mod scheduler;
mod service;
mod settings;
mod socket;

pub use address::Address;
pub use announce::{AnnounceKey, Announcement, Heard};
pub use device::{DeviceInfo, device_flags};
pub use dns::DnsIntercept;
pub use event::{Choice, Event, EventHook, monitor};
pub use flow_event::{FlowEvent, FlowEventKind};
pub use fragment::{FragmentKey, FragmentedDatagram, Span};
pub use limit::{ConnectionLimits, ConnectionRate};
pub use names::{EndpointName, NAME_SIZE, ServiceName, ZONE_SIZE, from_fixed, to_fixed};
pub use outcome::{Outcome, Verdict};
pub use scheduler::{Scheduler, UnknownScheduler};
pub use service::{
    Affinity, Backend, FrontendKind, Service, ServiceClient, ServiceKey, SourceRange, SourceRangeKey, Vip,
    backend_flags, service_flags, vip_flags,
};
pub use settings::{MAX_NETWORKS, Network, Networks, Settings, settings_flags};
pub use socket::{Endpoint, SocketBackend, SocketConnection, SocketCounter, SocketCounts, SocketKey};

/// Version of the layout of all pinned maps; the `N` of the pin folder `lb/vN`. The feature `next-layout` builds a
/// different layout, for tests of upgrades.
pub const LAYOUT_VERSION: u32 = 8 + cfg!(feature = "next-layout") as u32;

/// IP protocol numbers (IANA "Assigned Internet Protocol Numbers") that the data plane handles.
pub mod protocol {
    /// ICMP for IPv4, RFC 792.
    pub const ICMP: u8 = 1;
    /// IPv4 in IP, a tunnel: RFC 2003.
    pub const IPIP: u8 = 4;
    /// TCP, RFC 9293.
    pub const TCP: u8 = 6;
    /// UDP, RFC 768.
    pub const UDP: u8 = 17;
    /// IPv6 in IP, a tunnel: RFC 2473.
    pub const IPV6: u8 = 41;
    /// ICMP for IPv6, RFC 4443.
    pub const ICMPV6: u8 = 58;
    /// SCTP, RFC 9260.
    pub const SCTP: u8 = 132;
}

/// The UDP port of GUE (draft-ietf-intarea-gue §2), IANA "gue".
pub const GUE_PORT: u16 = 6080;

/// Values of the only element of `HANDOVER`: whether programs of an earlier map layout are still attached to the same
/// hooks, behind the programs of this layout. The earlier programs get every packet that the programs of this layout
/// pass on.
pub mod handover {
    /// No program of an earlier layout is attached.
    pub const OVER: u32 = 0;
    /// The earlier programs are attached to all hooks, the programs of this layout perhaps only to some. Only the
    /// earlier programs create flows: they may already have an entry for a flow that is new to this layout.
    pub const EARLIER_CREATES_FLOWS: u32 = 1;
    /// Programs of both layouts are attached to all hooks. The programs of this layout create a flow for a SYN, an INIT
    /// or a UDP datagram. If a connection has no entry in this layout, they leave packets in the middle of the
    /// connection to the earlier programs.
    pub const CREATES_FLOWS: u32 = 2;
}

/// Default sizes of the maps, in entries (`EVENTS` and `FLOW_EVENTS`: in bytes). The agent may override them when it
/// creates the maps. Most comments say how much kernel memory an entry takes: "at start" is what the kernel allocates
/// when the agent creates the map; the rest is allocated when the entry is inserted.
pub mod capacity {
    /// Frontends (`SERVICES`) and names of service ports (`SERVICE_NAMES`): 16 bytes each at start, the rest on
    /// insertion.
    pub const SERVICES: usize = 131_072;
    /// Slots of the backend arena (`BACKENDS`), all allocated at start, 32 bytes each as the kernel rounds them; and
    /// slots of `ACTIVE`, 8 bytes each.
    pub const BACKENDS: usize = 262_144;
    /// Slots of the arena of scheduler tables (`TABLES`), all allocated at start: 8 bytes each, as the kernel rounds
    /// them.
    pub const TABLES: usize = 524_288;
    /// Slots of the flow table (`FLOWS`), all allocated at start, 128 bytes each: see
    /// [`flow_slots`](super::conntrack::flow_slots).
    pub const FLOWS: usize = 524_288;
    /// Entries of `CONNTRACK`, the overflow of the flow table: 16 bytes each at start, the rest on insertion. The
    /// overflow alone can hold 131,072 connections with two entries each.
    pub const CONNTRACK: usize = 262_144;
    /// Addresses of services (`VIPS`): 16 bytes each at start, the rest on insertion. Services have no more addresses
    /// than frontends, so the size is that of `SERVICES`.
    pub const VIPS: usize = SERVICES;
    /// The smallest size of `VIPS`, which also holds the addresses of the node.
    pub const MIN_VIPS: u32 = 4_096;
    /// Entries of `VIPS` that are reserved for the addresses of the node: services do not use them.
    pub const OWN_VIPS: u32 = 1_024;
    /// Source ranges of all service ports together (`SOURCE_RANGES`); only existing entries use memory.
    pub const SOURCE_RANGES: usize = 262_144;
    /// Devices through which packets of internal clients enter (`INSIDE_DEVICES`).
    pub const INSIDE_DEVICES: usize = 4_096;
    /// Addresses of other nodes that may send tunnelled packets (`PEERS`): 16 bytes each at start, the rest on
    /// insertion. Enough for 8,192 nodes with an address of each family.
    pub const PEERS: usize = 16_384;
    /// Endpoints of node-local DNS (`DNS_INTERCEPT`): for each cluster IP of the DNS Service and each protocol, one for
    /// queries and one for answers.
    pub const DNS_INTERCEPT: usize = 64;
    /// Devices with programs (`DEVICES`).
    pub const DEVICES: usize = 4_096;
    /// Next hops of packets that bypass the stack (`NEXT_HOPS`), for each CPU; a power of two. An entry takes 80 bytes,
    /// so the map takes 160 KiB of the cache of each CPU, and 20 MiB on a machine with 128 CPUs. If a CPU sends to more
    /// destinations within a tick, it looks up some routes more than once.
    pub const NEXT_HOPS: usize = 2_048;
    /// Addresses that the node announces (`ANNOUNCED`, `ANNOUNCE_HEARD`), each counted once for every device: 16 bytes
    /// each at start, the rest on insertion.
    pub const ANNOUNCED: usize = 8_192;
    /// Clients of services with affinity (`AFFINITY`), all allocated at start: 112 bytes each.
    pub const AFFINITY: usize = 32_768;
    /// Service ports with limits on new connections (`LIMITS`): 16 bytes each at start, the rest on insertion.
    pub const LIMITS: usize = 16_384;
    /// Token buckets for the limits on new connections (`LIMIT_BUCKETS`), 96 bytes each, all allocated at start. With
    /// many CPUs the map has more buckets, see [`LRU_PER_CPU`].
    pub const LIMIT_BUCKETS: usize = 8_192;
    /// Fragmented datagrams in transit (`FRAGMENTS`), all entries allocated at start. With many CPUs the map has more
    /// entries, see [`LRU_PER_CPU`].
    pub const FRAGMENTS: usize = 8_192;
    /// Pairs of an unconnected UDP socket and a virtual address that it sends to (`SOCKET_BACKENDS`, `SOCKET_VIPS`),
    /// and connected UDP sockets of the node (`CONNECTED_SOCKETS`), all allocated at start; more with many CPUs, see
    /// [`LRU_PER_CPU`].
    pub const SOCKETS: usize = 16_384;
    /// Backends that left a client's SYNs unanswered (`UNANSWERED`), all allocated at start; more with many CPUs, see
    /// [`LRU_PER_CPU`].
    pub const UNANSWERED: usize = 1_024;
    /// Backends that sockets of processes are connected to, counted once for each service port (`SOCKET_COUNTS`): 16
    /// bytes each at start, the rest on insertion.
    pub const SOCKET_COUNTS: usize = 16_384;
    /// The minimum size of `FRAGMENTS`, `LIMIT_BUCKETS`, `UNANSWERED` and the maps of sockets, in entries for each CPU.
    ///
    /// Before Linux 6.16 each CPU reserves 128 free entries of an LRU map at a time (kernel/bpf/bpf_lru_list.c,
    /// `LOCAL_FREE_TARGET`). A map with fewer than 128 entries for each CPU evicts entries in use while other CPUs have
    /// free ones. This minimum is 2 × 128.
    pub const LRU_PER_CPU: u32 = 256;
    /// Size in bytes of the ring buffer of events (`EVENTS`), all allocated at start: room for 9,000 events.
    pub const EVENTS: usize = 1 << 20;
    /// Size in bytes of the ring buffer of the flow log (`FLOW_EVENTS`), all allocated if the agent keeps a flow log.
    /// There is room for 123,000 events: two seconds at 20,000 connections per second with three events each.
    pub const FLOW_EVENTS: u32 = 1 << 24;
    /// Addresses of endpoints (`ENDPOINT_NAMES`): 16 bytes each at start, the rest on insertion. Each endpoint also has
    /// a slot of `BACKENDS`, so the sizes are equal.
    pub const ENDPOINT_NAMES: usize = BACKENDS;
}
