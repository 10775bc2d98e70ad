use bytemuck::Zeroable;

#[cfg(feature = "next-layout")]
pub use super::next_layout::Flow;
use super::{Tick, Tuple, observe::is_after};
use crate::{checksum::Sum, protocol};

/// Bits of [`Flow::flags`].
pub mod flow_flags {
    /// The direction from the backend to the client.
    pub const REPLY: u8 = 1;
    /// Packets are translated where they leave the node (tc egress); without this bit, where they enter (tc ingress or
    /// XDP).
    pub const AT_EGRESS: u8 = 2;
    /// Hairpin: client and backend have the same address (a pod, or another node with a host-network endpoint, reaches
    /// itself), and translated packets go back through the device they came from. Together with [`AT_EGRESS`], this bit
    /// marks a [caught](CAUGHT) flow instead.
    pub const HAIRPIN: u8 = 4;
    /// The second translation of a masqueraded connection: the programs replace the client's address by the node's
    /// where packets leave towards the backend, and restore it where the backend's replies enter. The first translation
    /// (VIP to backend) is a flow of its own.
    pub const SECOND_OF_MASQUERADED: u8 = 8;
    /// Client and backend are both beyond wire devices. Packets of both directions are translated where they enter (VIP
    /// and masquerading in one step), and then bypass the stack. Tunnelled flows also have this bit: see [`TUNNEL`].
    pub const ROUTED: u8 = 16;
    /// The backend is on another node and answers the client directly. Packets go there untouched in a tunnel.
    /// [`Flow::to`](super::Flow::to) holds the ends of the tunnel (this node's address and the backend's) and the
    /// backend's port. The flow has only this entry: replies bypass this node. Always with [`ROUTED`].
    pub const TUNNEL: u8 = 32;
    /// With [`TUNNEL`]: the tunnel is GUE (without this bit, IP in IP); the source port of `to` is that of the GUE
    /// datagrams.
    pub const GUE: u8 = 64;
    /// Without [`TUNNEL`]: the backend gets a PROXY protocol header before the client's first byte, so the programs
    /// shift the sequence numbers of the client's bytes by the length of the header. Both entries of the flow have this
    /// bit. Tunnelled flows never carry that header, so [`GUE`] can use the same bit.
    pub const PROXY_PROTOCOL: u8 = 64;
    /// The first translation of a masqueraded connection: its packets must also pass the hook that makes the
    /// [second translation](SECOND_OF_MASQUERADED).
    pub const MASQUERADED: u8 = 128;

    /// A caught flow: its client's device has no programs, so the stack routes its packets into the [catch
    /// device](crate::device_flags::CATCH). The program at the egress of the catch device translates both directions.
    /// If the flow begins at the catch device, the program at the ingress of that device translates the first packet.
    /// Translated packets have the VIP as source, so that the stack also routes replies into the catch device.
    pub const CAUGHT: u8 = HAIRPIN | AT_EGRESS;

    /// The flags of the reverse entry. One hook (ingress or egress) translates both directions of a hairpin, caught or
    /// routed flow. For any other flow, one hook translates one direction, and the other hook the other direction.
    pub const fn reverse(flags: u8) -> u8 {
        flags ^ if flags & (HAIRPIN | ROUTED) != 0 { REPLY } else { REPLY | AT_EGRESS }
    }

    /// The number of entries that a new connection needs, if these are the flags of the forward entry of the
    /// connection's first flow.
    pub const fn entries(flags: u8) -> usize {
        match flags {
            _ if flags & TUNNEL != 0 => 1,
            _ if flags & MASQUERADED != 0 => 4,
            _ => 2,
        }
    }

    /// Whether the flow is a connection of the node itself, not of a Service. A socket of the node has chosen a source
    /// port that another flow to the same endpoint already has, so the programs replace that port where packets leave
    /// the node.
    pub const fn is_of_node(flags: u8) -> bool {
        matches!(flags, AT_EGRESS | REPLY)
    }
}

