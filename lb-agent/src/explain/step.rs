//! Every step and verdict, as data. The serialised names are part of the JSON interface: names may be added, never
//! renamed or removed.

use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use lb_common::{
    Address, Backend, FrontendKind, Outcome, Scheduler,
    conntrack::{Phase, Tuple},
};
use lb_ebpf::rules;
use serde::Serialize;

/// One lookup or decision of the programs, and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TraceStep {
    /// `--from` names no source port, so the flow table is not looked up.
    NoPort,
    /// The flow table has no entry.
    NoFlow,
    /// The flow table has an entry.
    Flow {
        /// Whether this is the reverse entry, from the backend to the client.
        reply: bool,
        /// The tuple of translated packets.
        to: Ends,
        /// The state of the flow; unknown if the reverse entry is lost.
        #[serde(serialize_with = "names::phase")]
        phase: Option<Phase>,
        /// Seconds until the idle flow expires.
        seconds_left: u32,
        /// The service port.
        service: String,
        /// How the flow's packets leave the node.
        way: ForwardingPath,
    },
    /// The program at the other tc hook translates packets of the flow; the one at this hook passes them.
    OtherHook,
    /// A SYN that begins a new connection, although the tuple has an entry.
    #[serde(rename = "anew")]
    NewConnection {
        /// Why the entry does not apply.
        why: Stale,
    },
    /// A retransmitted SYN.
    Retransmission,
    /// A SYN-ACK, after the end of the flow, of a connection that bypasses the virtual address.
    Foreign,
    /// `SERVICES` has the destination.
    Frontend {
        /// The address and port.
        frontend: SocketAddr,
        /// The protocol.
        protocol: &'static str,
        /// The service port.
        service: String,
        /// The kind of the address.
        #[serde(serialize_with = "names::kind")]
        kind: Option<FrontendKind>,
        /// How backends are chosen.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// Timeout of `ClientIP` affinity in seconds; 0 means none.
        affinity_seconds: u32,
        /// Number of backends for external clients, and for all clients if `inside` is `None`.
        backends: u32,
        /// Number of backends for internal clients under `externalTrafficPolicy: Local`.
        inside: Option<u32>,
    },
    /// `SERVICES` does not have the destination.
    NoFrontend,
    /// The record has a broken seal: the agent is replacing it.
    Torn,
    /// No frontend has the destination: the kind of its address decides what happens to the packet.
    Address {
        /// The kind of the address.
        is: Unlisted,
    },
    /// This packet is no SYN, and only a SYN begins a flow at this address and port: packets of the node's own
    /// connections may also have them.
    #[serde(rename = "isNotOpened")]
    NotSyn,
    /// A RST of no flow.
    StrayReset,
    /// TCP flags that no TCP sends together.
    InvalidFlags,
    /// Whether the client is internal to the cluster, if the service treats internal and external clients differently.
    Client {
        /// Internal or external, and by which criterion.
        is: ClientSide,
        /// Number of backends for such a client.
        backends: u32,
    },
    /// The frontend serves only processes of the node.
    SocketsOnly,
    /// The client is external, and in a network of `--deny-source` or behind an IPsec policy that replies would bypass.
    DeniedSource,
    /// The service has `loadBalancerSourceRanges`.
    SourceRanges {
        /// Whether one of the ranges contains the client.
        allowed: bool,
    },
    /// There is no backend for this client.
    NoBackends {
        /// Whether there are backends on other nodes, which the traffic policy does not allow.
        elsewhere: bool,
    },
    /// A SYN-ACK of no flow: its connection bypassed the data plane.
    #[serde(rename = "acceptsWhatNobodyAsked")]
    StraySynAck,
    /// A TCP segment of no flow, for a Service with a drain or idle timeout, or with the PROXY protocol.
    UnknownConnection,
    /// The client's entry in `AFFINITY`.
    Affinity {
        /// The state of the entry.
        is: AffinityState,
    },
    /// The scheduler's choice.
    Scheduler {
        /// The scheduler.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// How the scheduler picks a backend.
        how: Method,
        /// Number of backends to pick from.
        of: u32,
        /// Entries of the scheduler's table; 0 means no table.
        table: u32,
    },
    /// The client's previous backend did not answer, so the next one is used.
    #[serde(rename = "anotherBackend")]
    NextBackend,
    /// The record points outside `BACKENDS`.
    NoSuchBackend,
    /// Whether the new flow is masqueraded.
    Masquerade {
        /// The source address that the backend sees.
        source: Source,
    },
    /// The backend gets a PROXY protocol header first.
    ProxyProtocol,
    /// A process of the node connects to a Service with the PROXY protocol: its packets go to the catch device, or the
    /// call is refused.
    SocketWithoutHeader {
        /// Whether the call is refused.
        refused: bool,
    },
    /// Another flow to the backend uses the client's source port.
    PortTaken {
        /// The client's port.
        port: u16,
    },
    /// This connection of the node needs another source port: a flow to the same endpoint already uses the node's
    /// address with the same port.
    NodePortTaken {
        /// The port of the node's socket.
        port: u16,
    },
    /// The flow table is full.
    Full,
    /// A packet of a routed or tunnelled flow has no route.
    NoRoute,
    /// The packet leaves at once, bypassing the stack.
    #[serde(rename = "pastStack")]
    BypassesStack {
        /// The device that the packet leaves through.
        device: String,
    },
    /// The XDP program passes the packet on to tc, which decides.
    LeftToTc,
    /// Whether a program is attached to the device at this hook; read from the kernel, not from the maps.
    Attached {
        /// The device.
        device: String,
        /// The hook.
        at: &'static str,
        /// Whether a program of lb-agent is attached at the hook.
        program: bool,
    },
    /// Which node announces the packet's destination at layer 2, as the agent reports it.
    Announced {
        /// The destination.
        address: IpAddr,
        /// The node that announces it, if the agent of this node has its name.
        node: Option<String>,
        /// Whether that is this node.
        here: bool,
        /// Since when this node announces it.
        since: Option<Timestamp>,
    },
}

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ends {
    /// Source.
    pub from: SocketAddr,
    /// Destination.
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
    /// Through the stack.
    Stack,
    /// Through the stack, masqueraded when leaving the node.
    Masqueraded,
    /// The second flow of a masqueraded connection: the program replaces the source when packets leave the node.
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
    /// Directly to the device of the next hop instead of through the stack, as soon as the next hop is known.
    Direct,
}

