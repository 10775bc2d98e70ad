//! Every step and verdict, as data. The serialised names are part of the JSON interface: after the first release, names
//! may be added, never renamed or removed.

use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use lb_common::{
    Address, Backend, FrontendKind, Outcome, Scheduler,
    conntrack::{Phase, Tuple},
};
use lb_ebpf::rules;
use serde::Serialize;

use crate::announce::AnnouncedBy;

/// One lookup or decision of the programs, and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TraceStep {
    /// `--from` names no source port, so there is no lookup in the flow table.
    NoPort,
    /// The flow table has no entry for the packet's tuple.
    NoFlow,
    /// The flow table has an entry for the packet's tuple.
    Flow {
        /// Whether this is the reverse entry, from the backend to the client.
        reply: bool,
        /// Source and destination that packets have after translation.
        to: Ends,
        /// The phase of the flow, such as established.
        #[serde(serialize_with = "names::phase")]
        phase: Phase,
        /// Whether the entry for the opposite direction is lost; a GC pass restores it if there is room.
        half: bool,
        /// Seconds until the flow expires if no other packet arrives.
        seconds_left: u32,
        /// Name of the service port that the flow belongs to.
        service: String,
        /// How the flow's packets leave the node.
        way: ForwardingPath,
    },
    /// This hook passes packets of the flow; the program at the other tc hook translates them.
    OtherHook,
    /// The entry belongs to a connection of the node itself, but the node only forwards this packet. So the packet
    /// belongs to another flow with the same source port, and is translated already.
    OfOtherFlow,
    /// The flow table has an entry for the packet's tuple, but the packet does not belong to that flow: the packet is a
    /// SYN that begins a new connection, or the flow has the PROXY protocol and its reverse entry is lost.
    NewConnection {
        /// Why the existing entry does not apply.
        why: Stale,
    },
    /// A SYN that the client has retransmitted: the flow keeps its backend.
    Retransmission,
    /// A SYN-ACK after the end of the flow: it belongs to a connection that bypasses the virtual address.
    Foreign,
    /// `SERVICES` has a record of the packet's destination.
    Frontend {
        /// The virtual address and port.
        frontend: SocketAddr,
        /// The protocol: `tcp`, `udp` or `sctp`.
        protocol: &'static str,
        /// Name of the service port.
        service: String,
        /// The kind of the frontend's address, such as cluster IP.
        #[serde(serialize_with = "names::kind")]
        kind: Option<FrontendKind>,
        /// How the frontend's backends are chosen.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// Timeout of `ClientIP` affinity in seconds; 0 means none.
        affinity_seconds: u32,
        /// Number of backends for external clients; for all clients if `internal` is `None`.
        backends: u32,
        /// Number of backends for internal clients, if `externalTrafficPolicy: Local` gives external clients other
        /// backends.
        internal: Option<u32>,
    },
    /// The destination is the DNS Service. The agent itself can answer the queries that this node's pods send there.
    NodeLocalDns {
        /// The address and port at which the agent answers.
        server: SocketAddr,
        /// Whether the server's lease is live; if not, the endpoints of the Service answer.
        live: bool,
    },
    /// `SERVICES` has no record of the packet's destination.
    NoFrontend,
    /// The seal (a digest) in the destination's record does not match the record: the agent is replacing the record.
    Torn,
    /// No frontend has the destination's address and port; the kind of the address decides what happens to the packet.
    Address {
        /// The kind of the destination's address.
        is: Unlisted,
    },
    /// While an agent with another map layout takes over, this packet is left to the programs of the earlier layout.
    LeftToEarlier,
    /// The packet is no SYN. Only a SYN begins a flow at this address and port, because connections of the node, and
    /// connections that netfilter masquerades, may use the same address and port.
    NotSyn,
    /// A RST that matches no flow.
    StrayReset,
    /// A combination of TCP flags that no TCP implementation sends.
    InvalidFlags,
    /// Whether the client is internal to the cluster, if the service treats internal and external clients differently.
    Client {
        /// Internal or external, and by which criterion the programs know.
        is: ClientSide,
        /// Number of the service's backends for such a client.
        backends: u32,
    },
    /// The frontend serves only system calls of processes of the node, not packets.
    SocketsOnly,
    /// The client is external, and its address is in `--deny-source` or behind an IPsec policy that replies would
    /// bypass.
    DeniedSource,
    /// The service has `loadBalancerSourceRanges`, which restrict clients.
    SourceRanges {
        /// Whether one of the ranges contains the client.
        allowed: bool,
    },
    /// The service limits new connections on each node.
    Limit {
        /// The limit, such as `20/s`.
        rate: String,
        /// Whether each client has its own limit; otherwise all clients share this limit.
        each_client: bool,
        /// Number of connections that may begin now.
        left: u64,
    },
    /// The service has no backend for this client.
    NoBackends {
        /// Whether the service has backends on other nodes, which the traffic policy excludes.
        elsewhere: bool,
    },
    /// A SYN-ACK that matches no flow: its connection bypassed the data plane.
    StraySynAck,
    /// A TCP segment that matches no flow, to a Service with a drain or idle timeout, or with the PROXY protocol.
    UnknownConnection,
    /// The lookup of the client in `AFFINITY`.
    Affinity {
        /// The result of the lookup.
        is: AffinityState,
    },
    /// The scheduler chooses a backend.
    Scheduler {
        /// The name of the scheduler.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// How the scheduler picks a backend.
        how: Method,
        /// Number of backends that the scheduler picks from.
        of: u32,
        /// Number of entries in the scheduler's table; 0 if it has none.
        table: u32,
    },
    /// The backend that the client's earlier SYN went to did not answer, so the next backend is used.
    NextBackend,
    /// The record in `SERVICES` points outside of `BACKENDS`.
    NoSuchBackend,
    /// Whether the new flow is masqueraded.
    Masquerade {
        /// The source address that the backend sees.
        source: Source,
    },
    /// The backend gets a PROXY protocol header before the client's data.
    ProxyProtocol,
    /// A process of the node connects to a Service with the PROXY protocol. Either the system call keeps the cluster IP
    /// and the packets go to the catch device, or the program makes the system call fail.
    SocketWithoutHeader {
        /// Whether the program makes the system call fail.
        refused: bool,
    },
    /// No Service has the port of the cluster IP. `connect(2)` of a UDP socket succeeds nevertheless, and the socket's
    /// datagrams are refused; the verdict is about system calls that send a datagram.
    UdpConnectSucceeds,
    /// The packet begins a flow that replaces the one in the flow table. The packet enters the node again through the
    /// catch device, and the program at ingress creates the new flow.
    BeginsAtIngress,
    /// Another flow to the backend uses the client's source port.
    PortTaken {
        /// The client's source port.
        port: u16,
    },
    /// This connection of the node needs another source port: a flow to the same endpoint already uses the node's
    /// address with the same port.
    NodePortTaken {
        /// The source port of the node's socket.
        port: u16,
    },
    /// The flow table has no room for the new flow.
    Full,
    /// A routed or tunnelled flow needs a route, and the kernel has none.
    NoRoute,
    /// The packet leaves at once through a device, bypassing the stack.
    BypassesStack {
        /// Name of the device that the packet leaves through.
        device: String,
    },
    /// The XDP program passes the packet on to tc, which decides.
    LeftToTc,
    /// The constants of the loaded programs cannot be read, so the next steps assume the defaults.
    Assumed {
        /// Why the constants cannot be read.
        error: String,
    },
    /// Whether a program is attached to the device at this hook; read from the kernel, not from the maps.
    Attached {
        /// Name of the device.
        device: String,
        /// Name of the hook, such as `tc-ingress`.
        at: &'static str,
        /// Whether a program of lb-agent is attached at the hook.
        program: bool,
    },
    /// Which node announces the packet's destination, as the agent reports it.
    Announced {
        /// The packet's destination address.
        address: IpAddr,
        /// Name of the node that announces the address, as far as the agent of this node knows; `None` if it knows of
        /// none.
        node: Option<String>,
        /// Whether this node announces the address now.
        here: bool,
        /// Since when this node announces the address; `None` if it does not. Stays set while the claim of another
        /// machine interrupts the announcement.
        since: Option<Timestamp>,
        /// The protocol by which the address is announced.
        by: AnnouncedBy,
        /// `namespace/name` of the advertisements that cover the address.
        advertisements: Vec<String>,
    },
}

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ends {
    /// Source address and port.
    pub from: SocketAddr,
    /// Destination address and port.
    pub to: SocketAddr,
}

