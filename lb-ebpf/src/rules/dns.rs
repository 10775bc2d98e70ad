//! Node-local DNS: whether a packet of a pod to the cluster IP of the DNS Service goes to the DNS server of the agent on
//! this node.
//!
//! Each packet is decided by itself, so that no client stays with a server that has stopped to answer. A crash closes
//! the sockets of the server, and the next packet finds none. A server that hangs has sockets, but no longer renews
//! [`is_live`](lb_common::DnsIntercept::is_live).

use lb_common::{Outcome, conntrack::Segment, dns, protocol};

use super::source_port::LISTEN;
use crate::parse::{Packet, Part};

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Query {
    /// To an endpoint of the DNS Service, as with any other Service.
    Service = 0,
    /// To the server on this node.
    Local = 1,
    /// Nowhere: the program resets the connection, because the server on this node does not answer any more.
    Reset = 2,
}

/// The socket of the server that would receive a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ServerSocket {
    /// No socket.
    None = 0,
    /// A socket that any client may send to: UDP, or a TCP socket that listens.
    Open = 1,
    /// The TCP socket of this connection.
    Connection = 2,
}

impl ServerSocket {
    /// A TCP socket in this state (`BPF_TCP_…`).
    #[inline(always)]
    pub const fn of_tcp(state: u32) -> Self {
        if state == LISTEN { Self::Open } else { Self::Connection }
    }
}

/// Whether the packet may be a query, as far as its own headers show: whole, to port 53, over UDP or TCP.
#[inline(always)]
pub fn may_be_query(packet: &Packet) -> bool {
    let protocol = packet.tuple.protocol;
    packet.tuple.destination_port == dns::PORT
        && packet.fragment.part == Part::Whole
        && (protocol == protocol::UDP || protocol == protocol::TCP)
}

/// The outcome of a packet that goes to the server: one query for each datagram and each connection.
#[inline(always)]
pub fn outcome(protocol: u8, segment: &Segment) -> Outcome {
    if protocol != protocol::TCP || segment.is_syn() { Outcome::DnsQuery } else { Outcome::Forward }
}

/// Where a packet for the DNS Service goes. `is_live` is whether the server is known to answer.
#[inline(always)]
pub fn query(protocol: u8, segment: &Segment, is_live: bool, socket: ServerSocket) -> Query {
    let begins = protocol != protocol::TCP || segment.is_syn();
    match (socket, is_live, begins) {
        (ServerSocket::None, _, _) | (_, false, true) | (ServerSocket::Open, false, false) => Query::Service,
        // An ACK to a listening socket may complete a handshake with a SYN cookie.
        (ServerSocket::Open | ServerSocket::Connection, true, _) => Query::Local,
        (ServerSocket::Connection, false, false) => Query::Reset,
    }
}

#[cfg(test)]
mod tests {
    use lb_common::conntrack::tcp_flags::{ACK, FIN, SYN};

    use super::*;

    const fn segment(flags: u8) -> Segment {
        Segment { flags, seq: 0, ack: 0, payload: 0 }
    }

    #[test]
    fn datagrams_go_to_the_server_only_while_it_lives_and_has_a_socket() {
        use ServerSocket::{None, Open};
        for (socket, is_live, expected) in [
            (Open, true, Query::Local),
            (Open, false, Query::Service),
            (None, true, Query::Service),
            (None, false, Query::Service),
        ] {
            assert_eq!(query(protocol::UDP, &segment(0), is_live, socket), expected, "{socket:?} {is_live}");
        }
    }

    #[test]
    fn connections_begin_at_a_server_that_lives_and_end_when_it_hangs() {
        use Query::{Local, Reset, Service};
        use ServerSocket::{Connection, None, Open};
        for (flags, socket, live, hung) in [
            (SYN, Open, Local, Service),
            (SYN, Connection, Local, Service),
            (SYN, None, Service, Service),
            (ACK, Connection, Local, Reset),
            (FIN | ACK, Connection, Local, Reset),
            (ACK, Open, Local, Service),
            (ACK, None, Service, Service),
        ] {
            for (is_live, expected) in [(true, live), (false, hung)] {
                let found = query(protocol::TCP, &segment(flags), is_live, socket);
                assert_eq!(found, expected, "flags {flags}, {socket:?}, live: {is_live}");
            }
        }
    }

    #[test]
    fn socket_that_listens_is_open() {
        assert_eq!(ServerSocket::of_tcp(LISTEN), ServerSocket::Open);
        assert_eq!(ServerSocket::of_tcp(1), ServerSocket::Connection);
    }
}
