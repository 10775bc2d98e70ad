//! The creation of a flow: its backend, how its packets go on, and the entries of both directions.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::generated::bpf_get_prandom_u32,
};
use lb_common::{
    Address, Backend, Choice, Outcome, Service,
    conntrack::{Flow, NextHop, Tuple, flow_flags},
};
use lb_ebpf::{
    parse::Packet,
    rules::forwarding::{Forwarding, forwarding},
    service::schedule,
};

use super::{
    active_flows, affinity,
    claim::{self, Claim, EEXIST},
    conntrack::{Keys, lookup, now},
    masquerade::{self, NO_ADDRESS},
};
use crate::datapath::{
    context::HookContext,
    forward::{routed, tunnel},
    maps::CONNTRACK,
    scratch::scratch,
    service,
};

/// The source ports that are tried in place of a client's own: all but the privileged ones.
const SOURCE_PORTS: Ports = Ports { first: 1024, count: 65_536 - 1024 };

/// Source ports to choose from.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Ports {
    /// One of them, at random.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the agent sets no range that ends above 65,535")]
    pub(super) fn random(self) -> u16 {
        // SAFETY: the helper takes nothing and only returns a number.
        let random = unsafe { bpf_get_prandom_u32() };
        (self.first + schedule::scale(random, self.count)) as u16
    }
}

/// A flow that a packet asks for; it lies in `SCRATCH`.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    /// The service, with the backends that this client may use.
    pub(crate) service: Service,
    /// The slot of the backend.
    pub(crate) slot: u32,
    /// Whether the client's address becomes the node's where packets leave towards the backend.
    pub(crate) masquerade: bool,
    /// Whether the backend is to answer the client directly.
    pub(crate) direct: bool,
    /// Why this backend was chosen.
    pub(crate) choice: Choice,
}

/// A flow that is being created. It lies in `SCRATCH`, because the stack has no room for so many tuples.
pub(crate) struct FlowSetup {
    /// Packets of the client.
    pub(crate) from: Tuple,
    /// Their tuple after the translation.
    pub(crate) to: Tuple,
    /// The source that packets of a masqueraded flow leave the node with, if a second flow translates it; else
    /// [`NO_ADDRESS`].
    pub(crate) node: Address,
    /// How packets go on: [`flow_flags::HAIRPIN`]; [`flow_flags::ROUTED`], alone or with [`flow_flags::TUNNEL`];
    /// [`flow_flags::MASQUERADED`]; or 0.
    pub(crate) flags: u8,
    /// The next hop, if it is known.
    pub(crate) next_hop: NextHop,
    /// Whether a port may be taken although the other end may still expect packets of its last connection.
    pub(crate) eager: bool,
    /// [`Service::id`]
    pub(crate) service: u32,
    /// The counter of the flow: [`lb_common::Backend::active_flows_slot`].
    pub(crate) active_flows_slot: u32,
    /// The source ports that `to` may have in place of its own.
    pub(crate) ports: Ports,
    /// The translated tuple of the entry in the making.
    pub(crate) back: Tuple,
    /// Key of the entry in the making.
    pub(crate) key: Tuple,
    /// The entry in the making.
    pub(crate) flow: Flow,
    /// Whether the reverse entries are inserted.
    pub(super) claim: Claim,
    /// Keys of a connection whose port is being taken.
    pub(super) replaced: Keys,
}

impl FlowSetup {
    /// Whether a second flow exchanges the client's address for the node's.
    #[inline(always)]
    pub(crate) fn is_masqueraded(&self) -> bool {
        self.node != NO_ADDRESS
    }

    /// Whether the source port is one of the node's. A connection gives up such a port as a whole.
    #[inline(always)]
    pub(super) fn has_port_of_node(&self) -> bool {
        self.flags == flow_flags::ROUTED || self.is_masqueraded()
    }

    #[inline(always)]
    fn is_tunnelled(&self) -> bool {
        self.flags & flow_flags::TUNNEL != 0
    }
}

/// The way that the packets of a new flow take.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Created {
    /// Through the stack.
    Plain = 0,
    /// Routed, with or without a tunnel.
    Routed = 1,
}

