//! Connection tracking: the entries of `CONNTRACK` and the life cycle of a flow.
//!
//! A flow has two entries, one for each direction. An entry holds the whole translated tuple, so the key of its
//! peer can be computed (`entry.to.reversed()`), and only what *its own direction* has sent. So an established
//! packet needs one lookup and no CPU writes to a line that the other direction's CPU writes to; the rare events
//! that depend on both directions (RST, a SYN on an existing entry, expiry) look at both entries.

use bytemuck::{Pod, Zeroable};

use crate::{Address, checksum::Sum, layout::describe, protocol};

/// The five values that name one direction of a flow; key of `CONNTRACK`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Tuple {
    /// Source address.
    pub source: Address,
    /// Destination address.
    pub destination: Address,
    /// Source port, host byte order.
    pub source_port: u16,
    /// Destination port, host byte order.
    pub destination_port: u16,
    /// IP protocol number.
    #[cfg(not(feature = "next-layout"))]
    pub protocol: u8,
    /// Always 0. (Two fields, because filling three octets makes LLVM call `memset`.)
    pub zero: u8,
    /// IP protocol number.
    #[cfg(feature = "next-layout")]
    pub protocol: u8,
    /// Always 0.
    pub zeros: u16,
}

const _: () = assert!(size_of::<Tuple>() == 40);

describe!(Tuple {
    source,
    destination,
    source_port,
    destination_port,
    #[cfg(not(feature = "next-layout"))]
    protocol,
    zero,
    #[cfg(feature = "next-layout")]
    protocol,
    zeros,
});

impl Tuple {
    /// The tuple of a packet; ports in host byte order.
    #[inline(always)]
    pub const fn new(
        source: Address,
        destination: Address,
        source_port: u16,
        destination_port: u16,
        protocol: u8,
    ) -> Self {
        Self { source, destination, source_port, destination_port, protocol, zero: 0, zeros: 0 }
    }

    /// The tuple of the opposite direction.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self::new(self.destination, self.source, self.destination_port, self.source_port, self.protocol)
    }
}

/// Bits of [`Flow::flags`].
pub mod flow_flags {
    /// The direction from the backend to the client.
    pub const REPLY: u8 = 1;
    /// Translated where packets leave the node towards the client (tc egress); else where they enter (tc ingress).
    pub const AT_EGRESS: u8 = 2;
    /// Client and backend are the same pod: translated packets go back through the device they came from.
    pub const HAIRPIN: u8 = 4;
    /// The second translation of a masqueraded connection: the client's address becomes the node's where packets leave
    /// towards the backend, and back where the backend's enter. The first one (VIP to backend) is a flow of its own.
    pub const MASQUERADE: u8 = 8;
    /// Client and backend are both beyond the wire: packets of both directions are translated where they enter, VIP and
    /// masquerading in one step, and sent on at once, past the stack.
    pub const ROUTED: u8 = 16;
    /// The backend is on another node and answers the client directly. Packets go there untouched in a tunnel, whose ends
    /// [`Flow::to`](super::Flow::to) names: this node's address, and the backend's (with its port, for who asks which backend it
    /// is). The flow has this one entry: nothing comes back. Always with [`ROUTED`].
    pub const TUNNEL: u8 = 32;
    /// That tunnel is GUE, else IP in IP; the source port of `to` is that of its datagrams.
    pub const GUE: u8 = 64;
    /// Of a masqueraded connection the first translation: packets have to pass the hook where the second one is made.
    pub const MASQUERADED: u8 = 128;

    /// The flags of the opposite direction: a flow is translated at one hook on its way there and at the other on its way
    /// back, unless it turns around.
    pub const fn peer(flags: u8) -> u8 {
        flags ^ if flags & (HAIRPIN | ROUTED) != 0 { REPLY } else { REPLY | AT_EGRESS }
    }
}

/// Bits of [`Flow::seen`]: what this direction has sent so far.
pub mod seen {
    /// Any packet.
    pub const PACKET: u8 = 1;
    /// A TCP SYN.
    pub const SYN: u8 = 2;
    /// A TCP segment that acknowledges.
    pub const ACK: u8 = 4;
    /// A TCP FIN.
    pub const FIN: u8 = 8;
    /// A TCP RST within the window.
    pub const RST: u8 = 16;
    /// Datagrams over more than a moment: no mere question or answer.
    pub const STREAM: u8 = 32;
}

/// A moment in coarse monotonic time: `CLOCK_MONOTONIC` nanoseconds shifted right by 30, about 1.07 s each.
/// Shifting costs one instruction where dividing into seconds would cost dozens.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable)]
pub struct Tick(pub u32);

