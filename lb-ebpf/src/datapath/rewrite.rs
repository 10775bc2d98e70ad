//! Rewriting packets: through helpers, or in place where no helper is needed.

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_loop};
use lb_common::{
    Address, Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple},
    crc32c::CrcChange,
};
use lb_ebpf::{
    parse::{
        Body, Headers, Packet,
        frame::{Frame as _, word},
    },
    rewrite::{self, FrameMut as _, TransportChecksum, lacks_checksum},
};

use super::{
    checksum::Checksum,
    early_return::{number_of, rewritten},
    scratch::scratch,
    skb::{ChecksumField, Skb},
};

/// Gives the packet the addresses and ports of `flow.to`, and subtracts `hops` (0 or 1) from its hop limit, which must
/// be larger than `hops`.
///
/// Fields are written in place if possible. A device may have computed a sum over the frame (`CHECKSUM_COMPLETE`),
/// which has to stay right. A checksum in the packet compensates the changes that it covers: ports and addresses of
/// TCP and UDP, and the IPv4 header. All other changes are reported to the kernel.
///
/// # Errors
///
/// Always [`Outcome::RewriteFailed`]: the flow has counted the packet, which may be partly rewritten. So the caller
/// must drop the packet, and never parse it again.
#[inline(always)]
pub(super) fn packet(skb: &mut Skb, packet: &Packet, flow: &Flow, hops: u8) -> Result<(), Outcome> {
    write(skb, packet, flow, hops).map_err(|_| Outcome::RewriteFailed)
}

#[inline(always)]
fn write(skb: &mut Skb, packet: &Packet, flow: &Flow, hops: u8) -> Result<(), Outcome> {
    let headers = &packet.headers;
    match packet.body {
        Body::Tcp | Body::Udp => match skb.checksum() {
            Checksum::LeftToDevice => rewrite::unfinished_transport(skb, packet, flow)?,
            Checksum::Unknown if seems_unfinished(skb, packet)? => {
                with_checksum_of_device(skb, packet, flow)?
            }
            Checksum::InPacket | Checksum::FrameSummed | Checksum::Unknown => {
                with_checksum(skb, packet, flow)?
            }
        },
        Body::Sctp => {
            sctp(skb, packet, flow)?;
            report_uncovered_addresses(skb, headers, flow);
        }
        Body::LaterFragment | Body::IcmpError | Body::Echo => report_uncovered_addresses(skb, headers, flow),
    }
    if hops != 0 && !headers.is_v4 {
        skb.update_frame_sum(ONE_HOP_LESS);
    }
    rewrite::network(skb, headers, flow, hops)
}

/// The hop limit of the packet, this hop included.
#[inline(always)]
pub(super) fn hops_left(skb: &Skb, headers: &Headers) -> Result<u8, Outcome> {
    let at = headers.l3 + if headers.is_v4 { 8 } else { 7 };
    let [left, _] = *skb.header::<[u8; 2]>(at)?;
    Ok(left)
}

/// Subtracts 1 from the hop limit of a packet, which must be at least 2.
#[inline(always)]
pub(super) fn take_hop(skb: &mut Skb, headers: &Headers) -> Result<(), Outcome> {
    if !headers.is_v4 {
        skb.update_frame_sum(ONE_HOP_LESS);
    }
    rewrite::take_hop(skb, headers.l3, headers.is_v4)
}

/// The change of a checksum when the hop limit in an IPv6 header decreases by one. The hop limit is the lower byte of a
/// word.
const ONE_HOP_LESS: u16 = !u16::from_ne_bytes([0, 1]);

/// Whether the packet looks as if the device still has to compute its checksum. This replaces `ip_summed` on kernels
/// that do not show it.
#[inline(always)]
fn seems_unfinished(skb: &Skb, packet: &Packet) -> Result<bool, Outcome> {
    Ok(skb.segment_size().is_some() || lacks_checksum(skb, packet, packet.headers.length(skb)?)?)
}

/// Writes ports and checksum. The checksum compensates the change of the addresses in the sum over the frame. In IPv4
/// the header's checksum compensates the change a second time, so the program subtracts the change once from the sum
/// over the frame. In a datagram without a checksum, nothing compensates the change of the ports.
#[inline(always)]
fn with_checksum(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    match rewrite::transport(skb, packet, flow)? {
        TransportChecksum::Updated if packet.headers.is_v4 => skb.update_frame_sum(!flow.address_delta),
        TransportChecksum::Updated => {}
        TransportChecksum::Absent => {
            skb.update_frame_sum(flow.port_delta);
            report_uncovered_addresses(skb, &packet.headers, flow);
        }
    }
    Ok(())
}

/// Writes the ports of a packet whose checksum the device probably computes. The kernel does not show whether the
/// device computes it, so the kernel's helper function updates the checksum.
#[inline(never)]
fn with_checksum_of_device(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let checksum = ChecksumField::of(packet.tuple.protocol, l4);
    skb.update_checksum(checksum, flow.address_delta, true)?;
    if flow.port_delta != 0 {
        skb.update_checksum(checksum, flow.port_delta, false)?;
    }
    report_uncovered_addresses(skb, &packet.headers, flow);
    let Tuple { source_port, destination_port, .. } = flow.to;
    *skb.header_mut(l4)? = [source_port.to_be_bytes(), destination_port.to_be_bytes()];
    Ok(())
}