/// Inserts the entries of both directions for the first packet of the flow that `SCRATCH` asks for, in place of those
/// of an `earlier` connection with its five-tuple. With `only_routed`, as for the XDP program, any other flow is left
/// to tc.
#[inline(always)]
pub(crate) fn create(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    only_routed: bool,
) -> Result<Created, Outcome> {
    let backend = plan(context, packet, only_routed)?;
    let flags = scratch()?.setup().flags;
    if only_routed && flags & flow_flags::ROUTED == 0 {
        return Err(Outcome::OtherHook);
    }
    if flags & flow_flags::TUNNEL == 0 {
        claim::claim()?;
    }
    let setup = scratch()?.setup();
    if earlier {
        delete_earlier(setup);
    }
    insert_forward(setup, earlier)?;
    let scratch = scratch()?;
    let (request, setup) = (scratch.request(), scratch.setup());
    if request.service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, request.service.id, backend);
    }
    Ok(if setup.flags & flow_flags::ROUTED != 0 { Created::Routed } else { Created::Plain })
}

/// Decides what the packets become and how they go on to the backend, which is returned.
#[inline(always)]
fn plan(context: &HookContext, packet: &Packet, only_routed: bool) -> Result<&'static Backend, Outcome> {
    let scratch = scratch()?;
    let (request, setup) = (scratch.request(), scratch.setup());
    let backend = service::backend(request.slot).ok_or(Outcome::NoBackend)?;
    (setup.from, setup.to) = (packet.tuple, packet.tuple);
    (setup.to.destination, setup.to.destination_port) = (backend.address, backend.port);
    setup.node = NO_ADDRESS;
    setup.flags = 0;
    setup.next_hop = NextHop::UNKNOWN;
    setup.service = request.service.id;
    setup.active_flows_slot = backend.active_flows_slot;
    setup.ports = SOURCE_PORTS;
    let client = &packet.tuple.source;
    match forwarding(client, backend, request.masquerade, request.direct, || tunnel::set_ends(setup)) {
        Forwarding::Hairpin => {
            setup.to.source = setup.from.destination;
            setup.flags = flow_flags::HAIRPIN;
        }
        // `set_ends` has filled in the tunnel.
        Forwarding::Tunnel | Forwarding::Plain | Forwarding::PlainOnNode => {}
        Forwarding::Masquerade => {
            setup.ports = masquerade::ports()?;
            setup.to.source_port = setup.ports.random();
            let node = routed::source(context, &setup.to, &mut setup.next_hop);
            if node != NO_ADDRESS {
                setup.to.source = node;
                setup.flags = flow_flags::ROUTED;
            } else if !only_routed {
                setup.node = masquerade::source(context, &setup.to)?;
                setup.flags = flow_flags::MASQUERADED;
            }
        }
    }
    Ok(backend)
}

/// Ends the earlier connection of this client's port, and deletes its reverse entry.
#[inline(never)]
fn delete_earlier(setup: &mut FlowSetup) {
    if let Some(earlier) = lookup(&setup.from) {
        active_flows::end(earlier);
        if earlier.is_tunnelled() {
            return;
        }
        setup.key = earlier.to.reversed();
        if setup.key != setup.to.reversed() {
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&setup.key).unwrap_or_default();
        }
    }
}

/// Inserts the entry of the direction from the client. If another CPU has just inserted one for another packet of
/// this flow, that one stands and our reverse entries are released.
#[inline(never)]
fn insert_forward(setup: &mut FlowSetup, replace: bool) -> Result<(), Outcome> {
    setup.flow.init(&setup.from, &setup.to, setup.service, setup.flags, now());
    setup.flow.next_hop = setup.next_hop;
    setup.flow.active_flows_slot = setup.active_flows_slot;
    if replace && let Some(earlier) = lookup(&setup.from) {
        setup.flow.continue_counters(earlier);
    }
    let flags = if replace { BPF_ANY } else { BPF_NOEXIST };
    let result = CONNTRACK.insert(&setup.from, &setup.flow, u64::from(flags));
    if result.is_err() && !setup.is_tunnelled() && !has_same_target(setup) {
        claim::release(setup);
    }
    match result {
        Ok(()) => {
            active_flows::begin(setup.active_flows_slot);
            Ok(())
        }
        Err(EEXIST) => Ok(()),
        Err(_) => Err(Outcome::ConntrackFull),
    }
}

/// Whether the forward entry that is there leads to the same backend by the same source port.
#[inline(always)]
fn has_same_target(setup: &FlowSetup) -> bool {
    lookup(&setup.from).is_some_and(|flow| flow.to == setup.to)
}
