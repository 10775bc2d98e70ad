//! ICMP errors about translated packets: routers and hosts quote the packet that they received, but the receiver of
//! the error must find in the quote the packet that it has sent. So the programs translate the quote; path MTU
//! discovery through a VIP depends on that.

use lb_common::{
    Address, Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple, flow_flags, seen},
    protocol,
};
use lb_ebpf::{
    headers::icmp_protocol,
    parse::{
        Headers,
        frame::{Frame as _, half_word, v4_address, v6_address, word},
        parse_quoted,
    },
    proxy_protocol,
    rules::{flow::turned, forwarding::is_last_hop},
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use super::{
    context::Hook,
    flow::{conntrack, of_node},
    rewrite::{self, Compensation},
    route,
    scratch::scratch,
    skb::{ChecksumField, Skb},
};

/// The result of [`translate`].
///
/// It fits into one register, which is all that a subprogram returns: the variant without a field is a value that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(super) enum Translated {
    /// The message is handled, with this outcome.
    Done(Outcome),
    /// The message is unchanged: it is about a packet of a backend on another node, and has to go to that node through
    /// a tunnel. The key of the flow is in `SCRATCH`.
    ThroughTunnel,
}

const _: () = assert!(size_of::<Translated>() == size_of::<Outcome>());

/// The ICMP type of a redirect, RFC 792. (The redirect of IPv6 belongs to neighbour discovery, and does not quote a
/// packet the way errors do.)
const REDIRECT: u8 = 5;

/// Translates an ICMP error for the sender of the packet that it quotes.
///
/// The quoted packet went in the opposite direction, so the error belongs to the entry whose key is the reversed tuple
/// of the quoted packet. In the translated error, the quoted packet has the reverse of the tuple `to` of that entry.
#[inline(never)]
pub(super) fn translate(skb: &mut Skb, headers: &Headers, hook: Hook) -> Translated {
    translate_quoted(skb, headers, hook).unwrap_or_else(Translated::Done)
}

#[inline(always)]
fn translate_quoted(skb: &mut Skb, headers: &Headers, hook: Hook) -> Result<Translated, Outcome> {
    // The quoted headers are in the linear part: the caller has pulled headers before it parsed the message.
    let quoted = parse_quoted(skb, headers)?;
    let key = quoted.tuple.reversed();
    let flow = conntrack::lookup(&key).ok_or(Outcome::UnknownIcmpError)?;
    if !hook.translates(flow) || of_node::is_of_other_flow(skb, headers.l3, hook, flow) {
        return Err(Outcome::OtherHook);
    }
    if flow.is_tunnelled() {
        *scratch()?.error_key() = key;
        return Ok(Translated::ThroughTunnel);
    }
    let [kind, _] = *skb.header::<[u8; 2]>(headers.l4)?;
    if headers.is_v4 && kind == REDIRECT {
        // A redirect would make its receiver bypass the VIP.
        return Err(Outcome::IcmpRedirect);
    }
    let inner = rewrite_quoted(skb, &quoted.headers, key.protocol, flow)?;
    let outer = rewrite_outer(skb, headers, &key, flow)?;
    let checksum = ChecksumField::of(icmp_protocol(headers.is_v4), headers.l4);
    skb.update_checksum(checksum, inner, false)?;
    if !headers.is_v4 {
        skb.update_checksum(checksum, outer, true)?;
    }
    if flow.flags & flow_flags::ROUTED != 0 {
        let to = Tuple { protocol: icmp_protocol(headers.is_v4), ..flow.to };
        route::resolve(skb, &key, &to)?;
        if is_last_hop(rewrite::hops_left(skb, headers)?) {
            // An ICMP error is never answered with an ICMP error (RFC 1122 §3.2.2).
            return Err(Outcome::NoRoute);
        }
        rewrite::take_hop(skb, headers)?;
        return Ok(Translated::Done(Outcome::RoutedIcmpError));
    }
    // In a hairpin flow, a pod or another node reports an error about a packet that it has sent itself. The error
    // bypasses the stack and goes back through the device by which it came, because the stack might refuse the VIP as a
    // source on that device. (A caught flow has the same bit; an error about it passes, as `Caught`.)
    let hairpin = flow.flags & flow_flags::HAIRPIN != 0;
    Ok(Translated::Done(if hairpin { turned(flow) } else { Outcome::IcmpError }))
}

