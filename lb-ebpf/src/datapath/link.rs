//! The link layer: which frames are for this node alone. All others pass untouched: the stack forwards them between the
//! ports of a bridge, takes broadcasts and multicasts itself, hands frames to a VLAN device, or drops them.

use lb_ebpf::parse::{
    Layer,
    frame::{Frame, half_word, lengths},
};

use super::{device, skb::Skb};

/// `skb->pkt_type` of a frame for the device (include/uapi/linux/if_packet.h).
const PACKET_HOST: u32 = 0;
/// `skb->pkt_type` of a frame for a unicast MAC address that is not the device's.
const PACKET_OTHERHOST: u32 = 3;
/// The bits of a VLAN tag that name the VLAN; 0 in a tag that only has a priority.
const VLAN_ID: u32 = 0xfff;

/// Whether the frame is for this node alone, at this device. If not, the stack forwards it, takes it as a broadcast or
/// multicast, drops it, or hands it to a VLAN device. A VLAN device in the node's network namespace has programs of its
/// own.
#[inline(always)]
pub(crate) fn takes(skb: &Skb) -> bool {
    if skb.layer != Layer::Ethernet {
        return true;
    }
    // SAFETY: the context is valid for the whole run of the program.
    let kind = unsafe { (*skb.ctx.skb.skb).pkt_type };
    !has_vlan_beside(skb) && (kind == PACKET_HOST || (kind == PACKET_OTHERHOST && is_for_bridge(skb)))
}

/// Whether the frame belongs to a VLAN, so that the programs of the VLAN's device, if that device has programs, handle
/// the packet in the frame. `l3` is the offset of the network header.
#[inline(always)]
pub(crate) fn is_of_vlan(skb: &Skb, l3: u32) -> bool {
    l3 > lengths::ETHERNET || has_vlan_beside(skb)
}

/// Whether the skb holds, outside the frame, a tag that names a VLAN.
#[inline(always)]
pub(super) fn has_vlan_beside(skb: &Skb) -> bool {
    // SAFETY: the context is valid for the whole run of the program.
    let tag = unsafe { (*skb.ctx.skb.skb).vlan_tci };
    // Before Linux 6.2 the tag that a VLAN device has taken out stays in `vlan_tci`.
    tag & VLAN_ID != 0 && skb.is_tagged()
}

/// Whether the frame is for the bridge that the device is a port of. `pkt_type` does not show it: the kernel has
/// compared the frame's destination with the MAC address of the port.
#[inline(never)]
fn is_for_bridge(skb: &Skb) -> bool {
    is_for_node(skb, skb.context().device)
}

/// Whether the destination of a frame on this device is the node's own MAC address.
#[inline(always)]
pub(crate) fn is_for_node<F: Frame>(frame: &F, device: u32) -> bool {
    let Ok([a, b, c]) = frame.header::<[[u8; 2]; 3]>(0) else { return false };
    has_mac(device, half_word(a).into(), half_word(b).into(), half_word(c).into()) != 0
}

/// Whether the frame is for this MAC address.
#[inline(always)]
pub(crate) fn is_to<F: Frame>(frame: &F, mac: &[u8; 6]) -> bool {
    let Ok([a, b, c]) = frame.header::<[[u8; 2]; 3]>(0) else { return false };
    let [d, e, f]: &[[u8; 2]; 3] = bytemuck::must_cast_ref(mac);
    let difference = |left, right| half_word(left) ^ half_word(right);
    difference(a, d) | difference(b, e) | difference(c, f) == 0
}

/// Returns 1 if frames that reach the node through this device have this destination address, given as three words of
/// 16 bits in network byte order; else 0. (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn has_mac(device: u32, a: u32, b: u32, c: u32) -> u32 {
    let mac = device::info(device).mac;
    let [d, e, f]: [[u8; 2]; 3] = bytemuck::must_cast(mac);
    let differs =
        (a ^ u32::from(half_word(&d))) | (b ^ u32::from(half_word(&e))) | (c ^ u32::from(half_word(&f)));
    u32::from(differs == 0)
}
