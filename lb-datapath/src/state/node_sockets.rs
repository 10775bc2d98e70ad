//! Finds and destroys sockets of the node that the socket programs have connected to a backend in `connect(2)`.
//! Otherwise UDP sockets would send datagrams to removed backends without an error, and TCP connections would outlive
//! the timeouts of their Service.
//!
//! sock_diag(7) lists sockets with their cookies, and destroys them. For TCP it also shows what the socket programs
//! have stored in a socket (`COUNTED_SOCKETS`); for UDP it does not (`inet_sk_diag_fill` in net/ipv4/inet_diag.c), so
//! the programs note the cookies of UDP sockets in `CONNECTED_SOCKETS`.
//!
//! After the kernel has destroyed a socket, the application's next system call fails: reads with ECONNABORTED, writes
//! with EDESTADDRREQ or EPIPE. The peer of a TCP connection gets a RST.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    time::Duration,
};

use bytemuck::{Pod, Zeroable, pod_read_unaligned};
use lb_common::{Address, Endpoint, SocketConnection, SocketCounter, protocol};
use netlink_packet_core::{
    DecodeError, Emitable as _, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable,
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    net::{
        attribute::{Attribute, attributes, value},
        netlink::{Message, Netlink},
    },
};

/// Numbers from include/uapi/linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const REQUESTED_STORAGE: u16 = 1;
const STORED_VALUE: u16 = 3;
/// Numbers from include/uapi/linux/inet_diag.h: attributes of a request, and of an answer.
const REQUEST_STORAGES: u16 = 2;
const STORAGES: u16 = 20;
const INFO: u16 = 2;
/// Bit of a request for the attribute [`INFO`].
const WITH_INFO: u8 = 1 << (INFO - 1);
/// States from include/net/tcp_states.h. Connected UDP sockets also have `TCP_ESTABLISHED`.
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
/// The states of the sockets that a request lists, as a mask: connecting or connected, but not closed by both sides. (A
/// connected UDP socket is `ESTABLISHED`.)
const CONNECTED: u32 = 1 << ESTABLISHED | 1 << SYN_SENT | 1 << FIN_WAIT1 | 1 << FIN_WAIT2 | 1 << CLOSE_WAIT;
/// The wildcard `INET_DIAG_NOCOOKIE`.
const ANY_COOKIE: u64 = u64::MAX;
/// Offset in `struct tcp_info` of `tcpi_last_data_sent`, the first of four times (32 bits each, in milliseconds): since
/// data was sent, since an ACK was sent (always 0), since data was received, since an ACK was received.
const LAST_DATA_SENT: usize = 44;

/// The address families `AF_INET` and `AF_INET6`, in one byte.
const IPV4: u8 = 2;
const IPV6: u8 = 10;

/// Identifies a socket: `struct inet_diag_sockid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct SocketId {
    /// Local port in network byte order.
    local_port: u16,
    /// Remote port in network byte order.
    remote_port: u16,
    /// Local address in network byte order; IPv4 uses only the first word.
    local: [u32; 4],
    remote: [u32; 4],
    device: u32,
    cookie: [u32; 2],
}

/// A request about sockets: `struct inet_diag_req_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DiagRequest {
    family: u8,
    protocol: u8,
    extensions: u8,
    zero: u8,
    /// Requested socket states, one bit for each.
    states: u32,
    id: SocketId,
}

/// An answer about a socket, without attributes: `struct inet_diag_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DiagMessage {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    send_queue: u32,
    user: u32,
    inode: u32,
}

/// Messages of sock_diag: requests, and answers.
#[derive(Clone, Debug)]
enum Diag {
    /// A request to list connected sockets of this address family and protocol. TCP sockets come with the times since
    /// their last packets, and with their values in the socket storage map that has the file descriptor `storage`.
    List { family: u8, protocol: u8, storage: i32 },
    /// A request to destroy a socket.
    Destroy { family: u8, protocol: u8, id: SocketId },
    /// An answer.
    Socket(NodeSocket),
}

/// A connected socket of the node.
#[derive(Clone, Copy, Debug)]
struct NodeSocket {
    family: u8,
    id: SocketId,
    /// The value of a TCP socket in `COUNTED_SOCKETS`, which the socket programs write.
    counter: Option<SocketCounter>,
    /// For how long a TCP connection has neither sent nor received anything.
    idle: Option<Duration>,
}

impl NodeSocket {
    /// The socket's cookie, as `bpf_get_socket_cookie` returns it.
    fn cookie(&self) -> u64 {
        let [low, high] = self.id.cookie;
        u64::from(high) << 32 | u64::from(low)
    }

