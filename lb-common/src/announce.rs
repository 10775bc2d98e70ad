use bytemuck::{Pod, Zeroable};

use crate::{Address, layout::describe};

/// Key of `ANNOUNCED` and `ANNOUNCE_HEARD`: a virtual address, and the device on whose network it is announced.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct AnnounceKey {
    /// The virtual address that is announced.
    pub address: Address,
    /// Index of the device on whose network the address is announced.
    pub device: u32,
}

const _: () = assert!(size_of::<AnnounceKey>() == 20);

describe!(AnnounceKey { address, device });

/// Value of `ANNOUNCED`: the node's right to answer for a virtual address. Times are nanoseconds of `CLOCK_BOOTTIME`,
/// which goes on while the machine is suspended.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Announcement {
    /// The node answers ARP requests and neighbour solicitations for the address only before this time.
    pub deadline: u64,
    /// When the node got the right. A claim by another machine since then ends the right, even before the deadline.
    pub since: u64,
    /// The MAC address in the answers: that of the device.
    pub mac: [u8; 6],
    /// Padding, always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<Announcement>() == 24);

describe!(Announcement { deadline, since, mac, reserved });

impl Announcement {
    /// A deadline that never passes, for a node that alone announces its addresses.
    pub const NEVER: u64 = u64::MAX;
}

/// Value of `ANNOUNCE_HEARD`: answers that the programs have sent for an address on a device, and claims of other
/// machines to it. The agent inserts the element before the address is first announced; afterwards only the programs
/// write to it, so that no renewal of an [`Announcement`] can hide a conflict.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Heard {
    /// When another machine last claimed the address while this node had the right to answer for it, in nanoseconds of
    /// `CLOCK_BOOTTIME`; 0: never.
    pub conflict_at: u64,
    /// How many times another machine has claimed the address while this node had the right to answer for it. Each such
    /// claim ends the right, so further claims count only once the agent has renewed [`Announcement::since`].
    pub conflicts: u64,
    /// ARP requests and neighbour solicitations that the node has answered.
    pub answers: u64,
    /// ARP requests and neighbour solicitations that the node could not answer, because the kernel failed to rewrite or
    /// redirect the frame.
    pub failures: u64,
    /// The MAC address of the machine that made the claim at `conflict_at`.
    pub conflict_mac: [u8; 6],
    /// Padding, always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<Heard>() == 40);

describe!(Heard { conflict_at, conflicts, answers, failures, conflict_mac, reserved });

#[cfg(feature = "user")]
mod user {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::AnnounceKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Announcement {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::Heard {}
}