impl From<&Tuple> for Ends {
    fn from(tuple: &Tuple) -> Self {
        Self {
            from: socket(tuple.source, tuple.source_port),
            to: socket(tuple.destination, tuple.destination_port),
        }
    }
}

/// How packets of a flow leave the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ForwardingPath {
    /// Through the network stack.
    Stack,
    /// Masqueraded when leaving the node; through the network stack, except with `--forwarding direct`.
    Masqueraded,
    /// The second flow of a masqueraded connection, or a connection of the node that needs another source port: the
    /// program replaces the source when packets leave the node.
    Masquerade,
    /// Back through the device of arrival (hairpin).
    Hairpin,
    /// From the catch device through the stack, with the VIP as source, because the client's device has no programs.
    Caught,
    /// As `Caught`, masqueraded when leaving the node.
    CaughtAndMasqueraded,
    /// Out through a wire device at once, masqueraded in the same step.
    Routed,
    /// In a tunnel to the backend's node.
    Tunnel,
    /// Directly to the device of the next hop, bypassing the stack, as soon as the next hop is known.
    Direct,
}

/// Why an entry of the flow table does not apply to a packet with its tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stale {
    /// The entry of the reverse direction is lost.
    HalfLost,
    /// The connection has ended.
    Over,
    /// The backend has not answered the SYN and its retransmissions.
    Unanswered,
    /// The service no longer has the backend, which does not answer.
    BackendGone,
}