impl Tick {
    /// The tick of a `CLOCK_MONOTONIC` time in nanoseconds.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "2^32 ticks are 146 years of uptime")]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self((nanos >> 30) as u32)
    }

    /// The ticks that so many seconds last, rounded up.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "fewer ticks than seconds")]
    pub const fn in_seconds(seconds: u32) -> u32 {
        // A tick is 1.0737 s; 15,259 / 2^14 is a little more than its inverse.
        ((seconds as u64 * 15_259) >> 14) as u32 + 1
    }

    /// Whole seconds from `earlier` to here; 0 if it is later.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a u32 of ticks has under 2^33 seconds; saturated before"
    )]
    pub const fn seconds_since(self, earlier: Self) -> u32 {
        let seconds = ((self.0.saturating_sub(earlier.0) as u64) << 30) / 1_000_000_000;
        if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 }
    }
}

/// How packets of one direction leave: what the routing table and the neighbours said at one moment. Only flows whose packets
/// go past the stack have one.
///
/// Two CPUs that renew it at once while the route changes may mix two answers; a packet that leaves by such a mixture is
/// lost on the wire, as packets are while routes change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct NextHop {
    /// MAC address of the next hop.
    pub destination: [u8; 6],
    /// MAC address of the device that the packets leave through.
    pub source: [u8; 6],
    /// Interface index of that device.
    pub device: u32,
    /// Octets of the largest IP packet that goes this way.
    pub mtu: u16,
    /// See [`next_hop_flags`].
    pub flags: u16,
    /// When that was so; older answers are renewed. 0 is never.
    pub resolved_at: Tick,
}

const _: () = assert!(size_of::<NextHop>() == 24);

impl NextHop {
    /// One that nobody has asked for.
    pub const UNKNOWN: Self =
        Self { destination: [0; 6], source: [0; 6], device: 0, mtu: 0, flags: 0, resolved_at: Tick(0) };
}

/// Bits of [`NextHop::flags`].
pub mod next_hop_flags {
    /// There is such a way. Else packets have to go through the stack, and the rest of the hop means nothing.
    pub const KNOWN: u16 = 1;
    /// The device takes frames of XDP programs on other devices.
    pub const TAKES_FRAMES: u16 = 2;
    /// The device is one end of a pair, and packets go to the other end at once.
    pub const PEER: u16 = 4;
    /// No packet has gone this way since it was asked for.
    pub const FRESH: u16 = 8;
}

/// Value of `CONNTRACK`: how packets of one direction are translated, and what this direction has sent.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// Always 0.
    #[cfg(feature = "next-layout")]
    pub ahead: [u32; 16],
    /// The tuple with which packets go on.
    pub to: Tuple,
    /// [`crate::Service::id`] of the service port.
    pub service: u32,
    /// When this direction was last seen.
    pub last_seen: Tick,
    /// TCP: sequence number after the last octet sent. SCTP: verification tag that this direction sends. UDP: tick of the
    /// first datagram.
    pub next_seq: u32,
    /// TCP: last acknowledgement sent.
    pub last_ack: u32,
    /// By how much the addresses change a checksum; one's complement, memory order.
    pub address_delta: u16,
    /// By how much the ports change a checksum; one's complement, memory order.
    pub port_delta: u16,
    /// See [`seen`].
    pub seen: u8,
    /// See [`flow_flags`].
    pub flags: u8,
    /// TCP and SCTP: how often this direction has asked for the connection.
    pub syns: u16,
    /// How packets leave past the stack; zeros where they never did.
    pub next_hop: NextHop,
    /// Slot of `ACTIVE` where the flow is counted as long as it is active; 0 is none. That of the direction from the client
    /// counts, the other one has a copy.
    pub counter: u32,
    /// Packets of this direction, wrapping around; see [`Flow::count`].
    pub packets: u32,
    /// Their octets in the lower 48 bits, and above them how many flows have had this entry before: see [`Flow::octets`] and
    /// [`Flow::generation`].
    pub traffic: u64,
}

/// Bits of [`Flow::traffic`] that are octets.
const OCTET_BITS: u32 = 48;

const _: () = assert!(size_of::<Flow>() == 104 + 64 * cfg!(feature = "next-layout") as usize);
// With the key and 48 octets of the kernel's own an element of the map has three whole cache lines; the last of them has what
// every packet changes.
const _: () = assert!((48 + size_of::<Tuple>() + size_of::<Flow>()).is_multiple_of(64));

describe!(Flow {
    #[cfg(feature = "next-layout")]
    ahead,
    to.source,
    to.destination,
    to.source_port,
    to.destination_port,
    #[cfg(not(feature = "next-layout"))]
    to.protocol,
    to.zero,
    #[cfg(feature = "next-layout")]
    to.protocol,
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
    next_hop.destination = "hop.destination",
    next_hop.source = "hop.source",
    next_hop.device = "hop.device",
    next_hop.mtu = "hop.mtu",
    next_hop.flags = "hop.flags",
    next_hop.resolved_at = "hop.asked",
    counter,
    packets,
    traffic,
});

/// What a TCP header tells about the connection; or the first chunk of an SCTP packet, in the terms of TCP: see
/// [`Segment::of_chunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The flag octet of the header: see [`tcp_flags`].
    pub flags: u8,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number; meaningful with ACK.
    pub ack: u32,
    /// Octets of payload; of SCTP, octets of the whole packet.
    pub payload: u32,
}

