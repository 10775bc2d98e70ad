//! Packets to an address and port that no Service has, and echo requests to virtual addresses.

use lb_common::{Address, Outcome, Vip, vip_flags};
use lb_ebpf::{
    parse::Packet,
    rules::unlisted::{self, Unlisted},
};

use crate::datapath::{maps::VIPS, reject, settings, skb::Skb};

#[inline(always)]
pub(crate) fn lookup(address: &Address) -> Option<Vip> {
    // SAFETY: the memory of an element stays mapped while the program runs, and its one word is copied at once.
    unsafe { VIPS.get(address) }.copied()
}

/// The kind of an address at which no Service has the port of a packet or system call.
#[inline(always)]
pub(crate) fn unlisted_address(address: &Address, is_rst: bool) -> Unlisted {
    unlisted_by(address, || lookup(address), is_rst)
}

#[inline(always)]
fn unlisted_by(address: &Address, vip: impl FnOnce() -> Option<Vip>, is_rst: bool) -> Unlisted {
    unlisted::unlisted(settings::is_in_service_range(address), vip, settings::drops_unknown_vips, is_rst)
}

/// Decides about a packet to an address and port that no Service has.
#[inline(never)]
pub(crate) fn unlisted(skb: &mut Skb, packet: &Packet) -> Outcome {
    let unlisted = unlisted_address(&packet.tuple.destination, packet.segment.is_rst());
    if unlisted.is_rejected() {
        return reject::reject(skb, packet);
    }
    unlisted.outcome(packet.tuple.protocol)
}

/// Decides about an echo request, and answers it if its destination is a virtual address that has the flag `ECHO`.
#[inline(never)]
pub(crate) fn echo(skb: &mut Skb, packet: &Packet) -> Outcome {
    match lookup(&packet.tuple.destination) {
        Some(vip) if vip.flags & vip_flags::ECHO != 0 => reject::echo(skb, packet),
        Some(_) => Outcome::NotTransport,
        None => match unlisted_by(&packet.tuple.destination, || None, false) {
            Unlisted::UnknownVip => Outcome::UnknownVip,
            _ => Outcome::NotTransport,
        },
    }
}