/// The kind of the destination address of a packet that matches no frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Unlisted {
    /// Outside the ranges of cluster IPs.
    OutOfRange,
    /// An unassigned address in a range of cluster IPs; the settings say that packets to it are dropped.
    UnknownVip,
    /// An unassigned address in a range of cluster IPs; the settings say that packets to it pass.
    Unknown,
    /// A VIP that is no cluster IP of this proxy: an address of the node, a load balancer address, an external IP, or a
    /// cluster IP that another proxy serves.
    NoClusterIp,
    /// A cluster IP, at a port that no Service has.
    ClusterIp,
}

/// Whether a client is internal to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ClientSide {
    /// Internal, by its address.
    InternalByAddress,
    /// Internal, by the device through which its packets enter.
    InternalByDevice,
    /// External: neither its address nor its device makes it internal.
    External,
}

/// Result of the lookup of a client in `AFFINITY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "state")]
pub enum AffinityState {
    /// `AFFINITY` has no entry for the client.
    Nothing,
    /// The client's entry has expired.
    Expired {
        /// The backend that the entry names.
        backend: SocketAddr,
    },
    /// The service no longer has the backend that the client is pinned to.
    Gone {
        /// The backend that the entry names.
        backend: SocketAddr,
    },
    /// The client is pinned to a backend.
    Backend {
        /// The backend that the client is pinned to.
        backend: SocketAddr,
        /// Seconds until the entry expires.
        seconds_left: u32,
    },
}

/// How a scheduler picks a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Method {
    /// At random.
    Chance,
    /// In turn; each CPU keeps its own position in the sequence.
    Turn,
    /// By hash: the same packet gets the same backend as long as the backends stay the same.
    Hash,
    /// By a hash that includes the source port, which `--from` does not contain.
    HashOfPort,
    /// By the number of active flows of each backend.
    Load,
}

/// The source address that a backend sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "of", content = "address")]
pub enum Source {
    /// The client's own address.
    Client,
    /// The client's own address: the backend has an address of the node itself, so the programs do not masquerade.
    ClientOnNode,
    /// This address of the node, which replaces the client's.
    Node(IpAddr),
    /// The virtual address, on the paths [`ForwardingPath::Hairpin`] and [`ForwardingPath::Caught`].
    Vip(IpAddr),
    /// No address: the agent has set no address or no source ports for masquerading.
    Unset,
}