/// Types of SCTP chunks that begin or end an association, RFC 9260 §3.2.
pub mod chunk {
    /// Asks for an association.
    pub const INIT: u8 = 1;
    /// Accepts one.
    pub const INIT_ACK: u8 = 2;
    /// Ends one at once.
    pub const ABORT: u8 = 6;
    /// No more data from the sender.
    pub const SHUTDOWN: u8 = 7;
    /// None from the other side either.
    pub const SHUTDOWN_ACK: u8 = 8;
}

/// Flag bits of the TCP header, RFC 9293 §3.1.
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 2;
    /// Reset the connection.
    pub const RST: u8 = 4;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 16;
}

impl Segment {
    /// The SCTP packet of `length` octets with this verification tag, whose first chunk is of type `kind`.
    #[inline(always)]
    pub const fn of_chunk(kind: u8, tag: u32, length: u32) -> Self {
        let flags = match kind {
            chunk::INIT => tcp_flags::SYN,
            chunk::INIT_ACK => tcp_flags::SYN | tcp_flags::ACK,
            chunk::ABORT => tcp_flags::RST | tcp_flags::ACK,
            chunk::SHUTDOWN | chunk::SHUTDOWN_ACK => tcp_flags::FIN | tcp_flags::ACK,
            _ => tcp_flags::ACK,
        };
        Self { flags, seq: tag, ack: 0, payload: length }
    }

    /// Whether it asks for a new connection: SYN without ACK.
    #[inline(always)]
    pub const fn is_syn(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN
    }

    /// Whether it accepts a new connection: SYN with ACK.
    #[inline(always)]
    pub const fn is_syn_ack(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN | tcp_flags::ACK
    }

    /// Whether it resets.
    #[inline(always)]
    pub const fn is_rst(&self) -> bool {
        self.flags & tcp_flags::RST != 0
    }

    /// Whether a flow may begin or end with it at once: SYN or RST.
    #[inline(always)]
    pub const fn is_syn_or_rst(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::RST) != 0
    }

    /// The sequence number after this segment: SYN and FIN count as one octet each.
    #[inline(always)]
    pub const fn end(&self) -> u32 {
        let syn = (self.flags & tcp_flags::SYN != 0) as u32;
        let fin = (self.flags & tcp_flags::FIN != 0) as u32;
        self.seq.wrapping_add(self.payload).wrapping_add(syn).wrapping_add(fin)
    }
}

impl Flow {
    /// An entry that turns packets of `from` into packets of `to`; `flags` are [`flow_flags`].
    #[inline(always)]
    pub fn new(from: &Tuple, to: &Tuple, service: u32, flags: u8, now: Tick) -> Self {
        let mut flow = Self::zeroed();
        flow.begin(from, to, service, flags, now);
        flow
    }

    /// Makes this such an entry, in place: the stack of a BPF program has no room for it.
    #[inline(always)]
    pub fn begin(&mut self, from: &Tuple, to: &Tuple, service: u32, flags: u8, now: Tick) {
        let addresses = Sum::ZERO
            .sub_16(from.source.octets())
            .sub_16(from.destination.octets())
            .add_16(to.source.octets())
            .add_16(to.destination.octets());
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
        self.next_hop.resolved_at = Tick(0);
        self.counter = 0;
        (self.packets, self.traffic) = (0, 0);
    }

    /// Whether packets of the flow may pass the stack by, on a node where `all` do that can. The second translation of a
    /// masqueraded connection is made at the egress of the device towards the backend, which only packets see that get there.
    #[inline(always)]
    pub const fn may_leave(&self, all: bool) -> bool {
        const AT_EGRESS: u8 = flow_flags::MASQUERADE | flow_flags::AT_EGRESS;
        if self.flags & flow_flags::ROUTED != 0 {
            return !self.is_tunnelled();
        }
        all && self.flags & flow_flags::HAIRPIN == 0 && self.flags & AT_EGRESS != AT_EGRESS
    }

    /// Counts a packet of so many octets, its network header included.
    ///
    /// In place, without a lock: packets of one direction come by one CPU after the other mostly, and where two come at once
    /// one may be missed. A packet that a device is to cut into segments counts as one, as in nf_conntrack.
    #[inline(always)]
    pub const fn count(&mut self, octets: u32) {
        self.packets = self.packets.wrapping_add(1);
        self.traffic = self.traffic.wrapping_add(octets as u64);
    }

    /// Octets of the packets of this direction.
    pub const fn octets(&self) -> u64 {
        self.traffic & ((1 << OCTET_BITS) - 1)
    }

    /// How many flows have had this entry before, in whose place this one began.
    pub const fn generation(&self) -> u16 {
        (self.traffic >> OCTET_BITS) as u16
    }