/// Bits of [`Flow::seen`]: what this direction has sent so far. SCTP chunks count as the segments to which
/// [`Segment::of_chunk`](crate::conntrack::Segment::of_chunk) converts them.
pub mod seen {
    /// A packet other than a RST.
    pub const PACKET: u8 = 1;
    /// A SYN.
    pub const SYN: u8 = 2;
    /// A segment with ACK.
    pub const ACK: u8 = 4;
    /// A FIN.
    pub const FIN: u8 = 8;
    /// A RST that the receiver accepts: see [`Flow::accepts_reset`](super::Flow::accepts_reset).
    pub const RST: u8 = 16;
    /// Datagrams that span more than about 2 s, and so are more than one query and its answer.
    pub const STREAM: u8 = 32;
    /// A TCP segment without SYN: from then on, a SYN is implausible, see
    /// [`Flow::observe_segment`](super::Flow::observe_segment). In SCTP, a packet that does not begin with INIT or INIT
    /// ACK.
    pub const SYNCHRONISED: u8 = 64;
    /// With [`PROXY_PROTOCOL`](super::flow_flags::PROXY_PROTOCOL). In the entry of the client's direction: the programs
    /// have sent the PROXY protocol header. In the reverse entry: the backend has acknowledged the whole header.
    pub const PROXY_HEADER: u8 = 128;
}

/// An entry of the flow table: how packets of one direction are translated, and what this direction has sent.
#[cfg(not(feature = "next-layout"))]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, Zeroable)]
pub struct Flow {
    /// The tuple of translated packets.
    pub to: Tuple,
    /// [`crate::Service::id`] of the service port.
    pub service: u32,
    /// When this direction sent its last packet, rejected RSTs left out; at first, when the entry was created.
    pub last_seen: Tick,
    /// TCP: sequence number after the last byte sent. SCTP: verification tag that this direction sends. UDP: tick of
    /// the first datagram.
    pub next_seq: u32,
    /// TCP: last acknowledgement sent.
    pub last_ack: u32,
    /// The difference that the change of addresses makes to a checksum; one's complement, network byte order.
    pub address_delta: u16,
    /// The difference that the change of ports makes to a checksum; one's complement, network byte order.
    pub port_delta: u16,
    /// Bits of [`seen`].
    pub seen: u8,
    /// Bits of [`flow_flags`].
    pub flags: u8,
    /// TCP and SCTP: how many SYNs (or INITs) of this direction were recorded, retransmissions included.
    pub syns: u16,
    /// Slot of `ACTIVE` that counts this flow while it is active; 0 means none. The programs count the flow by the
    /// entry of the client's direction; the reverse entry has only a copy of the slot number.
    pub active_flows_slot: u32,
    /// Packets of this direction, wrapping around; see [`Flow::count_packet`].
    pub packets: u32,
    /// Bytes of this direction's packets in the lower 48 bits; above them, how many earlier flows have used this entry:
    /// see [`Flow::bytes`] and [`Flow::generation`].
    pub traffic: u64,
}

/// How many of the lower bits of [`Flow::traffic`] count bytes.
const BYTE_COUNT_BITS: u32 = 48;

#[cfg(not(feature = "next-layout"))]
const _: () = assert!(size_of::<Flow>() == 80);

#[cfg(not(feature = "next-layout"))]
crate::layout::describe!(Flow {
    to.source,
    to.destination,
    to.source_port,
    to.destination_port,
    to.protocol,
    to.zero,
    to.zeros,
    service,
    last_seen,
    next_seq,
    last_ack,
    address_delta,
    port_delta,
    seen,
    flags,
    syns = "asked",
    active_flows_slot = "counter",
    packets,
    traffic,
});

impl Flow {
    /// An entry that translates packets of `from` into packets of `to`; `flags` are [`flow_flags`].
    #[inline(always)]
    pub fn new(from: &Tuple, to: &Tuple, service: u32, flags: u8, now: Tick) -> Self {
        let mut flow = Self::zeroed();
        flow.init(from, to, service, flags, now);
        flow
    }

    /// Like [`Self::new`], but writes the entry in place: an entry would take too much of a BPF program's stack.
    #[inline(always)]
    pub fn init(&mut self, from: &Tuple, to: &Tuple, service: u32, flags: u8, now: Tick) {
        let addresses = Sum::ZERO
            .sub_16(from.source.bytes())
            .sub_16(from.destination.bytes())
            .add_16(to.source.bytes())
            .add_16(to.destination.bytes());
        let ports = Sum::ZERO
            .sub_word(from.source_port.to_be())
            .sub_word(from.destination_port.to_be())
            .add_word(to.source_port.to_be())
            .add_word(to.destination_port.to_be());
        self.to = *to;
        self.service = service;
        self.last_seen = now;
        (self.next_seq, self.last_ack) = (0, 0);
        (self.address_delta, self.port_delta) = (addresses.fold(), ports.fold());
        (self.seen, self.flags, self.syns) = (0, flags, 0);
        self.active_flows_slot = 0;
        (self.packets, self.traffic) = (0, 0);
    }

