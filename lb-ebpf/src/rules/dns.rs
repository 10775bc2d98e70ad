//! Node-local DNS: whether a packet of a pod to the cluster IP of the DNS Service goes to the DNS server of the agent
//! on this node.
//!
//! The programs decide about each packet separately, so that no client stays with a server that has stopped answering.
//! A crash closes the sockets of the server, and the lookup for the next packet finds no socket. A server that hangs
//! has sockets, but no longer renews its [lease](lb_common::DnsIntercept::lease).

use lb_common::{
    Outcome,
    conntrack::{Segment, Tuple},
    dns::{self, Lease},
    protocol,
};

use super::source_port::LISTEN;
use crate::parse::Part;

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

/// Whether a packet may be a query, as far as its own headers show: to port 53, over UDP or TCP, and no fragment.
#[inline(always)]
pub fn may_be_query(tuple: &Tuple, part: Part) -> bool {
    let protocol = tuple.protocol;
    tuple.destination_port == dns::PORT
        && part == Part::Whole
        && (protocol == protocol::UDP || protocol == protocol::TCP)
}

/// The outcome of a packet that goes to the server: [`Outcome::DnsQuery`] for each datagram and for the SYN of each
/// connection, else [`Outcome::Forward`].
#[inline(always)]
pub fn outcome(protocol: u8, segment: &Segment) -> Outcome {
    if protocol != protocol::TCP || segment.is_syn() { Outcome::DnsQuery } else { Outcome::Forward }
}

/// Where a packet for the DNS Service goes.
#[inline(always)]
pub fn query(protocol: u8, segment: &Segment, lease: Lease, socket: ServerSocket) -> Query {
    let begins = protocol != protocol::TCP || segment.is_syn();
    match (socket, lease, begins) {
        (ServerSocket::None, _, _) => Query::Service,
        // An ACK to a listening socket may complete a handshake with a SYN cookie.
        (_, Lease::Live, _) | (ServerSocket::Connection, Lease::Withdrawn, false) => Query::Local,
        // A RST is never answered by a RST (RFC 9293 §3.10.7.1), and ends the server's connection.
        (ServerSocket::Connection, Lease::Over, false) if segment.is_rst() => Query::Local,
        (ServerSocket::Connection, Lease::Over, false) => Query::Reset,
        (_, Lease::Withdrawn | Lease::Over, _) => Query::Service,
    }
}

#[cfg(test)]
mod tests {
    use lb_common::conntrack::tcp_flags::{ACK, FIN, RST, SYN};

    use super::*;

    const fn segment(flags: u8) -> Segment {
        Segment { flags, seq: 0, ack: 0, payload: 0 }
    }

    #[test]
    fn datagrams_go_to_the_server_only_while_it_lives_and_has_a_socket() {
        use ServerSocket::{None, Open};
        for (socket, lease, expected) in [
            (Open, Lease::Live, Query::Local),
            (Open, Lease::Withdrawn, Query::Service),
            (Open, Lease::Over, Query::Service),
            (None, Lease::Live, Query::Service),
            (None, Lease::Over, Query::Service),
        ] {
            assert_eq!(query(protocol::UDP, &segment(0), lease, socket), expected, "{socket:?} {lease:?}");
        }
    }

    #[test]
    fn connections_begin_at_a_server_that_lives_and_end_when_it_hangs() {
        use Query::{Local, Reset, Service};
        use ServerSocket::{Connection, None, Open};
        for (flags, socket, live, withdrawn, over) in [
            (SYN, Open, Local, Service, Service),
            (SYN, Connection, Local, Service, Service),
            (SYN, None, Service, Service, Service),
            (ACK, Connection, Local, Local, Reset),
            (FIN | ACK, Connection, Local, Local, Reset),
            (RST, Connection, Local, Local, Local),
            (ACK, Open, Local, Service, Service),
            (ACK, None, Service, Service, Service),
        ] {
            let leases = [(Lease::Live, live), (Lease::Withdrawn, withdrawn), (Lease::Over, over)];
            for (lease, expected) in leases {
                let found = query(protocol::TCP, &segment(flags), lease, socket);
                assert_eq!(found, expected, "flags {flags}, {socket:?}, {lease:?}");
            }
        }
    }

    #[test]
    fn socket_that_listens_is_open() {
        assert_eq!(ServerSocket::of_tcp(LISTEN), ServerSocket::Open);
        assert_eq!(ServerSocket::of_tcp(1), ServerSocket::Connection);
    }
}