    /// Goes on counting where an `earlier` flow of this tuple was, whose place this one takes: who reads now and then misses
    /// neither of them.
    #[inline(always)]
    pub const fn succeed(&mut self, earlier: &Self) {
        (self.packets, self.traffic) = match earlier.traffic.checked_add(1 << OCTET_BITS) {
            Some(traffic) => (earlier.packets, traffic),
            None => (0, 0),
        };
    }

    /// Takes over what an `other` entry of the same flow has seen since this one was copied from it, or it from this one.
    pub fn absorb(&mut self, other: &Self) {
        // Another connection has begun in this one since.
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
        // The end of a flow is counted once.
        if other.counter == 0 {
            self.counter = 0;
        }
    }

    /// Whether its packets go to another node in a tunnel: then there is no entry for replies.
    #[inline(always)]
    pub const fn is_tunnelled(&self) -> bool {
        self.flags & flow_flags::TUNNEL != 0
    }

    /// Whether what this direction has acknowledged is something that `peer` has sent, as far as that can be told: who has not
    /// seen the answer, because its address is not his, can only guess. Else a SYN and an ACK from a forged address would
    /// hold an entry for a day. (A guess too low is answered with a RST, which is believed.)
    #[inline(always)]
    const fn acknowledges_what_was_sent(&self, peer: &Self) -> bool {
        self.to.protocol != protocol::TCP
            || !is_after(self.last_ack, peer.next_seq.wrapping_add(Self::UNSEEN))
    }

    /// Octets that may have been sent without being counted, as those of later fragments.
    const UNSEEN: u32 = 65_536;

    /// Whether the client has asked the backend in vain: once, and `retries` times more.
    #[inline(always)]
    pub fn is_unanswered(&self, phase: Phase, retries: u16) -> bool {
        phase == Phase::Opening && self.syns > retries
    }

    /// Whether this is the direction from the backend to the client.
    #[inline(always)]
    pub const fn is_reply(&self) -> bool {
        self.flags & flow_flags::REPLY != 0
    }

    /// Notes a datagram of this direction.
    #[inline(always)]
    pub fn observe_datagram(&mut self, now: Tick) {
        self.last_seen = now;
        if self.seen & seen::PACKET == 0 {
            self.next_seq = now.0;
        } else if now.0.wrapping_sub(self.next_seq) > Self::MOMENT {
            self.seen |= seen::STREAM;
        }
        self.seen |= seen::PACKET;
    }

    /// Ticks after which more datagrams make a stream: about 2 s, as in nf_conntrack.
    const MOMENT: u32 = 2;

    /// Notes a TCP segment of this direction that is no RST (for those see [`Self::accepts_reset`]).
    #[inline(always)]
    pub fn observe_segment(&mut self, segment: &Segment, now: Tick) {
        self.last_seen = now;
        let end = segment.end();
        let first = self.seen & seen::PACKET == 0 || segment.flags & tcp_flags::SYN != 0;
        if first || is_after(end, self.next_seq) {
            self.next_seq = end;
        }
        self.note_flags(segment);
    }

    /// Notes an SCTP packet of this direction that is no ABORT.
    #[inline(always)]
    pub fn observe_chunk(&mut self, segment: &Segment, now: Tick) {
        self.last_seen = now;
        if !segment.is_syn() {
            // That of an INIT is always 0.
            self.next_seq = segment.seq;
        }
        self.note_flags(segment);
    }

    #[inline(always)]
    fn note_flags(&mut self, segment: &Segment) {
        self.seen |= seen::PACKET;
        if segment.flags & tcp_flags::SYN != 0 {
            // A connection that begins has nothing to do with the end of the one before.
            self.seen = self.seen & !(seen::FIN | seen::RST) | seen::SYN;
            self.syns = self.syns.saturating_add(1);
        }
        if segment.flags & tcp_flags::FIN != 0 {
            self.seen |= seen::FIN;
        }
        if segment.flags & tcp_flags::ACK != 0 {
            self.last_ack = segment.ack;
            self.seen |= seen::ACK;
        }
    }

    /// Whether a RST of this direction is one that the receiver will believe, so that the flow is over.
    ///
    /// Its sequence number must lie between what the peer has acknowledged and what this direction has sent: that
    /// is tighter than the receive window (RFC 9293 §3.10.7.4, RFC 5961 §3.2) and needs no window scale. A RST that
    /// answers a SYN must acknowledge exactly that SYN.
    ///
    /// An SCTP ABORT must carry the verification tag of its direction, or reflect that of the other one (RFC 9260 §8.5.1);
    /// what answers an INIT is believed.
    pub const fn accepts_reset(&self, segment: &Segment, peer: &Self) -> bool {
        if self.to.protocol == protocol::SCTP {
            let unknown = self.seen & seen::PACKET == 0;
            return unknown || segment.seq == self.next_seq || segment.seq == peer.next_seq;
        }
        if self.seen & seen::PACKET == 0 {
            return segment.flags & tcp_flags::ACK != 0 && segment.ack == peer.next_seq;
        }
        let oldest = if peer.seen & seen::ACK != 0 { peer.last_ack } else { self.next_seq };
        !is_after(oldest, segment.seq) && !is_after(segment.seq, self.next_seq)
    }
}