    /// Whether this is the direction from the backend to the client.
    #[inline(always)]
    pub const fn is_reply(&self) -> bool {
        self.flags & flow_flags::REPLY != 0
    }

    /// Whether this is an entry of a client's flow to a Service, with the client's own address. False for the second
    /// flow of a masqueraded connection, which has the same packets, and for a connection of the node itself.
    #[inline(always)]
    pub const fn is_of_client(&self) -> bool {
        !self.is_second() && !flow_flags::is_of_node(self.flags)
    }

    /// Whether this is an entry of the first flow of a connection that a second flow masquerades.
    #[inline(always)]
    pub const fn has_second(&self) -> bool {
        self.flags & flow_flags::MASQUERADED != 0
    }

    /// Whether this is an entry of the second flow of a masqueraded connection, which replaces the source address.
    #[inline(always)]
    pub const fn is_second(&self) -> bool {
        self.flags & flow_flags::SECOND_OF_MASQUERADED != 0
    }

    /// Whether this entry and the entry with the key `from` are the two entries of one flow.
    #[inline(always)]
    pub fn leads_back_to(&self, from: &Tuple) -> bool {
        self.to.reversed() == *from
    }

    /// Whether the backend gets a PROXY protocol header: see [`flow_flags::PROXY_PROTOCOL`].
    #[inline(always)]
    pub const fn has_proxy_header(&self) -> bool {
        self.flags & (flow_flags::PROXY_PROTOCOL | flow_flags::TUNNEL) == flow_flags::PROXY_PROTOCOL
    }

    /// Whether packets go to another node in a tunnel; such a flow has no reverse entry.
    #[inline(always)]
    pub const fn is_tunnelled(&self) -> bool {
        self.flags & flow_flags::TUNNEL != 0
    }

    /// The tuple whose source address and source port a route lookup uses. As in the stack, that is `tuple`, the
    /// packet's tuple before its translation. For a tunnelled flow, it is the tuple of the outer packet, which this
    /// node sends.
    #[inline(always)]
    pub const fn routed_from<'a>(&'a self, tuple: &'a Tuple) -> &'a Tuple {
        if self.is_tunnelled() { &self.to } else { tuple }
    }

    /// Whether a tc program may rewrite packets of the flow and send them out, bypassing the stack. `all` is whether
    /// the node lets all flows bypass the stack (`--forwarding direct`); otherwise only routed flows may.
    ///
    /// False for tunnelled flows, whose packets get other headers. Of the flows that are not routed, also false for:
    ///
    /// - hairpin and caught flows, and connections of the node itself;
    /// - flows with a PROXY protocol header, whose sequence numbers are shifted;
    /// - SCTP, whose checksum covers whole packets;
    /// - the second translation of a masqueraded connection, which the egress program of the device towards the backend
    ///   makes: packets must reach that program.
    #[inline(always)]
    pub const fn may_bypass_stack(&self, all: bool) -> bool {
        const SECOND_TRANSLATION: u8 = flow_flags::SECOND_OF_MASQUERADED | flow_flags::AT_EGRESS;
        if self.flags & flow_flags::ROUTED != 0 {
            return !self.is_tunnelled();
        }
        all && self.to.protocol != protocol::SCTP
            && self.flags & (flow_flags::HAIRPIN | flow_flags::PROXY_PROTOCOL) == 0
            && self.flags & SECOND_TRANSLATION != SECOND_TRANSLATION
            && !flow_flags::is_of_node(self.flags)
    }

    /// Counts a packet of `bytes` bytes, network header included.
    ///
    /// The counters change in place, without a lock, because packets of one direction mostly arrive on one CPU at a
    /// time. If two CPUs count at once, the entry may miss one of the packets. A packet that a device will cut into
    /// segments counts as one, as in nf_conntrack.
    #[inline(always)]
    pub const fn count_packet(&mut self, bytes: u32) {
        self.packets = self.packets.wrapping_add(1);
        self.traffic = self.traffic.wrapping_add(bytes as u64);
    }

    /// Bytes of the packets of this direction.
    pub const fn bytes(&self) -> u64 {
        Self::bytes_in(self.traffic)
    }

    /// How many earlier flows have used this entry.
    pub const fn generation(&self) -> u16 {
        Self::generation_in(self.traffic)
    }

    /// [`Self::bytes`] of an entry with this value of [`Self::traffic`].
    pub const fn bytes_in(traffic: u64) -> u64 {
        traffic & ((1 << BYTE_COUNT_BITS) - 1)
    }

