//! What sockets were told. Names and layouts are an interface: see `lb_common` and docs/maps.md.

use aya_ebpf::{
    Global,
    btf_maps::{LruHashMap, SkStorage},
    macros::btf_map,
};
use lb_common::{Endpoint, SocketBackend, SocketConnection, SocketKey, capacity};

/// What connected sockets were connected to. It lives in the socket, so it takes no room of others and ends with it.
#[btf_map]
pub(super) static SOCKETS: SkStorage<SocketConnection> = SkStorage::new();

/// Where datagrams of sockets that are not connected go. An LRU map, as nobody says when such a socket is done with an
/// address; who is forgotten is balanced anew.
#[btf_map]
pub(super) static SOCKET_BACKENDS: LruHashMap<SocketKey, SocketBackend, { capacity::SOCKETS }> =
    LruHashMap::new();

/// Whom a UDP socket that is not connected believes to hear when a backend answers.
#[btf_map]
pub(super) static SOCKET_VIPS: LruHashMap<SocketKey, Endpoint, { capacity::SOCKETS }> = LruHashMap::new();

/// The connected UDP sockets of the node by their cookies, so that the agent finds those whose backend is gone. An LRU map
/// of its own: most live for one question to a DNS server, and nobody says when they end.
#[btf_map]
pub(super) static CONNECTED_SOCKETS: LruHashMap<u64, SocketConnection, { capacity::SOCKETS }> =
    LruHashMap::new();

/// The cookie of the node's network namespace; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
pub(super) static NODE_NETNS: Global<u64> = Global::new(0);

/// Whether sockets of other network namespaces are served too; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
pub(super) static SERVE_PODS: Global<u8> = Global::new(0);