/// Why an entry does not apply to a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stale {
    /// The reverse entry is lost.
    HalfLost,
    /// The connection has ended.
    Over,
    /// The backend has not answered the SYN and its retransmissions.
    Unanswered,
    /// The service no longer has the backend.
    BackendGone,
}

/// The kind of an address that is no frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Unlisted {
    /// Outside the ranges of cluster IPs.
    OutOfRange,
    /// An unassigned address in a range of cluster IPs, which the settings drop.
    UnknownVip,
    /// An unassigned address in a range of cluster IPs, which the settings pass.
    Unknown,
    /// An address of the node or of a load balancer, or an external IP.
    NoClusterIp,
    /// A cluster IP, at a port that no Service has.
    ClusterIp,
}

/// Whether a client is internal to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ClientSide {
    /// Internal, by its address.
    InsideByAddress,
    /// Internal, by the device that its packets enter through.
    InsideByDevice,
    /// External.
    Outside,
}

/// The affinity of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "state")]
pub enum AffinityState {
    /// No entry.
    Nothing,
    /// The entry has expired.
    Expired {
        /// The backend of the entry.
        backend: SocketAddr,
    },
    /// The service no longer has the backend.
    Gone {
        /// The backend of the entry.
        backend: SocketAddr,
    },
    /// The client is pinned to a backend.
    Backend {
        /// The backend of the entry.
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
    /// In turn, by the sequence of the CPU that receives the packet.
    Turn,
    /// By hash: the same backend for the same packet, while the backends stay.
    Hash,
    /// By a hash that includes the source port, which `--from` does not contain.
    HashOfPort,
    /// By the number of active flows.
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
    /// The node's address.
    Node(IpAddr),
    /// The virtual address, as of every flow that takes [`ForwardingPath::Caught`].
    Vip(IpAddr),
    /// No address: the agent has set no address or no source ports for masquerading.
    #[serde(rename = "nobody")]
    Unset,
}

/// The verdict on the packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Verdict {
    /// The packet passes unchanged.
    Untouched {
        /// The outcome that the packet counts as.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// The packet's flow translates it.
    Translated {
        /// The outcome that the packet counts as.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
        /// The packet's new tuple.
        to: Ends,
    },
    /// The packet begins a flow to one of these backends.
    Begins {
        /// The possible backends: one if the choice is certain.
        backends: Vec<Candidate>,
    },
    /// The packet is rejected: the sender gets a TCP RST or an ICMP error, or a system call fails with `ECONNREFUSED`.
    Rejected {
        /// The outcome that the packet counts as.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// The packet is dropped, or a system call fails with `EHOSTUNREACH`.
    Dropped {
        /// The outcome that the packet counts as.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
}

/// A backend that a packet may get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// The endpoint.
    pub backend: SocketAddr,
    /// The endpoint's pod.
    pub pod: Option<String>,
    /// The outcome that the packet counts as.
    #[serde(serialize_with = "names::outcome")]
    pub outcome: Outcome,
    /// How packets reach the backend.
    pub way: ForwardingPath,
}

impl Verdict {
    /// The verdict of a packet that gets no flow.
    pub(super) const fn of(outcome: Outcome) -> Self {
        match outcome.verdict() {
            // `Hold` is the verdict on fragments, which no question contains.
            lb_common::Verdict::Pass | lb_common::Verdict::Hold => Self::Untouched { outcome },
            lb_common::Verdict::Bounce | lb_common::Verdict::Route => Self::Rejected { outcome },
            lb_common::Verdict::Drop => Self::Dropped { outcome },
        }
    }
}

impl From<rules::client::ClientSide> for ClientSide {
    fn from(side: rules::client::ClientSide) -> Self {
        use rules::client::ClientSide::{External, InternalByAddress, InternalByDevice};
        match side {
            External => Self::Outside,
            InternalByAddress => Self::InsideByAddress,
            InternalByDevice => Self::InsideByDevice,
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
    /// Why an entry is stale; `None` if it is not stale.
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

/// Serialises values of other crates by their names.
mod names {
    use lb_common::{FrontendKind, Outcome, Scheduler, conntrack::Phase};
    use serde::{Serialize as _, Serializer};

    pub(super) fn outcome<S: Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(outcome.as_str())
    }

    pub(super) fn scheduler<S: Serializer>(scheduler: &Scheduler, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(scheduler.as_str())
    }

    #[expect(clippy::ref_option, reason = "what serde passes")]
    pub(super) fn phase<S: Serializer>(phase: &Option<Phase>, serializer: S) -> Result<S::Ok, S::Error> {
        phase.map(Phase::as_str).serialize(serializer)
    }

    #[expect(clippy::ref_option, reason = "what serde passes")]
    pub(super) fn kind<S: Serializer>(kind: &Option<FrontendKind>, serializer: S) -> Result<S::Ok, S::Error> {
        kind.map(FrontendKind::as_str).serialize(serializer)
    }
}
