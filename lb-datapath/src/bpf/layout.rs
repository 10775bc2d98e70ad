//! The maps and programs of the BPF object, and the check that pinned maps have the expected types and sizes.
//!
//! aya reuses any map that is pinned under the expected name, and assumes that the map has the sizes that the object
//! states. A write to a map with larger values would then make the kernel read beyond our buffer. So every pin is
//! checked before it is used.

use std::{fmt, io, path::Path};

use aya::maps::{Map, MapData, MapError, MapInfo, MapType};
use lb_common::{
    Address, Affinity, AnnounceKey, Announcement, Backend, ConnectionLimits, DeviceInfo, DnsIntercept,
    Endpoint, EndpointName, FragmentKey, FragmentedDatagram, Heard, Outcome, Service, ServiceClient,
    ServiceKey, ServiceName, Settings, SocketBackend, SocketConnection, SocketCounter, SocketCounts,
    SocketKey, SourceRangeKey, Vip, capacity,
    conntrack::{Flow, Tuple},
    filter::Filter,
    flow_table::{Header, Slot},
    layout::Described,
    monitor,
};

use crate::{
    bpf::{description::Layout, sys},
    error::DatapathError,
};

/// Type of a map, sizes in bytes of its keys and values, and number of entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) kind: MapType,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) max_entries: u32,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, key_size, value_size, .. } = self;
        write!(f, "{kind:?} map with {key_size}-byte keys and {value_size}-byte values")
    }
}

impl Shape {
    const fn new<K, V>(kind: MapType, max_entries: usize) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "sizes of small structs and constants below 2^32"
        )]
        Self {
            kind,
            key_size: size_of::<K>() as u32,
            value_size: size_of::<V>() as u32,
            max_entries: max_entries as u32,
        }
    }

    /// The shape of the map that is pinned at `path`; `None` if nothing is pinned there.
    pub(crate) fn of_pin(path: &Path) -> Result<Option<Self>, DatapathError> {
        // The pin is opened first: the error of `MapInfo::from_pin` does not distinguish a missing pin from a forbidden
        // one.
        match sys::open_pin(path) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DatapathError::file("open the pinned map", path, error)),
        }
        let read = |error| DatapathError::file("inspect the pinned map", path, io::Error::other(error));
        let info = MapInfo::from_pin(path).map_err(read)?;
        Self::of(&info).map(Some).map_err(read)
    }

    /// The shape of an open map, as the kernel reports it.
    pub(crate) fn of(info: &MapInfo) -> Result<Self, MapError> {
        Ok(Self {
            kind: info.map_type()?,
            key_size: info.key_size(),
            value_size: info.value_size(),
            max_entries: info.max_entries(),
        })
    }

    /// Whether each key has one value of [`Self::value_size`] bytes: false for per-CPU maps, for storage in sockets,
    /// and for maps without keys.
    pub(crate) const fn has_single_values(&self) -> bool {
        use MapType::{Array, Hash, LpmTrie, LruHash};

        matches!(self.kind, Array | Hash | LpmTrie | LruHash) && self.key_size > 0 && self.value_size > 0
    }
}

/// What a pinned map must be like: name, type, sizes, and fields of keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapSpec {
    pub(crate) name: &'static str,
    pub(crate) shape: Shape,
    /// Returns the fields of the map's keys.
    pub(crate) key: fn() -> Layout,
    /// Returns the fields of the map's values.
    pub(crate) value: fn() -> Layout,
}

impl MapSpec {
    const fn new<K: Described, V: Described>(name: &'static str, kind: MapType, max_entries: usize) -> Self {
        let shape = Shape::new::<K, V>(kind, max_entries);
        Self { name, shape, key: Layout::of::<K>, value: Layout::of::<V> }
    }

    /// Whether the map is an array, in which every element always exists.
    pub(crate) fn is_array(&self) -> bool {
        self.shape.kind == MapType::Array
    }