/// Rewrites the quoted packet; returns the change of the ICMP checksum, which covers it.
#[inline(always)]
fn rewrite_quoted(skb: &mut Skb, quoted: &Headers, protocol: u8, flow: &Flow) -> Result<u16, Outcome> {
    let to = flow.to.reversed();
    let checksum = transport_checksum(skb, quoted, protocol);
    let (source, destination) = (&to.source, &to.destination);
    rewrite::addresses(skb, quoted, source, destination, flow.address_delta, Compensation::Message)?;
    rewrite::ports(skb, quoted.l4, &to)?;
    let seq_delta = rewrite_quoted_seq(skb, quoted, flow)?;
    let mut delta = Sum::ZERO.add_word(flow.port_delta).add_word(seq_delta);
    // The header checksum of IPv4 compensates the addresses; an IPv6 header has no checksum.
    if !quoted.is_v4 {
        delta = delta.add_word(flow.address_delta);
    }
    if let Some(before) = checksum {
        let field = ChecksumField::of(protocol, quoted.l4);
        skb.update_checksum(field, flow.address_delta, false)?;
        skb.update_checksum(field, flow.port_delta, false)?;
        skb.update_checksum(field, seq_delta, false)?;
        let after = half_word(skb.header(field.offset)?);
        delta = delta.sub_word(before).add_word(after);
    }
    Ok(delta.fold())
}

/// Restores the sequence number that the client sent in the quoted segment, if the programs have shifted it; returns
/// the change of a checksum over the quote. (The error goes to the client, so `flow` is the reverse entry.)
#[inline(always)]
fn rewrite_quoted_seq(skb: &mut Skb, quoted: &Headers, flow: &Flow) -> Result<u16, Outcome> {
    if !flow.has_proxy_header() || !flow.is_reply() || flow.seen & seen::PROXY_HEADER == 0 {
        return Ok(0);
    }
    let offset = quoted.l4 + proxy_protocol::SEQ as u32;
    let before = word(skb.header(offset)?);
    let after = u32::from_be(before).wrapping_sub(proxy_protocol::length(flow.to.source.is_v4())).to_be();
    skb.store(offset, &after.to_ne_bytes())?;
    Ok(Sum::ZERO.add_wide(!before).add_wide(after).fold())
}

/// The quoted transport checksum, if the quote reaches that far. `None` for SCTP: its checksum covers bytes that are
/// not quoted, so no receiver can verify it, and it stays as it is.
#[inline(always)]
fn transport_checksum(skb: &Skb, quoted: &Headers, protocol: u8) -> Option<u16> {
    if protocol == protocol::SCTP {
        return None;
    }
    skb.header(ChecksumField::of(protocol, quoted.l4).offset).ok().map(half_word)
}

/// Rewrites the addresses of the ICMP packet itself; returns the change of a checksum over them.
///
/// As in nf_nat, if the flow changes the source of its packets, the error also gets the new source, whichever router
/// has sent it: the receiver must not see an address that it never sent to, and its reverse path filter might drop the
/// error.
#[inline(always)]
fn rewrite_outer(skb: &mut Skb, headers: &Headers, key: &Tuple, flow: &Flow) -> Result<u16, Outcome> {
    let (old_source, old_destination) = read_addresses(skb, headers)?;
    let source = if flow.to.source == key.source { old_source } else { flow.to.source };
    let destination =
        if flow.to.destination == key.destination { old_destination } else { flow.to.destination };
    let delta = Sum::ZERO
        .sub_16(old_source.bytes())
        .sub_16(old_destination.bytes())
        .add_16(source.bytes())
        .add_16(destination.bytes())
        .fold();
    rewrite::addresses(skb, headers, &source, &destination, delta, Compensation::Pseudo)?;
    Ok(delta)
}

#[inline(always)]
fn read_addresses(skb: &Skb, headers: &Headers) -> Result<(Address, Address), Outcome> {
    if headers.is_v4 {
        let header: &Ipv4Hdr = skb.header(headers.l3)?;
        Ok((v4_address(&header.src_addr), v4_address(&header.dst_addr)))
    } else {
        let header: &Ipv6Hdr = skb.header(headers.l3)?;
        Ok((v6_address(&header.src_addr), v6_address(&header.dst_addr)))
    }
}