    /// The remote address and port of the socket.
    fn remote(&self) -> Endpoint {
        let SocketId { remote, remote_port, .. } = self.id;
        let [v4, ..] = remote;
        let address =
            if self.family == IPV4 { Address::from_v4_word(v4) } else { Address::from_words(remote) };
        Endpoint::new(address, u16::from_be(remote_port))
    }

    /// The Service connection of a TCP socket; `None` if it is connected to no Service.
    fn service_connection(&self) -> Option<ServiceConnection> {
        let SocketCounter { service, backend, .. } = self.counter?;
        (backend == self.remote()).then_some(ServiceConnection { service, backend, idle: self.idle })
    }
}

/// A TCP connection of the node to a backend of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceConnection {
    /// Id of the service port.
    pub service: u32,
    /// Address and port of the backend.
    pub backend: Endpoint,
    /// For how long the connection has neither sent nor received anything; `None` if the kernel does not report it.
    pub idle: Option<Duration>,
}

impl Diag {
    fn attributes(&self) -> Vec<Attribute> {
        match self {
            Self::List { storage, protocol: protocol::TCP, .. } => {
                let map = Attribute::new(REQUESTED_STORAGE, &storage.to_ne_bytes());
                vec![Attribute::containing(REQUEST_STORAGES, &[map])]
            }
            Self::List { .. } | Self::Destroy { .. } | Self::Socket(_) => Vec::new(),
        }
    }

    fn request(&self) -> DiagRequest {
        let (family, protocol, extensions, states, id) = match *self {
            Self::List { family, protocol, .. } => {
                let extensions = if protocol == protocol::TCP { WITH_INFO } else { 0 };
                (family, protocol, extensions, CONNECTED, SocketId::zeroed())
            }
            Self::Destroy { family, protocol, id } => (family, protocol, 0, u32::MAX, id),
            Self::Socket(NodeSocket { family, id, .. }) => (family, 0, 0, u32::MAX, id),
        };
        DiagRequest { family, protocol, extensions, zero: 0, states, id }
    }
}

impl NetlinkSerializable for Diag {
    fn message_type(&self) -> u16 {
        match self {
            Self::List { .. } | Self::Socket(_) => SOCK_DIAG_BY_FAMILY,
            Self::Destroy { .. } => SOCK_DESTROY,
        }
    }

    fn buffer_len(&self) -> usize {
        size_of::<DiagRequest>() + self.attributes().as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let (request, rest) = buffer.split_at_mut(size_of::<DiagRequest>());
        request.copy_from_slice(bytemuck::bytes_of(&self.request()));
        self.attributes().as_slice().emit(rest);
    }
}

impl NetlinkDeserializable for Diag {
    type Error = DecodeError;

    fn deserialize(_header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let (answer, rest) = payload
            .split_first_chunk::<{ size_of::<DiagMessage>() }>()
            .ok_or_else(|| DecodeError::from("a socket message that is too short"))?;
        let DiagMessage { family, state, id, .. } = pod_read_unaligned(answer);
        let rest = attributes(rest)?;
        // In SYN_SENT the kernel has no time of a last packet yet, and `INFO` has the times since the machine started.
        let info = rest.iter().find(|attribute| attribute.kind == INFO && state != SYN_SENT);
        Ok(Self::Socket(NodeSocket {
            family,
            id,
            counter: stored_counter(&rest)?,
            idle: info.and_then(idle),
        }))
    }
}

/// The value of a socket in the requested map; `None` if the socket has no value of this size.
fn stored_counter(attributes_of_socket: &[Attribute]) -> Result<Option<SocketCounter>, DecodeError> {
    for storages in attributes_of_socket.iter().filter(|attribute| attribute.kind == STORAGES) {
        for storage in attributes(&storages.value)? {
            let counter = value::<{ size_of::<SocketCounter>() }>(&attributes(&storage.value)?, STORED_VALUE);
            if let Some(counter) = counter {
                return Ok(Some(pod_read_unaligned(&counter)));
            }
        }
    }
    Ok(None)
}

/// The shortest of the times since a TCP socket has sent or received something, from `struct tcp_info`; `None` if the
/// attribute has no such fields.
fn idle(info: &Attribute) -> Option<Duration> {
    let at = |field: usize| {
        let bytes = info.value.get(LAST_DATA_SENT + 4 * field..)?.first_chunk::<4>()?;
        Some(u32::from_ne_bytes(*bytes))
    };
    let last = [at(0)?, at(2)?, at(3)?].into_iter().min()?;
    Some(Duration::from_millis(last.into()))
}

impl Message for Diag {
    const PROTOCOL: isize = NETLINK_SOCK_DIAG;
}

