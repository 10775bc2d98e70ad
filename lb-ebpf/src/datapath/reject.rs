//! Answers in place of a backend: rejections (so that clients fail at once instead of hanging), ICMP errors about
//! packets of routed and tunnelled flows, and echo replies of virtual addresses.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_csum_diff, bpf_ktime_get_coarse_ns},
};
use lb_common::{EventHook, Outcome, checksum::Sum, conntrack::Tuple, protocol};
use lb_ebpf::{
    headers::{HOP_LIMIT, icmp_protocol, ipv4_header, ipv6_header, pseudo_header},
    parse::{Body, ECHO_REQUEST_V4, ECHO_REQUEST_V6, Headers, Packet, bounds::clamped, frame::lengths},
    reject::{MESSAGE, QUOTE, SHORTEST_QUOTE, port_unreachable, reset, reset_sum},
    rules::icmp_limit,
};

use super::{
    checksum::Checksum,
    early_return::{number_of, outcome_of, rewritten},
    events,
    rewrite::{self, Compensation},
    scratch::scratch,
    skb::{ChecksumField, Skb},
};

/// The ICMPv6 type of an echo reply, RFC 4443 §4.2. (The ICMP type of an echo reply in IPv4 is 0.)
const ECHO_REPLY_V6: u8 = 129;

/// Turns the packet into its own rejection: RST for TCP, port unreachable for UDP and SCTP.
#[inline(never)]
pub(super) fn reject(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| {
        let outcome = match packet.body {
            Body::Tcp => tcp_reset(skb, packet)?,
            Body::Udp | Body::Sctp => {
                icmp_error(skb, packet, &port_unreachable(packet.headers.is_v4), Outcome::RejectUdp)?
            }
            Body::LaterFragment | Body::IcmpError | Body::Echo => return Err(Outcome::UnknownFragment),
        };
        events::rejected(&skb.context(), &packet.tuple, outcome, EventHook::Ingress);
        Ok(outcome)
    })
}

#[inline(always)]
fn tcp_reset(skb: &mut Skb, packet: &Packet) -> Result<Outcome, Outcome> {
    let answer = packet.tuple.reversed();
    let header = reset(&answer, &packet.segment);
    let l4 = network_header(skb, packet, &answer, lengths::TCP)?;
    skb.store_summed(l4, &header)?;
    // Adds the pseudo header in a second step. The kernel also applies this step, but not the first one, to its sum
    // over the frame.
    let checksum = ChecksumField::of(protocol::TCP, l4);
    let sum = reset_sum(&header).fold();
    skb.update_checksum(checksum, sum, false)?;
    skb.update_frame_sum(!sum);
    skb.update_checksum(checksum, pseudo_header(&answer, lengths::TCP as u16).fold(), true)?;
    Ok(Outcome::RejectTcp)
}

/// Turns the packet into an ICMP error about itself; `start` is the beginning of the error. A later fragment is not
/// answered: its sender could not match the quote. Once the node has reached its limit on ICMP errors, it sends only
/// the errors to which the limit does not apply ([`icmp_limit::applies`]).
#[inline(never)]
pub(super) fn icmp_error(
    skb: &mut Skb,
    packet: &Packet,
    start: &[u8; 8],
    outcome: Outcome,
) -> Result<Outcome, Outcome> {
    if packet.body == Body::LaterFragment {
        return Err(Outcome::UnknownFragment);
    }
    if icmp_limit::applies(start, packet.headers.is_v4) && reject_take_token() == 0 {
        return Err(Outcome::IcmpRateLimited);
    }
    rewritten(reject_write_icmp_error(skb.ctx.skb.skb, packet, u64::from_ne_bytes(*start)))?;
    Ok(outcome)
}

/// [`write_icmp_error`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn reject_write_icmp_error(raw: *mut __sk_buff, packet: *const Packet, start: u64) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Packet`, or is null.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return 0 };
    number_of(write_icmp_error(&mut Skb::new_unknown(raw), packet, start.to_ne_bytes()))
}

/// Writes the ICMP error that begins with `start` over the packet.
#[inline(always)]
fn write_icmp_error(skb: &mut Skb, packet: &Packet, start: [u8; 8]) -> Result<(), Outcome> {
    let headers = &packet.headers;
    let answer = Tuple { protocol: icmp_protocol(headers.is_v4), ..packet.tuple.reversed() };
    // The length of a network header is a multiple of 4 bytes, so the length of the quote is also a multiple of 4.
    let quote = clamped::<SHORTEST_QUOTE, QUOTE>((headers.l4 - headers.l3 + 8) & !3);
    let message = scratch()?.message();
    message[..lengths::ICMP as usize].copy_from_slice(&start);
    skb.load_bytes(headers.l3, &mut message[lengths::ICMP as usize..], quote)?;
    let length = lengths::ICMP + quote;
    let checksum = message_checksum(message, length, &answer);
    message[2..4].copy_from_slice(&checksum.to_ne_bytes());
    let l4 = network_header(skb, packet, &answer, length)?;
    skb.store_bytes(l4, message, length)
}

