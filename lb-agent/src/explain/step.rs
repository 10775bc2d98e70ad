//! What the walk says: every step and verdict as data. The names are part of the JSON interface: they may be added to, never
//! renamed or removed.

use std::net::{IpAddr, SocketAddr};

use lb_common::{
    Address, Backend, FrontendKind, Outcome, Scheduler,
    conntrack::{Phase, Tuple},
};
use serde::Serialize;

/// Something that was looked at, and what was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Step {
    /// No source port was given.
    NoPort,
    /// `CONNTRACK` has no entry.
    NoFlow,
    /// `CONNTRACK` has an entry.
    Flow {
        /// Of which direction.
        reply: bool,
        /// What packets become.
        to: Ends,
        /// Where the flow is in its life; unknown where it has lost its other half.
        #[serde(serialize_with = "names::phase")]
        phase: Option<Phase>,
        /// Seconds without packets after which it is forgotten.
        seconds_left: u32,
        /// The service port.
        service: String,
        /// How its packets travel.
        way: Way,
    },
    /// Packets of the flow are translated at the other hook.
    OtherHook,
    /// A packet that asks for a connection, while the entry is of one that has this to be said about it.
    Anew {
        /// Why the entry does not count.
        why: Stale,
    },
    /// A packet that asks for a connection again.
    Retransmission,
    /// Somebody accepts a connection that went past the virtual address.
    Foreign,
    /// `SERVICES` has the destination.
    Frontend {
        /// The address and port.
        frontend: SocketAddr,
        /// The protocol.
        protocol: &'static str,
        /// The service port.
        service: String,
        /// What kind of address it is.
        #[serde(serialize_with = "names::kind")]
        kind: Option<FrontendKind>,
        /// How backends are chosen.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// Timeout of `ClientIP` affinity; 0 is none.
        affinity_seconds: u32,
        /// Number of backends for clients outside of the cluster, and for all where `inside` is nothing.
        backends: u32,
        /// Number of backends for clients inside the cluster under `externalTrafficPolicy: Local`.
        inside: Option<u32>,
    },
    /// `SERVICES` has not got the destination.
    NoFrontend,
    /// The record of the frontend is of another key: the agent is replacing it.
    Torn,
    /// The destination is no frontend; what else it is.
    Address {
        /// That.
        is: Unlisted,
    },
    /// At an address of the node only a packet that opens a connection can be for the service.
    IsNotOpened,
    /// A reset that belongs to no flow.
    StrayReset,
    /// Whether the client is inside the cluster, where that matters.
    Client {
        /// How it is known.
        is: ClientSide,
        /// Backends for such a client.
        backends: u32,
    },
    /// The frontend is for processes of the node only.
    SocketsOnly,
    /// The service has `loadBalancerSourceRanges`.
    SourceRanges {
        /// Whether the client is in one.
        allowed: bool,
    },
    /// There is no backend for this client.
    NoBackends {
        /// Whether there are some elsewhere, which the traffic policy does not allow.
        elsewhere: bool,
    },
    /// Who accepts a connection has been asked for it past us.
    AcceptsWhatNobodyAsked,
    /// What `AFFINITY` says of the client.
    Affinity {
        /// That.
        is: Holds,
    },
    /// The scheduler's choice.
    Scheduler {
        /// Which one.
        #[serde(serialize_with = "names::scheduler")]
        scheduler: Scheduler,
        /// How it chooses.
        how: Method,
        /// Backends there are.
        of: u32,
        /// Entries of its table; 0 is none.
        table: u32,
    },
    /// The client has asked a backend in vain, so it is led to the next one.
    AnotherBackend,
    /// A record leads to backends that are not there.
    NoSuchBackend,
    /// Whose address the backend sees.
    Masquerade {
        /// That.
        source: Source,
    },
    /// The entry that leads back is another flow's.
    PortTaken {
        /// The client's port.
        port: u16,
    },
    /// `CONNTRACK` has no room.
    Full,
    /// A routed flow or one in a tunnel has no way to its backend.
    NoRoute,
    /// The packet leaves at once, past the stack.
    PastStack {
        /// Through which device.
        device: String,
    },
    /// The XDP program lets the packet go on to tc, which decides.
    LeftToTc,
    /// What the hook at hand has to do with the device, found out apart from the maps.
    Attached {
        /// The device.
        device: String,
        /// The hook.
        at: &'static str,
        /// Whether one of our programs is there.
        program: bool,
    },
}