/// Finds and destroys sockets of this network namespace that are connected to a Service.
#[derive(Clone, Debug)]
pub struct NodeSockets {
    udp: Table<u64, SocketConnection>,
    counted: Table<u32, SocketCounter>,
    /// Whether the socket programs serve the sockets of this namespace.
    are_served: bool,
}

impl NodeSockets {
    pub(crate) fn open(folder: &Folder, are_served: bool) -> Result<Self, DatapathError> {
        let (udp, counted) = (&layout::CONNECTED_SOCKETS, &layout::COUNTED_SOCKETS);
        Ok(Self {
            udp: Table::open(udp, &folder.map(udp.name))?,
            counted: Table::open(counted, &folder.map(counted.name))?,
            are_served,
        })
    }

    /// Destroys the UDP sockets for which `is_stale` returns true, given the virtual address and the peer. Returns the
    /// number of destroyed sockets. The virtual address is `None` for a socket that the socket programs have connected
    /// to no backend, because its peer was no virtual address when the process connected it. If the programs do not
    /// serve this network namespace, the function skips such sockets.
    ///
    /// # Errors
    /// The map cannot be read, the kernel fails to list sockets, or does not destroy a socket. In the last case the
    /// function still destroys the other sockets. (If the kernel lacks socket diagnosis for the protocol, the function
    /// destroys nothing and returns no error.)
    pub fn destroy_udp(
        &self,
        is_stale: impl Fn(Option<&Endpoint>, &Endpoint) -> bool,
    ) -> Result<usize, DatapathError> {
        let mut destroyed = Vec::new();
        let why = |socket: &NodeSocket| {
            let peer = socket.remote();
            // The process may have connected the socket to another address since.
            let recorded = self.udp.get(&socket.cookie())?.filter(|recorded| recorded.backend == peer);
            let vip = recorded.map(|recorded| recorded.vip);
            let is_known = vip.is_some() || self.are_served;
            Ok((is_known && is_stale(vip.as_ref(), &peer)).then_some(()))
        };
        self.destroy(protocol::UDP, why, &mut destroyed)?;
        Ok(destroyed.len())
    }

    /// Destroys the TCP sockets for which `why` gives a reason. Adds the reason of each destroyed socket to
    /// `destroyed`, even if the function fails to destroy others.
    ///
    /// # Errors
    /// As [`Self::destroy_udp`].
    pub fn destroy_tcp<R>(
        &self,
        mut why: impl FnMut(&ServiceConnection) -> Option<R>,
        destroyed: &mut Vec<R>,
    ) -> Result<(), DatapathError> {
        let why = |socket: &NodeSocket| Ok(socket.service_connection().and_then(|it| why(&it)));
        self.destroy(protocol::TCP, why, destroyed)
    }

