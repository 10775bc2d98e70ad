//! Packets to a virtual address that are for none of its ports.

use lb_common::{Address, Outcome, Vip, vip_flags};
use lb_ebpf::parse::Packet;

use crate::datapath::{maps::VIPS, reject, settings, skb::Skb};

#[inline(always)]
pub(crate) fn lookup(address: &Address) -> Option<Vip> {
    // SAFETY: one word, copied at once.
    unsafe { VIPS.get(address) }.copied()
}

/// A packet to a port that no service has: rejected where the address is a cluster IP, dropped where it could become one
/// and the range was declared to be of nothing else. (Passed on, it would follow the default route out of the cluster, or
/// run in circles.)
#[inline(never)]
pub(in crate::datapath) fn unlisted(skb: &mut Skb, packet: &Packet) -> Outcome {
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

/// An echo request, answered where it is for a virtual address.
#[inline(never)]
pub(in crate::datapath) fn echo(skb: &mut Skb, packet: &Packet) -> Outcome {
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
