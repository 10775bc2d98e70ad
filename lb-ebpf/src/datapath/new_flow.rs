//! Packets of no flow: what they are for, and whether they may.

use aya_ebpf::btf_maps::lpm_trie::Key;
use lb_common::{Address, Outcome, Service, SourceRange, service_flags};
use lb_ebpf::packet::{Body, Packet};

use super::{answer, log, maps::SOURCE_RANGES, open, services, settings, skb::Skb, vips};

/// A packet of no flow, or of one that is over (`earlier`). If it is for a service, a backend is chosen and the flow
/// exists from now on ([`Outcome::NewFlow`]), or the packet is rejected or dropped.
#[inline(never)]
pub(super) fn new_flow(skb: &mut Skb, packet: &Packet, earlier: bool) -> Outcome {
    try_new_flow(skb, packet, earlier).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_new_flow(skb: &mut Skb, packet: &Packet, earlier: bool) -> Result<Outcome, Outcome> {
    let service = match services::lookup(&packet.tuple) {
        Ok(service) => service,
        Err(Outcome::NoService) => return Ok(vips::unlisted(skb, packet)),
        Err(other) => return Err(other),
    };
    match packet.body {
        // Its first fragment was not translated, so this one must not be.
        Body::LaterFragment => return Err(Outcome::UnknownFragment),
        Body::Tcp | Body::Sctp if packet.segment.resets() => return Err(Outcome::StrayReset),
        Body::Tcp | Body::Udp | Body::Sctp | Body::IcmpError | Body::Echo => {}
    }
    let (service, inside) = settings::for_client(skb, &packet.tuple.source, service);
    admit(&service, &packet.tuple.source)?;
    if service.backends_count == 0 {
        return Ok(answer::reject(skb, packet));
    }
    open::open(skb, packet, &service, service.masquerades(inside), earlier)?;
    log::new_flow(skb);
    Ok(Outcome::NewFlow)
}

/// Whether the service takes this client.
#[inline(always)]
fn admit(service: &Service, client: &Address) -> Result<(), Outcome> {
    if service.flags & service_flags::SOCKETS_ONLY != 0 {
        return Err(Outcome::NoService);
    }
    if service.flags & service_flags::SOURCE_RANGES != 0 && !is_in_source_range(service.id, client) {
        return Err(Outcome::SourceNotAllowed);
    }
    if service.backends_count == 0 && service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0 {
        return Err(Outcome::NoLocalBackend);
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn is_in_source_range(service: u32, client: &Address) -> bool {
    SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange::new(service, *client))).is_some()
}