    /// Opens the map pinned at `path` through aya, for types that [`crate::Table`] does not support.
    ///
    /// # Errors
    /// There is no such pin, or the map has another type or other sizes.
    pub(crate) fn open_by_aya(&self, path: &Path) -> Result<Map, DatapathError> {
        let found = Shape::of_pin(path)?.ok_or_else(|| DatapathError::Absent(path.to_owned()))?;
        self.check(path, &found)?;
        let failed = |error| DatapathError::file("open the pinned map", path, io::Error::other(error));
        Map::from_map_data(MapData::from_pin(path).map_err(failed)?).map_err(failed)
    }

    /// Returns an error if a pinned map has another type or other sizes. The number of entries may differ: the
    /// administrator chooses it.
    pub(crate) fn check(&self, path: &Path, found: &Shape) -> Result<(), DatapathError> {
        if (Shape { max_entries: self.shape.max_entries, ..*found }) == self.shape {
            return Ok(());
        }
        Err(DatapathError::Layout {
            path: path.to_owned(),
            found: found.to_string(),
            wanted: self.shape.to_string(),
        })
    }
}

pub(crate) const SERVICES: MapSpec =
    MapSpec::new::<ServiceKey, Service>("SERVICES", MapType::Hash, capacity::SERVICES);
pub(crate) const BACKENDS: MapSpec =
    MapSpec::new::<u32, Backend>("BACKENDS", MapType::Array, capacity::BACKENDS);
pub(crate) const TABLES: MapSpec = MapSpec::new::<u32, u32>("TABLES", MapType::Array, capacity::TABLES);
pub(crate) const ACTIVE_FLOWS: MapSpec =
    MapSpec::new::<u32, i64>("ACTIVE", MapType::Array, capacity::BACKENDS);
/// The flow table, see [`lb_common::flow_table`].
pub(crate) const FLOWS: MapSpec = MapSpec::new::<u32, Slot>("FLOWS", MapType::Array, capacity::FLOWS);
pub(crate) const FLOW_TABLE: MapSpec = MapSpec::new::<u32, Header>("FLOW_TABLE", MapType::Array, 1);
/// The overflow of the flow table, a hash map.
pub(crate) const CONNTRACK: MapSpec =
    MapSpec::new::<Tuple, Flow>("CONNTRACK", MapType::Hash, capacity::CONNTRACK);
/// The filter that programs read before they look up a packet's frontend or flow, see [`lb_common::filter`].
pub(crate) const FILTER: MapSpec = MapSpec::new::<u32, Filter>("FILTER", MapType::Array, 1);
pub(crate) const FRAGMENTS: MapSpec =
    MapSpec::new::<FragmentKey, FragmentedDatagram>("FRAGMENTS", MapType::LruHash, capacity::FRAGMENTS);
pub(crate) const AFFINITY: MapSpec =
    MapSpec::new::<ServiceClient, Affinity>("AFFINITY", MapType::LruHash, capacity::AFFINITY);
pub(crate) const LIMITS: MapSpec =
    MapSpec::new::<u32, ConnectionLimits>("LIMITS", MapType::Hash, capacity::LIMITS);
/// The buckets of `LIMITS`: each value is the time (ns of the coarse clock) at which the bucket will be full again.
pub(crate) const LIMIT_BUCKETS: MapSpec =
    MapSpec::new::<ServiceClient, u64>("LIMIT_BUCKETS", MapType::LruHash, capacity::LIMIT_BUCKETS);
pub(crate) const STATS: MapSpec = MapSpec::new::<u32, u64>("STATS", MapType::PerCpuArray, Outcome::COUNT);
pub(crate) const SERVICE_NAMES: MapSpec =
    MapSpec::new::<u32, ServiceName>("SERVICE_NAMES", MapType::Hash, capacity::SERVICES);
pub(crate) const ENDPOINT_NAMES: MapSpec =
    MapSpec::new::<Address, EndpointName>("ENDPOINT_NAMES", MapType::Hash, capacity::ENDPOINT_NAMES);

pub(crate) const VIPS: MapSpec = MapSpec::new::<Address, Vip>("VIPS", MapType::Hash, capacity::VIPS);
pub(crate) const SOURCE_RANGES: MapSpec =
    MapSpec::new::<SourceRangeKey, u32>("SOURCE_RANGES", MapType::LpmTrie, capacity::SOURCE_RANGES);
