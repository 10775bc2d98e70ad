//! Reads the kernel's record of a packet's checksums: `ip_summed` of its `sk_buff`.
//!
//! `__sk_buff` lacks the field. Since Linux 6.2, `bpf_cast_to_kern_ctx` returns the kernel's own structure. The call
//! costs nothing: the verifier turns it into a copy of the context pointer. The id of the function and the offset of
//! the field differ from kernel to kernel, so the loader replaces four placeholder instructions
//! (`lb-datapath/src/bpf/checksum.rs`). On a kernel without the function the placeholders stay, and the programs look
//! at the packet instead ([`lb_ebpf::rewrite::lacks_checksum`]).

use core::arch::asm;

use aya_ebpf::bindings::__sk_buff;

/// The state of a packet's checksums, from `ip_summed`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Checksum {
    /// The packet contains its checksum, and the kernel keeps no sum over the frame: `CHECKSUM_NONE` or
    /// `CHECKSUM_UNNECESSARY`.
    InPacket,
    /// The packet contains its checksum, and the kernel keeps a sum over the frame that the device has computed:
    /// `CHECKSUM_COMPLETE`.
    FrameSummed,
    /// The device that sends the packet is to compute the checksum: `CHECKSUM_PARTIAL`. Until then, the packet's
    /// checksum field holds the sum over the pseudo header.
    LeftToDevice,
    /// Unknown: this kernel does not show the field.
    Unknown,
}

impl Checksum {
    #[inline(always)]
    pub(super) fn of(skb: *mut __sk_buff) -> Self {
        match ip_summed(skb) {
            0 | 1 => Self::InPacket,
            2 => Self::FrameSummed,
            3 => Self::LeftToDevice,
            _ => Self::Unknown,
        }
    }

    /// Whether the kernel may keep a sum over the frame, which a change of the packet must update.
    #[inline(always)]
    pub(super) fn may_have_frame_sum(self) -> bool {
        matches!(self, Self::FrameSummed | Self::Unknown)
    }
}

/// `ip_summed` of the `sk_buff`, or 4 if the loader has not replaced the placeholder instructions.
#[inline(always)]
fn ip_summed(skb: *mut __sk_buff) -> u64 {
    let summed: u64;
    // SAFETY: the instructions only write registers. The instructions by which the loader replaces them call a function
    // that only returns its argument, the context of this program, and read a field of the structure that the returned
    // pointer leads to.
    unsafe {
        asm!(
            "r0 = 0x4c420001", // call bpf_cast_to_kern_ctx
            "r0 = 0x4c420002", // r0 = *(u8 *)(r0 + offset)
            "r0 = 0x4c420003", // r0 >>= shift
            "r0 = 4",          // r0 &= 3
            inlateout("r1") skb => _,
            lateout("r0") summed,
            lateout("r2") _,
            lateout("r3") _,
            lateout("r4") _,
            lateout("r5") _,
            options(pure, readonly, nostack),
        );
    }
    summed
}
