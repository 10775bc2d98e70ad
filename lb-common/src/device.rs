use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// Value of `DEVICES`, keyed by interface index: which frames are for this node, and which packets may bypass the stack
/// on this device. A device that is not in the map has no special properties: packets may still leave through it, by
/// their route and neighbour.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct DeviceInfo {
    /// MTU: the largest IP packet, in bytes.
    pub mtu: u32,
    /// Bits of [`device_flags`].
    pub flags: u32,
    /// The MAC address of frames for this node: that of the device, or of its bridge; zeros if the device has no
    /// link-layer header.
    pub mac: [u8; 6],
    /// Padding, always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<DeviceInfo>() == 16);

describe!(DeviceInfo { mtu, flags, mac, reserved });

impl DeviceInfo {
    /// A device that is not in the map.
    pub const UNKNOWN: Self = Self { mtu: 0, flags: 0, mac: [0; 6], reserved: [0; 2] };

    /// Whether packets of the device have an Ethernet header: see [`Self::mac`].
    pub fn has_link_layer(&self) -> bool {
        self.mac != [0; 6]
    }
}

/// Bits of [`DeviceInfo::flags`].
pub mod device_flags {
    /// A wire device (it leads to other machines) on which packets may bypass the stack, because it runs the XDP
    /// program or the node forwards directly. Packets of routed flows pass between such devices
    /// ([`crate::conntrack::flow_flags::ROUTED`]).
    pub const WIRE: u32 = 1;
    /// The device transmits frames that XDP programs on other devices redirect to it.
    pub const XDP_REDIRECT_TARGET: u32 = 2;
    /// The device is the host-side end of a pod's veth or netkit pair, and the node forwards directly: packets may go
    /// straight to the pod's end (`bpf_redirect_peer`).
    pub const REDIRECT_PEER: u32 = 4;
    /// Tunnels of peers may end here: this is a wire device without pods behind it.
    pub const TUNNELS: u32 = 8;
    /// The device transmits frames that its own XDP program sends back (XDP_TX).
    pub const XDP_TX: u32 = 16;
    /// The catch device: the node routes the ranges of cluster IPs to it, and its egress program redirects packets to
    /// its ingress. It gets the packets to cluster IPs that no program has translated.
    pub const CATCH: u32 = 32;
    /// A bridge of pods, on a node with a catch device. Untranslated packets to cluster IPs come in through the bridge
    /// only if the pod's port has no programs. Their flows are [caught](crate::conntrack::flow_flags::CAUGHT), because
    /// the bridge would forward replies to the pod's address without passing them to its own programs.
    pub const BRIDGES_PODS: u32 = 64;
    /// A workload device: packets that the node receives on it come from a pod of the node.
    pub const WORKLOAD: u32 = 128;
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for DeviceInfo {}