pub(crate) const INSIDE_DEVICES: MapSpec =
    MapSpec::new::<u32, u32>("INSIDE_DEVICES", MapType::Hash, capacity::INSIDE_DEVICES);
pub(crate) const PEERS: MapSpec = MapSpec::new::<Address, u32>("PEERS", MapType::Hash, capacity::PEERS);
pub(crate) const DEVICES: MapSpec =
    MapSpec::new::<u32, DeviceInfo>("DEVICES", MapType::Hash, capacity::DEVICES);
pub(crate) const DNS_INTERCEPT: MapSpec =
    MapSpec::new::<ServiceKey, DnsIntercept>("DNS_INTERCEPT", MapType::Hash, capacity::DNS_INTERCEPT);
pub(crate) const SETTINGS: MapSpec = MapSpec::new::<u32, Settings>("SETTINGS", MapType::Array, 2);
pub(crate) const SETTINGS_SLOT: MapSpec = MapSpec::new::<u32, u32>("SETTINGS_SLOT", MapType::Array, 1);
/// Which of two data planes creates flows during an upgrade, see [`lb_common::handover`].
pub(crate) const HANDOVER: MapSpec = MapSpec::new::<u32, u32>("HANDOVER", MapType::Array, 1);

/// For each connected socket, its VIP and backend. The kernel stores each entry in its socket, so the map has no
/// maximum number of entries.
pub(crate) const SOCKETS: MapSpec = MapSpec::new::<u32, SocketConnection>("SOCKETS", MapType::SkStorage, 0);
pub(crate) const SOCKET_BACKENDS: MapSpec =
    MapSpec::new::<SocketKey, SocketBackend>("SOCKET_BACKENDS", MapType::LruHash, capacity::SOCKETS);
pub(crate) const SOCKET_VIPS: MapSpec =
    MapSpec::new::<SocketKey, Endpoint>("SOCKET_VIPS", MapType::LruHash, capacity::SOCKETS);

pub(crate) const CONNECTED_SOCKETS: MapSpec =
    MapSpec::new::<u64, SocketConnection>("CONNECTED_SOCKETS", MapType::LruHash, capacity::SOCKETS);

/// Backends that have left too many SYNs of a client unanswered: the keys of the map. The values have no meaning.
pub(crate) const UNANSWERED: MapSpec =
    MapSpec::new::<Endpoint, u32>("UNANSWERED", MapType::LruHash, capacity::UNANSWERED);

/// For each backend, how many connections of sockets to it have begun, and how many have ended.
pub(crate) const SOCKET_COUNTS: MapSpec =
    MapSpec::new::<SocketCounter, SocketCounts>("SOCKET_COUNTS", MapType::Hash, capacity::SOCKET_COUNTS);
/// For each connected socket, the key in `SOCKET_COUNTS` under which its connection is counted. Stored in the sockets,
/// like `SOCKETS`.
pub(crate) const COUNTED_SOCKETS: MapSpec =
    MapSpec::new::<u32, SocketCounter>("COUNTED_SOCKETS", MapType::SkStorage, 0);

/// A ring buffer has no keys or values; its `max_entries` is its size in bytes.
pub(crate) const EVENTS: MapSpec = MapSpec::new::<(), ()>("EVENTS", MapType::RingBuf, capacity::EVENTS);
pub(crate) const MONITOR: MapSpec = MapSpec::new::<u32, u64>("MONITOR", MapType::Array, monitor::SIZE);

pub(crate) const ANNOUNCED: MapSpec =
    MapSpec::new::<AnnounceKey, Announcement>("ANNOUNCED", MapType::Hash, capacity::ANNOUNCED);
pub(crate) const ANNOUNCE_HEARD: MapSpec =
    MapSpec::new::<AnnounceKey, Heard>("ANNOUNCE_HEARD", MapType::Hash, capacity::ANNOUNCED);

/// Name of the pinned map that describes all others for agents of other versions, see `state/handover.rs`.
pub(crate) const DESCRIPTION: &str = "LAYOUT";

