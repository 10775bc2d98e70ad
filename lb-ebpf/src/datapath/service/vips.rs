//! Packets to a virtual address that no frontend matches.

use lb_common::{Address, Outcome, Vip, vip_flags};
use lb_ebpf::parse::Packet;

use crate::datapath::{maps::VIPS, reject, settings, skb::Skb};

#[inline(always)]
pub(crate) fn lookup(address: &Address) -> Option<Vip> {
    // SAFETY: the memory of an element stays mapped while the program runs, and its one word is copied at once.
    unsafe { VIPS.get(address) }.copied()
}

/// Decides about a packet to a port that no service has: rejects it if the address is a cluster IP, and drops it if
/// the address could become one and the agent has declared that the range has no other use. (Passed on, it would
/// follow the default route out of the cluster, or loop.)
#[inline(never)]
pub(crate) fn unlisted(skb: &mut Skb, packet: &Packet) -> Outcome {
    if !settings::is_in_service_range(&packet.tuple.destination) {
        return Outcome::NoService;
    }
    match lookup(&packet.tuple.destination) {
        None if settings::drops_unknown_vips() => Outcome::UnknownVip,
        None => Outcome::NoService,
        Some(vip) if vip.flags & vip_flags::CLUSTER_IP == 0 => Outcome::NoService,
        Some(_) if packet.segment.is_rst() => Outcome::StrayReset,
        Some(_) => reject::reject(skb, packet),
    }
}

/// Answers an echo request to a virtual address.
#[inline(never)]
pub(crate) fn echo(skb: &mut Skb, packet: &Packet) -> Outcome {
    match lookup(&packet.tuple.destination) {
        Some(vip) if vip.flags & vip_flags::ECHO != 0 => reject::echo(skb, packet),
        Some(_) => Outcome::NotTransport,
        None if settings::drops_unknown_vips()
            && settings::is_in_service_range(&packet.tuple.destination) =>
        {
            Outcome::UnknownVip
        }
        None => Outcome::NotTransport,
    }
}