/// The verdict on the packet or system call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Conclusion {
    /// The packet passes unchanged.
    Untouched {
        /// The outcome under which the programs count the packet.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// The programs translate the packet: it belongs to a flow, is a query that node-local DNS redirects, or is an
    /// answer of node-local DNS.
    Translated {
        /// The outcome under which the programs count the packet.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
        /// Source and destination after translation.
        ends: Ends,
    },
    /// The packet begins a flow to one of these backends, or the system call gets one of them as its destination.
    Begins {
        /// The possible backends: one if the choice is certain.
        backends: Vec<Candidate>,
    },
    /// The packet is rejected: the sender gets a TCP RST or an ICMP error, or a system call fails with `ECONNREFUSED`.
    Rejected {
        /// The outcome under which the programs count the packet.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// The packet is dropped, or a system call fails with `EHOSTUNREACH`.
    Dropped {
        /// The outcome under which the programs count the packet.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
}

/// A backend that the new flow may get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// The backend's address and port.
    pub backend: SocketAddr,
    /// Name of the backend's pod; `None` if unknown.
    pub pod: Option<String>,
    /// The outcome under which the programs count the packet, if the flow gets this backend.
    #[serde(serialize_with = "names::outcome")]
    pub outcome: Outcome,
    /// How packets get to the backend.
    pub way: ForwardingPath,
    /// The source address that the backend sees.
    pub source: Source,
}

impl Conclusion {
    /// The verdict on a packet that gets no flow, from its outcome.
    pub(super) const fn of(outcome: Outcome) -> Self {
        match outcome.verdict() {
            // `Hold` is for fragments, which a question cannot describe.
            lb_common::Verdict::Pass | lb_common::Verdict::Hold => Self::Untouched { outcome },
            lb_common::Verdict::Bounce | lb_common::Verdict::Route => Self::Rejected { outcome },
            lb_common::Verdict::Drop => Self::Dropped { outcome },
        }
    }
}

impl From<rules::client::ClientSide> for ClientSide {
    fn from(side: rules::client::ClientSide) -> Self {
        use rules::client::ClientSide as Rule;
        match side {
            Rule::External => Self::External,
            Rule::InternalByAddress => Self::InternalByAddress,
            Rule::InternalByDevice => Self::InternalByDevice,
        }
    }
}

impl From<rules::unlisted::Unlisted> for Unlisted {
    fn from(is: rules::unlisted::Unlisted) -> Self {
        use rules::unlisted::Unlisted as Rule;
        match is {
            Rule::OutOfRange => Self::OutOfRange,
            Rule::UnknownVip => Self::UnknownVip,
            Rule::Unknown => Self::Unknown,
            Rule::NoClusterIp => Self::NoClusterIp,
            Rule::ClusterIp | Rule::StrayReset => Self::ClusterIp,
        }
    }
}

impl Stale {
    /// Why an entry of the flow table is stale; `None` if it is not.
    pub(super) const fn of(staleness: rules::flow::Staleness) -> Option<Self> {
        use rules::flow::Staleness::{BackendGone, Fresh, HalfLost, Over, Unanswered};
        Some(match staleness {
            Fresh => return None,
            HalfLost => Self::HalfLost,
            Over => Self::Over,
            Unanswered => Self::Unanswered,
            BackendGone => Self::BackendGone,
        })
    }
}

pub(super) fn socket(address: Address, port: u16) -> SocketAddr {
    SocketAddr::new(address.into(), port)
}

pub(super) fn endpoint(backend: &Backend) -> SocketAddr {
    socket(backend.address, backend.port)
}

/// Serialises enums of other crates by the names that metrics and commands use.
mod names {
    use lb_common::{FrontendKind, Outcome, Scheduler, conntrack::Phase};
    use serde::{Serialize as _, Serializer};

    pub(super) fn outcome<S: Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(outcome.as_str())
    }

    pub(super) fn scheduler<S: Serializer>(scheduler: &Scheduler, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(scheduler.as_str())
    }

    pub(super) fn phase<S: Serializer>(phase: &Phase, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(phase.as_str())
    }

    #[expect(clippy::ref_option, reason = "what serde passes")]
    pub(super) fn kind<S: Serializer>(kind: &Option<FrontendKind>, serializer: S) -> Result<S::Ok, S::Error> {
        kind.map(FrontendKind::as_str).serialize(serializer)
    }
}