/// All pinned maps except [`DESCRIPTION`] and `CONSTANTS` (see `bpf/globals.rs`).
pub(crate) const MAPS: [MapSpec; 35] = [
    SERVICES,
    BACKENDS,
    TABLES,
    ACTIVE_FLOWS,
    FLOWS,
    FLOW_TABLE,
    CONNTRACK,
    FILTER,
    AFFINITY,
    LIMITS,
    LIMIT_BUCKETS,
    UNANSWERED,
    FRAGMENTS,
    STATS,
    SERVICE_NAMES,
    ENDPOINT_NAMES,
    VIPS,
    SOURCE_RANGES,
    INSIDE_DEVICES,
    PEERS,
    DEVICES,
    DNS_INTERCEPT,
    SETTINGS,
    SETTINGS_SLOT,
    HANDOVER,
    SOCKETS,
    SOCKET_BACKENDS,
    SOCKET_VIPS,
    CONNECTED_SOCKETS,
    SOCKET_COUNTS,
    COUNTED_SOCKETS,
    EVENTS,
    MONITOR,
    ANNOUNCED,
    ANNOUNCE_HEARD,
];

/// Names of the tc programs for devices with an Ethernet header: ingress, egress. Every agent loads them.
pub(crate) const PROGRAMS: [&str; 2] = ["tc_ingress", "tc_egress"];

/// Names of the tc programs for devices without a link-layer header: ingress, egress.
pub(crate) const PROGRAMS_WITHOUT_LINK_LAYER: [&str; 2] = ["tc_ingress_l3", "tc_egress_l3"];

/// Names of the tc programs for the catch device: ingress, egress.
pub(crate) const CATCH_PROGRAMS: [&str; 2] = ["tc_ingress", "tc_catch"];

/// Names of the XDP programs: for frames of drivers (native mode), and for skbs (generic mode).
pub(crate) const XDP_PROGRAMS: [&str; 2] = ["xdp_native", "xdp_generic"];

/// Name of the tc ingress program that answers for announced addresses.
pub(crate) const ANNOUNCE_PROGRAM: &str = "tc_announce";

/// Names of the programs that are loaded only when a device needs them.
pub(crate) const ON_DEMAND: [&str; 6] =
    ["tc_ingress_l3", "tc_egress_l3", "tc_catch", "xdp_native", "xdp_generic", ANNOUNCE_PROGRAM];

/// A program that is attached to a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketHook {
    pub(crate) program: &'static str,
    /// Attach type, from `enum bpf_attach_type`.
    pub(crate) attach_type: u32,
}

impl SocketHook {
    const fn new(program: &'static str, attach_type: u32) -> Self {
        Self { program, attach_type }
    }
}

/// The programs for system calls of sockets, in the order in which they are attached: replies must be translated, and
/// ends of connections counted, before the first socket is connected to a backend.
pub(crate) const SOCKET_HOOKS: [SocketHook; 9] = [
    SocketHook::new("sock_recvmsg4", 19),
    SocketHook::new("sock_recvmsg6", 20),
    SocketHook::new("sock_peername4", 29),
    SocketHook::new("sock_peername6", 30),
    SocketHook::new("sock_release", 34),
    SocketHook::new("sock_sendmsg4", 14),
    SocketHook::new("sock_sendmsg6", 15),
    SocketHook::new("sock_connect4", 10),
    SocketHook::new("sock_connect6", 11),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_map_may_differ_in_capacity_but_not_in_sizes() {
        let path = Path::new("/sys/fs/bpf/lb/v6/SERVICES");
        let wanted = SERVICES.shape;
        assert!(SERVICES.check(path, &Shape { max_entries: 7, ..wanted }).is_ok());
        let error = SERVICES.check(path, &Shape { value_size: 16, ..wanted }).unwrap_err().to_string();
        for part in ["SERVICES", "20-byte keys and 16-byte values", "48-byte values", "lb-agent cleanup"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
        assert!(SERVICES.check(path, &Shape { kind: MapType::LruHash, ..wanted }).is_err());
    }
}