impl Flow {
    /// The same where only this direction is seen: the RST must be just what comes next.
    #[inline(always)]
    pub const fn accepts_reset_alone(&self, segment: &Segment) -> bool {
        self.seen & seen::PACKET != 0 && segment.seq == self.next_seq
    }
}

/// Whether sequence number `a` comes after `b`, modulo 2^32 (RFC 9293 §3.4).
#[inline(always)]
const fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Where a flow is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// TCP and SCTP, like all up to [`Self::Closed`]: the client has spoken, no backend has answered yet.
    Opening,
    /// The backend has answered, the client has not acknowledged yet.
    Accepted,
    /// Both have spoken.
    Established,
    /// One direction has sent FIN.
    HalfClosed,
    /// Both have sent FIN.
    TimeWait,
    /// Reset.
    Closed,
    /// UDP: nothing has come back yet.
    Unreplied,
    /// UDP: a question and its answer.
    Replied,
    /// UDP: datagrams in both directions, over more than a moment.
    Stream,
}

impl Phase {
    /// The phase of the flow with these two entries. One through a tunnel has only the first one: see
    /// [`Self::of_one_way`].
    pub const fn of(forward: &Flow, reply: &Flow) -> Self {
        if forward.is_tunnelled() {
            return Self::of_one_way(forward);
        }
        let either = forward.seen | reply.seen;
        let both = forward.seen & reply.seen;
        let replied = reply.seen & seen::PACKET != 0;
        if forward.to.protocol == protocol::UDP {
            return match (replied, either & seen::STREAM != 0) {
                (false, _) => Self::Unreplied,
                (true, false) => Self::Replied,
                (true, true) => Self::Stream,
            };
        }
        if either & seen::RST != 0 {
            Self::Closed
        } else if !replied {
            // Whatever the client sends: what nobody answers must not hold an entry for longer than a SYN.
            Self::Opening
        } else if both & seen::FIN != 0 {
            Self::TimeWait
        } else if either & seen::FIN != 0 {
            Self::HalfClosed
        } else if forward.seen & seen::ACK != 0 && forward.acknowledges_what_was_sent(reply) {
            Self::Established
        } else {
            Self::Accepted
        }
    }

    /// The phase of a flow of which only what the client sends is seen. An acknowledgement after a SYN stands for the
    /// backend's answer, and the client's FIN for both.
    pub const fn of_one_way(forward: &Flow) -> Self {
        const BEGUN: u8 = seen::SYN | seen::ACK;
        if forward.to.protocol == protocol::UDP {
            return if forward.seen & seen::STREAM != 0 { Self::Stream } else { Self::Unreplied };
        }
        if forward.seen & seen::RST != 0 {
            Self::Closed
        } else if forward.seen & seen::FIN != 0 {
            Self::TimeWait
        } else if forward.seen & BEGUN == BEGUN {
            Self::Established
        } else {
            Self::Opening
        }
    }

    /// Seconds without a packet after which the flow is forgotten. Established and half-closed TCP are what
    /// kube-proxy sets (24 h, 1 h), the others what nf_conntrack has by default, but for the shorter opening, which
    /// limits what a SYN flood can hold and still spans the gap between two retransmissions of a SYN.
    pub const fn timeout_seconds(self) -> u32 {
        match self {
            Self::Opening | Self::Accepted => 60,
            Self::Established => 24 * 60 * 60,
            Self::HalfClosed => 60 * 60,
            Self::TimeWait | Self::Stream => 120,
            Self::Closed => 10,
            Self::Unreplied | Self::Replied => 30,
        }
    }

    /// Whether it gives way when there is little room: a flow of which nothing says that both sides want it, or one that is
    /// over. What nf_conntrack calls assured never does.
    pub const fn gives_way(self) -> bool {
        !matches!(self, Self::Established | Self::HalfClosed | Self::Stream)
    }

    /// Whether a SYN from the same client port is a new connection rather than a retransmission.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::TimeWait | Self::Closed)
    }

    /// The name used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Accepted => "accepted",
            Self::Established => "established",
            Self::HalfClosed => "half-closed",
            Self::TimeWait => "time-wait",
            Self::Closed => "closed",
            Self::Unreplied => "unreplied",
            Self::Replied => "replied",
            Self::Stream => "stream",
        }
    }
}

/// How little room `CONNTRACK` has for new flows: from none at all, up to three quarters, to the most, at fifteen
/// sixteenths.
///
/// The fuller the map, the shorter the life of flows that give way ([`Phase::gives_way`]): a flood of connections that nobody
/// answers for makes room for others within seconds, and no established one is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Pressure(u8);