/// The time at which the bucket of [`icmp_limit`] will be full again, in ns of the coarse clock.
static mut FULL_AT: u64 = 0;

/// Takes a token for an ICMP error; returns 1, or 0 if the node has reached its limit. (A global function: the verifier
/// checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn reject_take_token() -> u32 {
    // SAFETY: the helper takes nothing and only returns a number.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    // SAFETY: one volatile load of an aligned `u64`, which is never torn.
    let full_at = unsafe { (&raw const FULL_AT).read_volatile() };
    let Some(full_at) = icmp_limit::BUCKET.take(full_at, now) else { return 0 };
    // SAFETY: one volatile store of an aligned `u64`, which is never torn. If two CPUs store at the same time, their
    // two errors have taken one token together, so the node sends one error more than the limit allows.
    unsafe { (&raw mut FULL_AT).write_volatile(full_at) };
    1
}

/// Turns an ICMP echo request into its reply.
#[inline(always)]
pub(super) fn echo(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| {
        let headers = &packet.headers;
        let answer = packet.tuple.reversed();
        let (request, reply) =
            if headers.is_v4 { (ECHO_REQUEST_V4, 0) } else { (ECHO_REQUEST_V6, ECHO_REPLY_V6) };
        let delta = rewrite::changed_byte(request, reply);
        skb.update_checksum(ChecksumField::of(answer.protocol, headers.l4), delta, false)?;
        skb.store(headers.l4, &[reply])?;
        // Swaps the addresses, which changes no checksum.
        rewrite::addresses(skb, headers, &answer.source, &answer.destination, 0, Compensation::Message)?;
        // The reply is a new packet, so it gets a full hop limit.
        rewrite::hop_limit(skb, headers, HOP_LIMIT)?;
        Ok(Outcome::Echo)
    })
}

/// The checksum of an ICMP message; ICMPv6 includes the pseudo header (RFC 4443 §2.3).
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the length is at most MESSAGE; a sum is folded to 16 bits"
)]
fn message_checksum(message: &mut [u8; MESSAGE], length: u32, answer: &Tuple) -> u16 {
    let seed =
        if answer.protocol == protocol::ICMPV6 { pseudo_header(answer, length as u16) } else { Sum::ZERO };
    // SAFETY: `message` has at least `length` bytes, a multiple of 4, as the helper demands. The helper reads nothing
    // at the null pointer, because the length of that input is 0.
    let sum = unsafe {
        let to = message.as_mut_ptr().cast();
        bpf_csum_diff(core::ptr::null_mut(), 0, to, length, u32::from(seed.fold()))
    } as u32;
    !Sum::ZERO.add_word(sum as u16).add_word((sum >> 16) as u16).fold()
}

/// Resizes the frame for an answer with `payload` bytes and writes its network header; returns the offset of the
/// payload.
///
/// If the device is to compute the packet's checksum, the `sk_buff` keeps this mark (`CHECKSUM_PARTIAL`). The device
/// would then write a checksum into the answer, at the position of the packet's checksum. The kernel clears the mark
/// when a packet loses all bytes in front of its transport header and one more 16-bit word (`skb_postpull_rcsum`). So
/// the function first makes the frame longer than the answer by that `surplus`, then removes as many bytes behind the
/// Ethernet header.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "answers have at most MESSAGE bytes of payload")]
fn network_header(skb: &mut Skb, packet: &Packet, answer: &Tuple, payload: u32) -> Result<u32, Outcome> {
    let Headers { l3, l4: old, is_v4 } = packet.headers;
    let l4 = l3 + if is_v4 { lengths::IPV4 } else { lengths::IPV6 };
    let surplus = if is_left_to_device(skb) { old + 2 } else { 0 };
    skb.resize(l4 + payload + surplus)?;
    if surplus != 0 {
        skb.adjust_room(-surplus.cast_signed(), 0)?;
    }
    if is_v4 {
        skb.store_summed(l3, &ipv4_header(answer, payload as u16))?;
    } else {
        skb.store_summed(l3, &ipv6_header(answer, payload as u16))?;
    }
    Ok(l4)
}

/// Whether the device that sends the packet is to compute the packet's checksum. (On kernels that do not show this, the
/// function returns true only for a packet that the device is to split into segments.)
#[inline(always)]
fn is_left_to_device(skb: &Skb) -> bool {
    match skb.checksum() {
        Checksum::LeftToDevice => true,
        Checksum::Unknown => skb.segment_size().is_some(),
        Checksum::InPacket | Checksum::FrameSummed => false,
    }
}
