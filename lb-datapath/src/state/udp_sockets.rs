//! Destroys UDP sockets of the node whose backend is gone. Otherwise their datagrams would be lost without an error.
//! The application's next system call fails: reads with ECONNABORTED, writes with EDESTADDRREQ.
//!
//! sock_diag(7) lists sockets with their cookies. `CONNECTED_SOCKETS` has the cookies of sockets that a program has
//! connected to a backend: only these are destroyed.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
};

use bytemuck::{Pod, Zeroable};
use lb_common::{Address, Endpoint, SocketConnection, protocol};
use netlink_packet_core::{DecodeError, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    net::netlink::{Message, Netlink},
};

/// Numbers from include/uapi/linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// The state `TCP_ESTABLISHED`, which connected UDP sockets also have.
const ESTABLISHED: u32 = 1;
/// The wildcard `INET_DIAG_NOCOOKIE`.
const ANY_COOKIE: u64 = u64::MAX;

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

/// The first fields of an answer about a socket, `struct inet_diag_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DiagMessage {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
}

/// Messages of sock_diag: requests, and answers.
#[derive(Clone, Debug)]
enum Diag {
    /// A request to list the connected sockets of this address family.
    List(u8),
    Socket(Socket),
    Destroy(Socket),
}

#[derive(Clone, Copy, Debug)]
struct Socket {
    family: u8,
    id: SocketId,
}

impl Socket {
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
}

impl NetlinkSerializable for Diag {
    fn message_type(&self) -> u16 {
        match self {
            Self::List(_) | Self::Socket(_) => SOCK_DIAG_BY_FAMILY,
            Self::Destroy(_) => SOCK_DESTROY,
        }
    }

    fn buffer_len(&self) -> usize {
        size_of::<DiagRequest>()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let (family, states, id) = match *self {
            Self::List(family) => (family, 1 << ESTABLISHED, SocketId::zeroed()),
            Self::Socket(Socket { family, id }) | Self::Destroy(Socket { family, id }) => {
                (family, u32::MAX, id)
            }
        };
        let request = DiagRequest { family, protocol: protocol::UDP, extensions: 0, zero: 0, states, id };
        buffer.copy_from_slice(bytemuck::bytes_of(&request));
    }
}

impl NetlinkDeserializable for Diag {
    type Error = DecodeError;

    fn deserialize(_header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let answer = payload.get(..size_of::<DiagMessage>());
        let answer = answer.ok_or_else(|| DecodeError::from("a socket message that is too short"))?;
        let DiagMessage { family, id, .. } = bytemuck::pod_read_unaligned(answer);
        Ok(Self::Socket(Socket { family, id }))
    }
}

impl Message for Diag {
    const PROTOCOL: isize = NETLINK_SOCK_DIAG;
}

/// Finds and destroys UDP sockets of this network namespace that are connected to a Service.
#[derive(Clone, Debug)]
pub struct UdpSockets {
    connections: Table<u64, SocketConnection>,
}

impl UdpSockets {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let map = &layout::CONNECTED_SOCKETS;
        Ok(Self { connections: Table::open(map, &folder.map(map.name))? })
    }

    /// Destroys the sockets for which `is_stale` returns true, given the virtual address and the backend. Returns how
    /// many.
    ///
    /// # Errors
    /// The kernel does not list sockets, the map cannot be read, or the kernel does not destroy a socket. In the last
    /// case the function still destroys the remaining ones.
    pub fn destroy(&self, is_stale: impl Fn(&Endpoint, &Endpoint) -> bool) -> Result<usize, DatapathError> {
        let failed = |action| move |error| DatapathError::netlink(action, error);
        let mut netlink = Netlink::open().map_err(failed("open a socket for socket diagnosis"))?;
        let (mut destroyed, mut refused) = (0, None);
        for family in [IPV4, IPV6] {
            for message in netlink.dump(&Diag::List(family)).map_err(failed("list UDP sockets"))? {
                let Diag::Socket(socket) = message else { continue };
                // The socket may have been connected to another address since it was listed.
                let connection = self.connections.get(&socket.cookie())?;
                let connection = connection.filter(|connection| connection.backend == socket.remote());
                if !connection.is_some_and(|SocketConnection { vip, backend }| is_stale(&vip, &backend)) {
                    continue;
                }
                match destroy(&mut netlink, socket) {
                    Ok(was_there) => destroyed += usize::from(was_there),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        refused.map_or(Ok(destroyed), |error| Err(failed("destroy a UDP socket")(error)))
    }
}

/// Destroys a socket. Returns whether the socket still existed.
fn destroy(netlink: &mut Netlink<Diag>, socket: Socket) -> io::Result<bool> {
    match netlink.execute(Diag::Destroy(socket), 0) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates and tries to destroy a UDP socket of this process. Fails if the kernel lacks `CONFIG_INET_UDP_DIAG` or
/// `CONFIG_INET_DIAG_DESTROY`, or the process lacks CAP_NET_ADMIN.
pub(crate) fn try_destroy() -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(socket.local_addr()?)?;
    let port = socket.local_addr()?.port().to_be();
    let address = [u32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets()), 0, 0, 0];
    let id = SocketId {
        local_port: port,
        remote_port: port,
        local: address,
        remote: address,
        device: 0,
        cookie: bytemuck::must_cast(ANY_COOKIE),
    };
    let destroyed = destroy(&mut Netlink::open()?, Socket { family: IPV4, id })?;
    if destroyed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::*;

    fn answer(family: u8, remote: [u32; 4]) -> Vec<u8> {
        let mut answer = DiagMessage { family, ..DiagMessage::zeroed() };
        answer.id = SocketId { remote_port: 5353_u16.to_be(), remote, cookie: [7, 1], ..SocketId::zeroed() };
        // The answer continues with timeouts, queues and attributes, which are ignored.
        [bytemuck::bytes_of(&answer), &[9; 60]].concat()
    }

    fn parse(payload: &[u8]) -> Socket {
        match Diag::deserialize(&NetlinkHeader::default(), payload).unwrap() {
            Diag::Socket(socket) => socket,
            other @ (Diag::List(_) | Diag::Destroy(_)) => panic!("{other:?}"),
        }
    }

    #[test]
    fn diag_message_gives_cookie_and_remote_endpoint() {
        let v4 = [u32::from_ne_bytes([10, 1, 0, 5]), 0, 0, 0];
        let v6: IpAddr = "2001:db8::5".parse().unwrap();
        let mapped = Address::from_v4([10, 1, 0, 5]).words();
        for (family, words, remote) in [
            (IPV4, v4, "10.1.0.5:5353"),
            (IPV6, mapped, "10.1.0.5:5353"),
            (IPV6, Address::from(v6).words(), "[2001:db8::5]:5353"),
        ] {
            let remote: SocketAddr = remote.parse().unwrap();
            let remote = Endpoint::new(remote.ip().into(), remote.port());
            let socket = parse(&answer(family, words));
            assert_eq!((socket.cookie(), socket.remote()), (0x1_0000_0007, remote));
        }
    }

    #[test]
    fn truncated_diag_message_is_rejected() {
        Diag::deserialize(&NetlinkHeader::default(), &[0; 51]).unwrap_err();
    }
}