impl Pressure {
    /// There is room.
    pub const NONE: Self = Self(0);
    /// There is hardly any.
    pub const MOST: Self = Self(Self::STEPS);
    const STEPS: u8 = 48;
    /// Seconds that every flow has: a SYN that is lost is sent again after one second and after two more.
    const LEAST_SECONDS: u32 = 3;

    /// That of a map with so many entries.
    pub fn of(entries: usize, capacity: u32) -> Self {
        let sixteenths = |count: u32| u64::from(capacity) * u64::from(count) / 16;
        let (begin, end) = (sixteenths(12), sixteenths(15));
        let over = (entries as u64).clamp(begin, end) - begin;
        let steps = over * u64::from(Self::STEPS) / (end - begin).max(1);
        Self(u8::try_from(steps).unwrap_or(Self::STEPS))
    }

    /// What is left of so many seconds.
    fn shorten(self, seconds: u32) -> u32 {
        let can_go = seconds.saturating_sub(Self::LEAST_SECONDS);
        seconds - can_go * u32::from(self.0) / u32::from(Self::STEPS)
    }
}

/// Seconds by which the second flow of a masqueraded connection outlives the first: there must be no moment in which
/// packets still go to the backend and are not masqueraded any more.
const MASQUERADE_EXTRA_SECONDS: u32 = 15;

/// Seconds left until the flow is forgotten where there is room; 0 when that is due.
pub fn seconds_left(forward: &Flow, reply: &Flow, now: Tick) -> u32 {
    seconds_left_under(Pressure::NONE, forward, reply, now)
}

