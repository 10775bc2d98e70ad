//! ICMP errors about packets that we have translated: routers and hosts quote what they saw, the receiver must find
//! what it sent. Without this there is no path MTU discovery through a VIP.

use lb_common::{
    Address, Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple, flow_flags},
    protocol,
};
use lb_ebpf::{
    parse::{
        Headers, Quoted,
        frame::{Frame as _, half_word, v4_address, v6_address},
        parse_quoted,
    },
    reject::icmp_protocol,
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use super::{
    Hook,
    flow::conntrack,
    forward::routed,
    maps::scratch,
    rewrite::{self, Compensation},
    skb::{ChecksumField, Skb},
};

/// The error is about what a backend on another node has sent in answer to the flow whose key is left in `SCRATCH`: it goes
/// there as it is.
pub(super) const ELSEWHERE: Outcome = Outcome::Tunnelled;

/// The ICMP type of a redirect, RFC 792. (That of IPv6 is no error but neighbour discovery, and quotes nothing we would
/// look at.)
const REDIRECT: u8 = 5;

/// Translates an ICMP error back to where the packet that it quotes came from.
///
/// The quoted packet went the other way, so it belongs to the flow whose key is its reversed tuple, and it becomes
/// what that flow's packets become, reversed.
#[inline(never)]
pub(super) fn translate(skb: &mut Skb, headers: &Headers, hook: Hook) -> Outcome {
    try_translate(skb, headers, hook).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_translate(skb: &mut Skb, headers: &Headers, hook: Hook) -> Result<Outcome, Outcome> {
    let quoted = read_quoted(skb, headers)?;
    let key = quoted.tuple.reversed();
    let flow = conntrack::lookup(&key).ok_or(Outcome::UnknownIcmpError)?;
    if !hook.translates(flow) {
        return Err(Outcome::OtherHook);
    }
    if flow.is_tunnelled() {
        scratch()?.of_error = key;
        return Ok(ELSEWHERE);
    }
    let [kind, _] = *skb.header::<[u8; 2]>(headers.l4)?;
    if headers.is_v4 && kind == REDIRECT {
        // It would lead its receiver past the VIP.
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
        return routed::send_error(skb, &to);
    }
    // A pod's error about its own packet: the stack might refuse the VIP as a source on the pod's device.
    let hairpin = flow.flags & flow_flags::HAIRPIN != 0;
    Ok(if hairpin { Outcome::Hairpin } else { Outcome::IcmpError })
}

/// Parses the quoted packet; where it lies outside the linear part of the buffer, it is pulled in first.
#[inline(always)]
pub(super) fn read_quoted(skb: &mut Skb, headers: &Headers) -> Result<Quoted, Outcome> {
    for _ in 0..2 {
        match parse_quoted(skb, headers) {
            Err(Outcome::Malformed) if skb.pull_headers() => {}
            parsed => return parsed,
        }
    }
    Err(Outcome::Malformed)
}

/// Rewrites the quoted packet; returns by how much that changes the ICMP checksum, which covers it.
#[inline(always)]
fn rewrite_quoted(skb: &mut Skb, quoted: &Headers, protocol: u8, flow: &Flow) -> Result<u16, Outcome> {
    let to = flow.to.reversed();
    let checksum = transport_checksum(skb, quoted, protocol);
    let (source, destination) = (&to.source, &to.destination);
    rewrite::addresses(skb, quoted, source, destination, flow.address_delta, Compensation::Message)?;
    rewrite::ports(skb, quoted.l4, &to)?;
    let mut delta = Sum::ZERO.add_word(flow.port_delta);
    // The header checksum of IPv4 makes up for the addresses; IPv6 has none.
    if !quoted.is_v4 {
        delta = delta.add_word(flow.address_delta);
    }
    if let Ok(before) = checksum {
        let field = ChecksumField::of(protocol, quoted.l4);
        skb.update_checksum(field, flow.address_delta, false)?;
        skb.update_checksum(field, flow.port_delta, false)?;
        let after = half_word(skb.header(field.offset)?);
        delta = delta.sub_word(before).add_word(after);
    }
    Ok(delta.fold())
}

/// The quoted transport checksum, if the quote reaches that far. That of SCTP covers what is not quoted, so that nobody
/// can check it; it stays as it is.
#[inline(always)]
fn transport_checksum(skb: &Skb, quoted: &Headers, protocol: u8) -> Result<u16, Outcome> {
    if protocol == protocol::SCTP {
        return Err(Outcome::Malformed);
    }
    Ok(half_word(skb.header(ChecksumField::of(protocol, quoted.l4).offset)?))
}

/// Rewrites the addresses of the ICMP packet itself; returns by how much they change a checksum.
///
/// Like nf_nat we translate whatever source the error has: the receiver must not learn of an address that it never
/// spoke to, and its reverse path filter may not know it.
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