/// Reports a change of IPv6 addresses that no checksum covers.
#[inline(always)]
fn report_uncovered_addresses(skb: &mut Skb, headers: &Headers, flow: &Flow) {
    if !headers.is_v4 {
        skb.update_frame_sum(flow.address_delta);
    }
}

/// Offset of the checksum in an SCTP header.
const SCTP_CHECKSUM: u32 = 8;

/// Writes the ports and the checksum of an SCTP packet. The checksum covers the whole SCTP packet, but no addresses.
#[inline(always)]
fn sctp(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    rewritten(sctp_translate(skb.ctx.skb.skb, packet, flow))
}

/// [`sctp`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_translate(raw: *mut __sk_buff, packet: *const Packet, flow: *const Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(packet), Some(flow)) = (unsafe { (packet.as_ref(), flow.as_ref()) }) else { return 0 };
    number_of(translate_sctp(&mut Skb::new_unknown(raw), packet, flow))
}

#[inline(always)]
fn translate_sctp(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let (s, d) = (flow.to.source_port.to_be_bytes(), flow.to.destination_port.to_be_bytes());
    let after = u32::from_le_bytes([s[0], s[1], d[0], d[1]]);
    let delta = u32::from_le(word(skb.header(l4)?)) ^ after;
    if delta == 0 {
        return Ok(());
    }
    skb.store_summed(l4, &after.to_le_bytes())?;
    let before = u32::from_le(word(skb.header(l4 + SCTP_CHECKSUM)?));
    if before == 0 {
        // The device computes the checksum.
        return Ok(());
    }
    let checksum = before ^ change_of_crc(delta, packet.segment.payload)?;
    skb.store_summed(l4 + SCTP_CHECKSUM, &checksum.to_le_bytes())
}

#[inline(always)]
fn change_of_crc(delta: u32, length: u32) -> Result<u32, Outcome> {
    u32::try_from(sctp_checksum_change(delta, length)).map_err(|_| Outcome::RewriteFailed)
}

/// The change of the checksum; `u64::MAX` if it cannot be computed. (A global function: the verifier checks it once,
/// for all arguments and callers.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_checksum_change(delta: u32, length: u32) -> u64 {
    let Ok(scratch) = scratch() else { return u64::MAX };
    *scratch.crc() = CrcChange::new(delta, length);
    // SAFETY: `step` has the signature that the kernel calls it with, and uses no context.
    unsafe { bpf_loop(CrcChange::STEPS, step as *mut _, core::ptr::null_mut(), 0) };
    u64::from(scratch.crc().result())
}

/// One step of the checksum. The kernel calls this function, so the verifier checks it once.
extern "C" fn step(_index: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    scratch.crc().step();
    0
}

/// The checksum that compensates a change of IPv6 addresses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Compensation {
    /// A checksum over the pseudo header. When the helper updates this checksum, the kernel also changes the sum over
    /// the frame (`CHECKSUM_COMPLETE`), as if the frame did not contain the addresses. So the program adds the change
    /// of the addresses to the sum over the frame. In IPv4 the header's checksum compensates this change. (From Linux
    /// 6.16 on, the flag `BPF_F_IPV6` of the helper has the same effect.)
    Pseudo,
    /// The checksum of an ICMP message that quotes the addresses.
    Message,
}

/// Writes the addresses of a network header. In IPv4, also updates the checksum of that header; IPv6 has none.
#[inline(always)]
pub(super) fn addresses(
    skb: &mut Skb,
    headers: &Headers,
    source: &Address,
    destination: &Address,
    delta: u16,
    compensation: Compensation,
) -> Result<(), Outcome> {
    if headers.is_v4 {
        skb.update_ip_checksum(headers.l3 + 10, delta)?;
        skb.store(headers.l3 + 12, &[source.v4_bytes(), destination.v4_bytes()])
    } else if compensation == Compensation::Pseudo {
        skb.store_summed(headers.l3 + 8, source.bytes())?;
        skb.store_summed(headers.l3 + 24, destination.bytes())
    } else {
        skb.store(headers.l3 + 8, source.bytes())?;
        skb.store(headers.l3 + 24, destination.bytes())
    }
}

/// Writes the ports, which TCP, UDP and SCTP have at the same offset.
#[inline(always)]
pub(super) fn ports(skb: &mut Skb, l4: u32, to: &Tuple) -> Result<(), Outcome> {
    skb.store(l4, &[to.source_port.to_be_bytes(), to.destination_port.to_be_bytes()])
}

/// The change of a checksum when the first byte of a word changes.
#[inline(always)]
pub(super) fn changed_byte(before: u8, after: u8) -> u16 {
    Sum::ZERO.sub_word(u16::from_ne_bytes([before, 0])).add_word(u16::from_ne_bytes([after, 0])).fold()
}

/// Sets the hop limit.
#[inline(always)]
pub(super) fn hop_limit(skb: &mut Skb, headers: &Headers, hops: u8) -> Result<(), Outcome> {
    if !headers.is_v4 {
        return skb.store_summed(headers.l3 + 7, &[hops]);
    }
    let [before, _] = *skb.header::<[u8; 2]>(headers.l3 + 8)?;
    let delta = changed_byte(before, hops);
    skb.update_ip_checksum(headers.l3 + 10, delta)?;
    skb.store(headers.l3 + 8, &[hops])
}