/// The same where there may be little.
pub fn seconds_left_under(pressure: Pressure, forward: &Flow, reply: &Flow, now: Tick) -> u32 {
    let last_seen = forward.last_seen.max(reply.last_seen);
    let extra = if forward.flags & flow_flags::MASQUERADE != 0 { MASQUERADE_EXTRA_SECONDS } else { 0 };
    let phase = Phase::of(forward, reply);
    let whole = phase.timeout_seconds() + extra;
    let life = if phase.gives_way() { pressure.shorten(whole) } else { whole };
    life.saturating_sub(now.seconds_since(last_seen))
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Tuple {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Flow {}
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Tick = Tick(100);

    fn tuple(protocol: u8) -> Tuple {
        Tuple::new(Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]), 40_000, 80, protocol)
    }

    /// Both entries of a flow of which nothing has been seen yet.
    fn pair(protocol: u8) -> (Flow, Flow) {
        let from = tuple(protocol);
        let to = Tuple { destination: Address::from_v4([198, 51, 100, 7]), destination_port: 8080, ..from };
        let forward = Flow::new(&from, &to, 1, 0, NOW);
        let reply = Flow::new(&to.reversed(), &from.reversed(), 1, flow_flags::REPLY, NOW);
        (forward, reply)
    }

    fn segment(flags: u8, seq: u32, ack: u32, payload: u32) -> Segment {
        Segment { flags, seq, ack, payload }
    }

    const SYN: u8 = tcp_flags::SYN;
    const ACK: u8 = tcp_flags::ACK;
    const FIN: u8 = tcp_flags::FIN;
    const RST: u8 = tcp_flags::RST;

    fn established() -> (Flow, Flow) {
        let (mut forward, mut reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
        forward.observe_segment(&segment(ACK, 1001, 5001, 0), NOW);
        (forward, reply)
    }

    /// The only entry of a flow through a tunnel.
    fn tunnelled(protocol: u8) -> Flow {
        let flags = flow_flags::ROUTED | flow_flags::TUNNEL;
        Flow::new(&tuple(protocol), &tuple(protocol), 1, flags, NOW)
    }

    #[test]
    fn who_acknowledges_what_was_never_sent_has_no_connection() {
        for (guess, phase) in
            [(5001, Phase::Established), (80_000, Phase::Accepted), (1 << 30, Phase::Accepted)]
        {
            let (mut forward, reply) = established();
            forward.observe_segment(&segment(ACK, 1001, guess, 0), NOW);
            assert_eq!(Phase::of(&forward, &reply), phase, "{guess}");
        }
    }

    #[test]
    fn pressure_begins_at_three_quarters_and_is_the_most_before_the_map_is_full() {
        for capacity in [16, 2_000, 524_288, u32::MAX] {
            let at = |sixteenths: u64| {
                Pressure::of(usize::try_from(u64::from(capacity) * sixteenths / 16).unwrap(), capacity)
            };
            assert_eq!(
                [at(0), at(12), at(15), at(16)],
                [Pressure::NONE, Pressure::NONE, Pressure::MOST, Pressure::MOST]
            );
            assert!(at(13) > at(12) && at(14) > at(13) && at(14) < at(15));
        }
        assert_eq!(Pressure::of(0, 0), Pressure::NONE);
    }

    #[test]
    fn only_what_nobody_would_miss_is_forgotten_earlier() {
        for phase in [
            Phase::Opening,
            Phase::Accepted,
            Phase::TimeWait,
            Phase::Closed,
            Phase::Unreplied,
            Phase::Replied,
        ] {
            assert!(phase.gives_way(), "{}", phase.as_str());
        }
        for phase in [Phase::Established, Phase::HalfClosed, Phase::Stream] {
            assert!(!phase.gives_way(), "{}", phase.as_str());
        }
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        let half = Pressure(Pressure::STEPS / 2);
        let left = |pressure| seconds_left_under(pressure, &forward, &reply, NOW);
        assert_eq!([Pressure::NONE, half, Pressure::MOST].map(left), [60, 32, 3]);
        let (forward, reply) = established();
        assert_eq!(
            seconds_left_under(Pressure::MOST, &forward, &reply, NOW),
            Phase::Established.timeout_seconds()
        );
    }

    #[test]
    fn a_flow_through_a_tunnel_is_judged_by_the_client_alone() {
        let mut flow = tunnelled(protocol::TCP);
        let phase = |flow: &Flow| Phase::of(flow, &pair(protocol::TCP).1);
        assert_eq!(phase(&flow), Phase::Opening);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(phase(&flow), Phase::Opening, "nobody has answered");
        flow.observe_segment(&segment(ACK, 1001, 5001, 7), NOW);
        assert_eq!(phase(&flow), Phase::Established);
        for (seq, believed) in [(1007, false), (1008, true), (1009, false), (5001, false)] {
            assert_eq!(flow.accepts_reset_alone(&segment(RST, seq, 0, 0)), believed, "{seq}");
        }
        flow.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), NOW);
        assert_eq!(phase(&flow), Phase::TimeWait);
        flow.observe_segment(&segment(SYN, 9000, 0, 0), NOW);
        assert_eq!(
            phase(&flow),
            Phase::Established,
            "a new connection, of whose acknowledgement nothing was forgotten"
        );
        flow.seen |= seen::RST;
        assert_eq!(phase(&flow), Phase::Closed);
    }

    /// Else anybody could hold an entry for a day with one forged packet.
    #[test]
    fn a_flow_through_a_tunnel_that_begins_in_its_middle_does_not_count_as_established() {
        let mut flow = tunnelled(protocol::TCP);
        assert!(!flow.accepts_reset_alone(&segment(RST, 0, 0, 0)), "nothing was sent");
        flow.observe_segment(&segment(ACK, 1001, 5001, 7), NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::Opening);
        flow.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::TimeWait);
    }

    #[test]
    fn datagrams_through_a_tunnel_are_a_stream_when_they_go_on() {
        let mut flow = tunnelled(protocol::UDP);
        flow.observe_datagram(NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::Unreplied);
        flow.observe_datagram(Tick(NOW.0 + 5));
        assert_eq!(Phase::of(&flow, &flow), Phase::Stream);
    }

    #[test]
    fn a_tcp_connection_walks_through_its_phases() {
        let (mut forward, mut reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
        reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Accepted);
        forward.observe_segment(&segment(ACK, 1001, 5001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Established);
        forward.observe_segment(&segment(FIN | ACK, 1001, 5001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::HalfClosed);
        reply.observe_segment(&segment(FIN | ACK, 5001, 1002, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::TimeWait);
        assert!(Phase::of(&forward, &reply).is_over());
    }

    #[test]
    fn a_fin_that_nobody_answers_holds_an_entry_no_longer_than_a_syn() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(FIN | ACK, 1000, 1, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
    }

    #[test]
    fn a_syn_forgets_how_the_connection_before_ended() {
        let (mut forward, mut reply) = established();
        forward.observe_segment(&segment(FIN | ACK, 1001, 5001, 0), NOW);
        forward.observe_segment(&segment(SYN, 9000, 0, 0), NOW);
        reply.observe_segment(&segment(SYN | ACK, 7000, 9001, 0), NOW);
        forward.observe_segment(&segment(ACK, 9001, 7001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Established);
    }

    #[test]
    fn udp_is_replied_once_something_came_back() {
        let (mut forward, mut reply) = pair(protocol::UDP);
        forward.observe_datagram(NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Unreplied);
        reply.observe_datagram(NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Replied);
        forward.observe_datagram(Tick(NOW.0 + 1));
        assert_eq!(Phase::of(&forward, &reply), Phase::Replied, "the same moment");
        forward.observe_datagram(Tick(NOW.0 + 3));
        assert_eq!(Phase::of(&forward, &reply), Phase::Stream);
    }

    #[test]
    fn an_association_walks_through_its_phases() {
        let (mut forward, mut reply) = pair(protocol::SCTP);
        let packet = |kind, tag| Segment::of_chunk(kind, tag, 20);
        const DATA: u8 = 0;
        forward.observe_chunk(&packet(chunk::INIT, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
        reply.observe_chunk(&packet(chunk::INIT_ACK, 0xc11e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Accepted);
        forward.observe_chunk(&packet(DATA, 0x5e4e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Established);
        for (tag, believed) in [(0xc11e, true), (0x5e4e, true), (0xbad, false), (0, false)] {
            assert_eq!(reply.accepts_reset(&packet(chunk::ABORT, tag), &forward), believed, "{tag:x}");
        }
        forward.observe_chunk(&packet(chunk::SHUTDOWN, 0x5e4e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::HalfClosed);
        reply.observe_chunk(&packet(chunk::SHUTDOWN_ACK, 0xc11e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::TimeWait);
    }

    #[test]
    fn the_second_flow_of_a_masqueraded_connection_lives_longer() {
        let (forward, reply) = pair(protocol::UDP);
        let second = Flow { flags: flow_flags::MASQUERADE | flow_flags::AT_EGRESS, ..forward };
        assert!(
            seconds_left(&second, &reply, NOW) > seconds_left(&forward, &reply, NOW) + 5,
            "a sweep or two"
        );
    }

    #[test]
    fn the_peer_of_the_peer_is_oneself() {
        use flow_flags::{AT_EGRESS, HAIRPIN, MASQUERADE, REPLY, peer};
        for (flags, expected) in
            [(0, REPLY | AT_EGRESS), (HAIRPIN, HAIRPIN | REPLY), (MASQUERADE | AT_EGRESS, MASQUERADE | REPLY)]
        {
            assert_eq!((peer(flags), peer(expected)), (expected, flags));
        }
    }

    #[test]
    fn a_reset_between_acknowledged_and_sent_is_believed() {
        let (forward, mut reply) = established();
        reply.observe_segment(&segment(ACK, 5001, 1001, 3000), NOW);
        for seq in [5001, 6500, 8001] {
            assert!(reply.accepts_reset(&segment(RST, seq, 0, 0), &forward), "seq {seq}");
        }
        for seq in [5000, 8002, 5001u32.wrapping_add(1 << 31)] {
            assert!(!reply.accepts_reset(&segment(RST, seq, 0, 0), &forward), "seq {seq}");
        }
    }

    #[test]
    fn a_reset_that_refuses_a_connection_must_acknowledge_its_syn() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert!(reply.accepts_reset(&segment(RST | ACK, 0, 1001, 0), &forward));
        assert!(!reply.accepts_reset(&segment(RST | ACK, 0, 1000, 0), &forward));
        assert!(!reply.accepts_reset(&segment(RST, 0, 1001, 0), &forward));
    }

    #[test]
    fn a_client_may_reset_what_it_has_just_opened() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, u32::MAX, 0, 0), NOW);
        assert!(forward.accepts_reset(&segment(RST, 0, 0, 0), &reply));
        assert!(!forward.accepts_reset(&segment(RST, 1, 0, 0), &reply));
    }

    #[test]
    fn sequence_numbers_wrap() {
        let (mut forward, _) = established();
        forward.next_seq = u32::MAX - 10;
        forward.observe_segment(&segment(ACK, u32::MAX - 10, 5001, 100), NOW);
        assert_eq!(forward.next_seq, 89);
        forward.observe_segment(&segment(ACK, u32::MAX - 10, 5001, 50), NOW);
        assert_eq!(forward.next_seq, 89, "a retransmission takes nothing back");
    }

    #[test]
    fn idle_connections_live_as_long_as_with_kube_proxy() {
        let (forward, reply) = established();
        let Tick(day_in_ticks) = Tick::from_nanos(24 * 60 * 60 * 1_000_000_000);
        assert!(seconds_left_under(Pressure::MOST, &forward, &reply, Tick(NOW.0 + day_in_ticks - 2)) > 0);
        assert_eq!(seconds_left(&forward, &reply, Tick(NOW.0 + day_in_ticks + 2)), 0);
    }

    #[test]
    fn what_a_copy_has_missed_is_made_up_for() {
        let (mut copy, reply) = pair(protocol::TCP);
        copy.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        let (mut original, copied) = (copy, copy);
        original.observe_segment(&segment(ACK, 1001, 5001, 7), Tick(NOW.0 + 1));
        copy.absorb(&original);
        assert_eq!(copy, original);
        copy.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), Tick(NOW.0 + 2));
        let ended = copy;
        copy.absorb(&original);
        copy.absorb(&copied);
        assert_eq!(copy, ended, "what is older takes nothing back");
        let mut again = Flow::new(&tuple(protocol::TCP), &reply.to, 1, 0, NOW);
        let begun = again;
        again.absorb(&ended);
        assert_eq!(again, begun, "another backend");
        again = Flow { syns: 2, ..original };
        again.absorb(&ended);
        assert_eq!(again.seen, original.seen, "a connection that began since");
    }

    #[test]
    fn the_reversed_tuple_is_the_key_of_the_peer() {
        let (forward, reply) = pair(protocol::TCP);
        assert_eq!(reply.to.reversed(), tuple(protocol::TCP));
        assert_eq!(forward.to.reversed().reversed(), forward.to);
        assert_eq!(
            forward.address_delta, !reply.address_delta,
            "what one direction adds the other takes away"
        );
    }
}
