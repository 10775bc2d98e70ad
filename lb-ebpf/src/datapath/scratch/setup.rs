//! The flow that a packet requests, and the flow that is being created: values of `SCRATCH`.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use lb_common::{
    Address, Choice, Service,
    conntrack::{Flow, Tuple, flow_flags},
};
use lb_ebpf::{rules::source_port, service::schedule};

use crate::datapath::flow::table::{Inserted, Place};

/// The flow that a packet requests.
#[derive(Clone, Copy)]
pub(crate) struct FlowRequest {
    /// The service, with the backends that this client may use.
    pub(crate) service: Service,
    /// The slot of the backend.
    pub(crate) slot: u32,
    /// Whether an address of the node replaces the client's address where packets leave towards the backend.
    pub(crate) masquerade: bool,
    /// Whether a backend on another node is to answer the client directly (direct server return).
    pub(crate) dsr: bool,
    /// Why this backend was chosen.
    pub(crate) choice: Choice,
}

/// A flow that is being created. It lies in `SCRATCH`, because the stack has no room for so many tuples.
pub(crate) struct FlowSetup {
    /// The tuple of the client's packets.
    pub(crate) from: Tuple,
    /// The tuple of the client's packets after the translation.
    pub(crate) to: Tuple,
    /// The source address with which packets leave the node if a second flow translates the source
    /// ([`Self::is_masqueraded`]); else without meaning.
    pub(crate) node: Address,
    /// How the programs forward the packets: [`flow_flags::HAIRPIN`]; [`flow_flags::ROUTED`], alone or with
    /// [`flow_flags::TUNNEL`] (and perhaps [`flow_flags::GUE`]); [`flow_flags::CAUGHT`], alone or with
    /// [`flow_flags::MASQUERADED`]; [`flow_flags::MASQUERADED`]; [`flow_flags::AT_EGRESS`], if the node itself is the
    /// client; or 0. Unless the flow is routed, [`flow_flags::PROXY_PROTOCOL`] may be set as well.
    pub(crate) flags: u8,
    /// Whether a port may be taken although the other end may still expect packets of the port's last connection.
    pub(crate) eager: bool,
    /// The [`Service::id`] of the flow's service; 0 if the node itself is the client.
    pub(crate) service: u32,
    /// The counter of the flow: [`lb_common::Backend::active_flows_slot`].
    pub(crate) active_flows_slot: u32,
    /// Whether the ports towards the backend have run out in this tick.
    pub(crate) ran_out: bool,
    /// The source ports that `to` may get in place of the client's own.
    pub(crate) ports: Ports,
    /// The translated tuple of the entry that is being created.
    pub(crate) back: Tuple,
    /// The key of the entry that is being created.
    pub(crate) key: Tuple,
    /// The entry that is being created.
    pub(crate) flow: Flow,
    /// The result of the last attempt to insert the reverse entries.
    pub(crate) claim: Claim,
}

impl FlowSetup {
    /// Whether a second flow exchanges the client's address for the node's.
    #[inline(always)]
    pub(crate) fn is_masqueraded(&self) -> bool {
        self.flags & flow_flags::MASQUERADED != 0
    }

    /// The tuple of packets that the backend sends.
    #[inline(always)]
    pub(crate) fn from_backend(&self) -> Tuple {
        let mut tuple = self.to.reversed();
        if self.is_masqueraded() {
            tuple.destination = self.node;
        }
        tuple
    }

    #[inline(always)]
    pub(crate) fn is_tunnelled(&self) -> bool {
        self.flags & flow_flags::TUNNEL != 0
    }
}

/// Source ports to choose from.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Ports {
    /// A random port of the range.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the agent sets no range that ends above 65,535")]
    pub(crate) fn random(self) -> u16 {
        // SAFETY: the helper takes nothing and only returns a number.
        let random = unsafe { bpf_get_prandom_u32() };
        (self.first + schedule::scale(random, self.count)) as u16
    }

    /// Whether the range has this port.
    #[inline(always)]
    pub(crate) fn contains(self, port: u16) -> bool {
        u32::from(port).wrapping_sub(self.first) < self.count
    }

    /// The port to try after `port`.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the agent sets no range that ends above 65,535")]
    pub(crate) fn after(self, port: u16) -> u16 {
        let offset = |port: u16| u32::from(port).wrapping_sub(self.first);
        (self.first + source_port::next(offset(port), self.count, offset(self.random()))) as u16
    }
}

/// The error of an insertion whose key already exists.
pub(crate) const EEXIST: i32 = -17;

/// The result of an attempt to insert the reverse entries of a flow.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Claim {
    /// Another flow has the key of a reverse entry, or a socket of the node has the source port: another source port
    /// may be free.
    Taken = 0,
    /// The reverse entries are inserted.
    Made = 1,
    /// The flow table and its overflow have no room, or the kernel has no memory.
    NoRoom = 2,
}

impl Claim {
    /// The claim that results from the insertion of a reverse entry.
    #[inline(always)]
    pub(crate) const fn of(inserted: Inserted) -> Self {
        match inserted {
            Inserted::New => Self::Made,
            Inserted::Exists => Self::Taken,
            Inserted::Full => Self::NoRoom,
        }
    }
}

/// Entries that are deleted together. The stack has no room for their keys.
pub(crate) struct Keys {
    /// The place of the reverse entry whose source port a new flow tries to take.
    pub(crate) place: Place,
    /// The key of the other entry of the flow that ends.
    pub(crate) other: Tuple,
    /// The place of the entry with the key `other`.
    pub(crate) other_place: Place,
    /// For the flow log: the reverse entry of the flow whose forward entry has the key `other`.
    pub(crate) reply: Flow,
    /// If the connection is masqueraded: the key of the reverse entry of its first flow.
    pub(crate) first_reply: Tuple,
}
