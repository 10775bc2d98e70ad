//! Rewriting a packet of a flow.

use aya_ebpf::helpers::generated::bpf_loop;
use lb_common::{
    Address, Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple},
    crc32c::Change,
};
use lb_ebpf::{
    frame::{Frame as _, word},
    packet::{Body, Headers, Packet},
};

use super::{
    maps::scratch,
    skb::{ChecksumField, Skb},
};

/// Gives the packet the addresses and ports with which packets of `flow` go on.
#[inline(always)]
pub(super) fn packet(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let headers = &packet.headers;
    addresses(skb, headers, &flow.to.source, &flow.to.destination, flow.address_delta, Compensation::Pseudo)?;
    if packet.body == Body::LaterFragment {
        return Ok(());
    }
    if packet.body == Body::Sctp {
        return sctp(skb, packet, flow);
    }
    let checksum = ChecksumField::of(packet.tuple.protocol, packet.headers.l4);
    skb.update_checksum(checksum, flow.address_delta, true)?;
    if flow.port_delta != 0 {
        skb.update_checksum(checksum, flow.port_delta, false)?;
    }
    ports(skb, packet.headers.l4, &flow.to)
}

/// Where the checksum of SCTP is, in octets from its header.
const SCTP_CHECKSUM: u32 = 8;

/// Writes the ports of an SCTP packet. Its checksum covers no addresses, but everything else.
#[inline(never)]
fn sctp(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let (s, d) = (flow.to.source_port.to_be_bytes(), flow.to.destination_port.to_be_bytes());
    let after = u32::from_le_bytes([s[0], s[1], d[0], d[1]]);
    let delta = u32::from_le(word(skb.header(l4)?)) ^ after;
    if delta == 0 {
        return Ok(());
    }
    skb.store_anew(l4, &after.to_le_bytes())?;
    let before = u32::from_le(word(skb.header(l4 + SCTP_CHECKSUM)?));
    if before == 0 {
        // Left to the device to compute.
        return Ok(());
    }
    let checksum = before ^ change_of_crc(delta, packet.segment.payload)?;
    skb.store_anew(l4 + SCTP_CHECKSUM, &checksum.to_le_bytes())
}

#[inline(always)]
fn change_of_crc(delta: u32, length: u32) -> Result<u32, Outcome> {
    scratch()?.crc = Change::new(delta, length);
    // SAFETY: `step` has the signature that the kernel calls it with, and needs no context.
    unsafe { bpf_loop(Change::STEPS, step as *mut _, core::ptr::null_mut(), 0) };
    Ok(scratch()?.crc.result())
}

/// Called by the kernel, so that the verifier walks it once.
extern "C" fn step(_index: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    scratch.crc.step();
    0
}

/// What makes up for a change of IPv6 addresses, which no checksum of their own covers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Compensation {
    /// A checksum over the pseudo header. To update it, the kernel takes the change out of its sum over the frame
    /// (`CHECKSUM_COMPLETE`) as if the addresses were not in there, so we must put them in; IPv4 addresses are made up
    /// for by the header's checksum. (`BPF_F_IPV6` says the same, to Linux 6.16 and newer.)
    Pseudo,
    /// The checksum of an ICMP message that quotes them.
    Message,
}

/// Writes the addresses of a network header and updates its own checksum, which only IPv4 has.
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
        skb.store(headers.l3 + 12, &[source.v4_octets(), destination.v4_octets()])
    } else if compensation == Compensation::Pseudo {
        skb.store_anew(headers.l3 + 8, source.octets())?;
        skb.store_anew(headers.l3 + 24, destination.octets())
    } else {
        skb.store(headers.l3 + 8, source.octets())?;
        skb.store(headers.l3 + 24, destination.octets())
    }
}

/// Writes the ports, which TCP and UDP have at the same place.
#[inline(always)]
pub(super) fn ports(skb: &mut Skb, l4: u32, to: &Tuple) -> Result<(), Outcome> {
    skb.store(l4, &[to.source_port.to_be_bytes(), to.destination_port.to_be_bytes()])
}

/// By how much the first octet of a word changes a checksum.
#[inline(always)]
pub(super) fn changed_octet(before: u8, after: u8) -> u16 {
    Sum::ZERO.sub_word(u16::from_ne_bytes([before, 0])).add_word(u16::from_ne_bytes([after, 0])).fold()
}

/// Writes how many hops the packet may still go.
#[inline(always)]
pub(super) fn hop_limit(skb: &mut Skb, headers: &Headers, hops: u8) -> Result<(), Outcome> {
    if !headers.is_v4 {
        return skb.store_anew(headers.l3 + 7, &[hops]);
    }
    let [before, _] = *skb.header::<[u8; 2]>(headers.l3 + 8)?;
    let delta = changed_octet(before, hops);
    skb.update_ip_checksum(headers.l3 + 10, delta)?;
    skb.store(headers.l3 + 8, &[hops])
}