/// Addresses and ports of one direction.
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

/// How packets of a flow travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Way {
    /// Through the stack.
    Stack,
    /// Through the stack, and are masqueraded where they leave.
    Masqueraded,
    /// This is that masquerading.
    Masquerade,
    /// Back to where they come from.
    Hairpin,
    /// Out again through a wire, masqueraded in the same step.
    Routed,
    /// In a tunnel to the backend's node.
    Tunnel,
    /// Past the stack, as soon as the next hop is known.
    Direct,
}

/// Why an entry has nothing to say to a packet that opens a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stale {
    /// Its other half is gone.
    HalfLost,
    /// Its connection has ended.
    Over,
    /// The client has asked its backend in vain, often enough.
    Unanswered,
    /// The service has not got its backend any more.
    BackendGone,
}

/// What an address is that is no frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Unlisted {
    /// Not one of the range of cluster IPs.
    OutOfRange,
    /// One of the range that no Service has, where such packets are dropped.
    UnknownVip,
    /// One of the range that no Service has, where such packets pass.
    Unknown,
    /// An address of the node, or of a load balancer.
    NoClusterIp,
    /// A cluster IP without this port.
    ClusterIp,
}

/// Whether a client is inside the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ClientSide {
    /// Inside, by its address.
    InsideByAddress,
    /// Inside, by the device it comes through.
    InsideByDevice,
    /// Outside.
    Outside,
}

/// What is remembered of a client with affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "state")]
pub enum Holds {
    /// Nothing.
    Nothing,
    /// A backend, too long ago.
    Expired {
        /// That.
        backend: SocketAddr,
    },
    /// A backend that is none of the service any more.
    Gone {
        /// That.
        backend: SocketAddr,
    },
    /// A backend.
    Backend {
        /// That.
        backend: SocketAddr,
        /// Seconds for which that holds, from now.
        seconds_left: u32,
    },
}

/// How a scheduler comes to its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Method {
    /// By chance.
    Chance,
    /// By whose turn it is on the CPU that the packet comes to.
    Turn,
    /// By a hash of what is known: always the same.
    Hash,
    /// By a hash of the source port among others, which was not given.
    HashOfPort,
    /// By the number of active flows.
    Load,
}

/// Whose address a backend sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "of", content = "address")]
pub enum Source {
    /// The client's own.
    Client,
    /// The client's own, although others are masqueraded: the packet does not leave the node.
    ClientOnNode,
    /// The node's.
    Node(IpAddr),
    /// Nobody's: the node has no address or no ports for that.
    Nobody,
}

/// What becomes of the packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Verdict {
    /// It goes on as it is.
    Untouched {
        /// The counter.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// It is translated by its flow.
    Translated {
        /// The counter.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
        /// What it becomes.
        to: Ends,
    },
    /// It begins a flow to one of these.
    Begins {
        /// One, if it is known which.
        backends: Vec<Candidate>,
    },
    /// It is answered with a refusal.
    Rejected {
        /// The counter.
        #[serde(serialize_with = "names::outcome")]
        outcome: Outcome,
    },
    /// It is dropped; a system call fails.
    Dropped {
        /// The counter.
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
    /// Its pod.
    pub pod: Option<String>,
    /// The counter.
    #[serde(serialize_with = "names::outcome")]
    pub outcome: Outcome,
    /// How packets get there.
    pub way: Way,
}

pub(super) fn socket(address: Address, port: u16) -> SocketAddr {
    SocketAddr::new(address.into(), port)
}

pub(super) fn endpoint(backend: &Backend) -> SocketAddr {
    socket(backend.address, backend.port)
}

/// Values of other crates by their names.
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