    /// [`Self::generation`] of an entry with this value of [`Self::traffic`].
    pub const fn generation_in(traffic: u64) -> u16 {
        (traffic >> BYTE_COUNT_BITS) as u16
    }

    /// Continues the counters of `earlier`, the flow of the same tuple that this flow replaces, so that a periodic
    /// reader counts the packets of both. Also counts the replaced flows; beyond 65,535 of them, all counters start
    /// from 0 again.
    #[inline(always)]
    pub const fn continue_counters(&mut self, earlier: &Self) {
        (self.packets, self.traffic) = match earlier.traffic.checked_add(1 << BYTE_COUNT_BITS) {
            Some(traffic) => (earlier.packets, traffic),
            None => (0, 0),
        };
    }

    /// Merges into this copy of an entry what the programs have recorded in the original, `other`, since the copy was
    /// made.
    pub fn merge(&mut self, other: &Self) {
        // In the copy, another connection has replaced the flow since the copy was made.
        if self.to != other.to || self.syns > other.syns {
            return;
        }
        let is_new = self.seen & seen::PACKET == 0;
        let is_tcp = self.to.protocol == protocol::TCP;
        if is_new || is_tcp && is_after(other.next_seq, self.next_seq) {
            self.next_seq = other.next_seq;
        }
        if is_new || is_tcp && is_after(other.last_ack, self.last_ack) {
            self.last_ack = other.last_ack;
        }
        self.seen |= other.seen;
        self.syns = other.syns;
        self.last_seen = self.last_seen.max(other.last_seen);
        if other.traffic > self.traffic {
            (self.packets, self.traffic) = (other.packets, other.traffic);
        }
        // The CPU that ends a flow decrements the flow's counter in `ACTIVE`, and sets the slot number to 0 in the
        // entry (copy or original) that it has found. The merged entry takes over the 0, so that no CPU decrements the
        // counter again.
        if other.active_flows_slot == 0 {
            self.active_flows_slot = 0;
        }
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Flow {}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ACK, FIN, NOW, SYN, pair, segment, tuple};
    use super::*;

    #[test]
    fn flags_of_the_reverse_of_the_reverse_entry_are_the_same() {
        use flow_flags::{AT_EGRESS, CAUGHT, HAIRPIN, REPLY, SECOND_OF_MASQUERADED, reverse};
        for (flags, expected) in [
            (0, REPLY | AT_EGRESS),
            (HAIRPIN, HAIRPIN | REPLY),
            (CAUGHT, CAUGHT | REPLY),
            (SECOND_OF_MASQUERADED | AT_EGRESS, SECOND_OF_MASQUERADED | REPLY),
        ] {
            assert_eq!((reverse(flags), reverse(expected)), (expected, flags));
        }
    }

    #[test]
    fn flows_with_a_proxy_protocol_header_never_bypass_the_stack() {
        use flow_flags::{GUE, MASQUERADED, PROXY_PROTOCOL, REPLY, ROUTED, TUNNEL};
        let (flow, _) = pair(protocol::TCP);
        for (flags, has_header, bypasses, may_bypass) in [
            (0, false, false, true),
            (PROXY_PROTOCOL, true, false, false),
            (PROXY_PROTOCOL | REPLY, true, false, false),
            (PROXY_PROTOCOL | MASQUERADED, true, false, false),
            (ROUTED, false, true, true),
            (ROUTED | TUNNEL | GUE, false, false, false),
        ] {
            let flow = Flow { flags, ..flow };
            let found = (flow.has_proxy_header(), flow.may_bypass_stack(false), flow.may_bypass_stack(true));
            assert_eq!(found, (has_header, bypasses, may_bypass), "{flags}");
        }
    }

    #[test]
    fn merge_adds_what_a_copy_has_missed() {
        let (mut copy, reply) = pair(protocol::TCP);
        copy.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        let (mut original, copied) = (copy, copy);
        original.observe_segment(&segment(ACK, 1001, 5001, 7), Tick(NOW.0 + 1));
        copy.merge(&original);
        assert_eq!(copy, original);
        copy.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), Tick(NOW.0 + 2));
        let ended = copy;
        copy.merge(&original);
        copy.merge(&copied);
        assert_eq!(copy, ended, "an older copy takes nothing back");
        let mut again = Flow::new(&tuple(protocol::TCP), &reply.to, 1, 0, NOW);
        let begun = again;
        again.merge(&ended);
        assert_eq!(again, begun, "another backend");
        again = Flow { syns: 2, ..original };
        again.merge(&ended);
        assert_eq!(again.seen, original.seen, "a connection that began since");
    }
}