    fn destroy<R>(
        &self,
        protocol: u8,
        mut why: impl FnMut(&NodeSocket) -> Result<Option<R>, DatapathError>,
        destroyed: &mut Vec<R>,
    ) -> Result<(), DatapathError> {
        let failed = |action| move |error| DatapathError::netlink(action, error);
        let mut netlink = Netlink::open().map_err(failed("open a socket for socket diagnosis"))?;
        let storage = self.counted.fd().as_raw_fd();
        let mut refused = None;
        for family in [IPV4, IPV6] {
            let list = Diag::List { family, protocol, storage };
            let answers = match netlink.dump(&list) {
                // The kernel cannot list sockets of this protocol; `lb-agent check` says so.
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                answers => answers.map_err(failed("list sockets"))?,
            };
            for message in answers {
                let Diag::Socket(socket) = message else { continue };
                let Some(reason) = why(&socket)? else { continue };
                match destroy(&mut netlink, family, protocol, socket.id) {
                    Ok(was_there) => destroyed.extend(was_there.then_some(reason)),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        refused.map_or(Ok(()), |error| Err(failed("destroy a socket")(error)))
    }
}

/// Destroys a socket. Returns whether the socket still existed.
fn destroy(netlink: &mut Netlink<Diag>, family: u8, protocol: u8, id: SocketId) -> io::Result<bool> {
    match netlink.execute(Diag::Destroy { family, protocol, id }, 0) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates and tries to destroy a UDP socket and a TCP socket of this process. Fails if the kernel lacks
/// `CONFIG_INET_UDP_DIAG`, `CONFIG_INET_TCP_DIAG` or `CONFIG_INET_DIAG_DESTROY`, or the process lacks CAP_NET_ADMIN.
pub(crate) fn try_destroy() -> io::Result<()> {
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    udp.connect(udp.local_addr()?)?;
    try_destroy_one(protocol::UDP, udp.local_addr()?.port(), udp.local_addr()?.port())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let tcp = TcpStream::connect(listener.local_addr()?)?;
    try_destroy_one(protocol::TCP, tcp.local_addr()?.port(), tcp.peer_addr()?.port())
}

/// Tries to destroy a connected socket with these ports on 127.0.0.1.
fn try_destroy_one(protocol: u8, local_port: u16, remote_port: u16) -> io::Result<()> {
    let address = [u32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets()), 0, 0, 0];
    let id = SocketId {
        local_port: local_port.to_be(),
        remote_port: remote_port.to_be(),
        local: address,
        remote: address,
        device: 0,
        cookie: bytemuck::must_cast(ANY_COOKIE),
    };
    if destroy(&mut Netlink::open()?, IPV4, protocol, id)? {
        Ok(())
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::*;

    fn remote(text: &str) -> Endpoint {
        let remote: SocketAddr = text.parse().unwrap();
        Endpoint::new(remote.ip().into(), remote.port())
    }

    fn answer(family: u8, remote: [u32; 4], more: &[Attribute]) -> Vec<u8> {
        let mut answer = DiagMessage { family, ..DiagMessage::zeroed() };
        answer.id = SocketId { remote_port: 5353_u16.to_be(), remote, cookie: [7, 1], ..SocketId::zeroed() };
        let mut rest = vec![0; more.buffer_len()];
        more.emit(&mut rest);
        [bytemuck::bytes_of(&answer), &rest].concat()
    }

    fn parse(payload: &[u8]) -> NodeSocket {
        match Diag::deserialize(&NetlinkHeader::default(), payload).unwrap() {
            Diag::Socket(socket) => socket,
            other @ (Diag::List { .. } | Diag::Destroy { .. }) => panic!("{other:?}"),
        }
    }

    fn stored(value: &[u8]) -> Attribute {
        const STORAGE: u16 = 1;
        const MAP_ID: u16 = 2;
        let parts = [Attribute::new(MAP_ID, &[1, 0, 0, 0]), Attribute::new(STORED_VALUE, value)];
        Attribute::containing(STORAGES, &[Attribute::containing(STORAGE, &parts)])
    }

    #[test]
    fn answer_gives_cookie_and_remote_endpoint() {
        let v4 = [u32::from_ne_bytes([10, 1, 0, 5]), 0, 0, 0];
        let v6: IpAddr = "2001:db8::5".parse().unwrap();
        let mapped = Address::from_v4([10, 1, 0, 5]).words();
        for (family, words, expected) in [
            (IPV4, v4, "10.1.0.5:5353"),
            (IPV6, mapped, "10.1.0.5:5353"),
            (IPV6, Address::from(v6).words(), "[2001:db8::5]:5353"),
        ] {
            let socket = parse(&answer(family, words, &[]));
            assert_eq!((socket.cookie(), socket.remote()), (0x1_0000_0007, remote(expected)));
        }
    }

    #[test]
    fn stored_counter_counts_only_for_the_present_peer() {
        let words = [u32::from_ne_bytes([10, 1, 0, 5]), 0, 0, 0];
        let backend = remote("10.1.0.5:5353");
        let of = |backend| {
            let counter = SocketCounter { service: 7, active_flows_slot: 0, backend };
            parse(&answer(IPV4, words, &[stored(bytemuck::bytes_of(&counter))])).service_connection()
        };
        assert_eq!(of(backend), Some(ServiceConnection { service: 7, backend, idle: None }));
        assert_eq!(of(remote("10.1.0.6:5353")), None);
        let others = [stored(&[1; 20]), Attribute::new(9, &[1])];
        assert_eq!(parse(&answer(IPV4, words, &others)).service_connection(), None);
    }

    #[test]
    fn tcp_connection_is_idle_since_its_last_packet() {
        let mut info = vec![0; LAST_DATA_SENT];
        info.extend([9_000_u32, 0, 7_000, 8_000].into_iter().flat_map(u32::to_ne_bytes));
        let idle = |state, info: &[u8]| {
            let mut answer = answer(IPV4, [0; 4], &[Attribute::new(INFO, info)]);
            answer[1] = state;
            parse(&answer).idle
        };
        assert_eq!(idle(ESTABLISHED, &info), Some(Duration::from_secs(7)));
        assert_eq!(idle(ESTABLISHED, &info[..LAST_DATA_SENT]), None);
        assert_eq!(idle(SYN_SENT, &info), None, "the times are those since the start of the machine");
    }

    #[test]
    fn truncated_diag_message_is_rejected() {
        Diag::deserialize(&NetlinkHeader::default(), &[0; 71]).unwrap_err();
    }
}
