//! The maps of the socket hooks. Names and layouts are an interface: see `lb_common` and docs/maps.md.

use aya_ebpf::{
    Global,
    btf_maps::{LruHashMap, SkStorage},
    macros::btf_map,
};
use lb_common::{Endpoint, SocketBackend, SocketConnection, SocketKey, capacity};

/// The connection of a connected socket. It is stored in the socket itself, and is freed with it.
#[btf_map]
pub(super) static SOCKETS: SkStorage<SocketConnection> = SkStorage::new();

/// Backends of datagrams from unconnected sockets. An LRU map, because no hook reports when a process stops using an
/// address; a socket whose entry is evicted is rebalanced.
#[btf_map]
pub(super) static SOCKET_BACKENDS: LruHashMap<SocketKey, SocketBackend, { capacity::SOCKETS }> =
    LruHashMap::new();

/// For an unconnected UDP socket and a backend: the virtual address that the socket last used to send to the backend.
/// `recvmsg(2)` then reports this address, not the backend's, as the source of replies.
#[btf_map]
pub(super) static SOCKET_VIPS: LruHashMap<SocketKey, Endpoint, { capacity::SOCKETS }> = LruHashMap::new();

/// UDP sockets of the node that are connected to a Service, by their cookies. The agent looks in this map for sockets
/// whose backend is gone. An LRU map: if there are too many sockets, the map keeps those that connected last.
#[btf_map]
pub(super) static CONNECTED_SOCKETS: LruHashMap<u64, SocketConnection, { capacity::SOCKETS }> =
    LruHashMap::new();

/// The cookie of the node's network namespace; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
pub(super) static NODE_NETNS: Global<u64> = Global::new(0);

/// Whether the hooks also serve sockets of other network namespaces; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
pub(super) static SERVE_PODS: Global<u8> = Global::new(0);
