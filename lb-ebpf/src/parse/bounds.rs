//! Bounds that the verifiers of all supported kernels know of.
//!
//! LLVM may compare one copy of a value and use another. Newer kernels know that both are the same; Linux 6.1 knows the
//! bounds only of the copy that was compared, and refuses the access through the other one. So what bounds a value is one
//! block of assembly here, and what comes out of it is the only copy that has passed it.

use crate::parse::frame::MAX_OFFSET;

// [`bounded`] takes it for a mask.
const _: () = assert!((MAX_OFFSET + 1).is_power_of_two());

/// An offset that was found not to be greater than [`MAX_OFFSET`].
#[inline(always)]
pub fn bounded(offset: u32) -> u32 {
    #[cfg(target_arch = "bpf")]
    if !core::intrinsics::is_val_statically_known(offset) {
        let bounded: u32;
        // SAFETY: computes with a register.
        unsafe {
            core::arch::asm!(
                "{bounded} &= {mask}",
                bounded = inout(reg) offset => bounded,
                mask = const MAX_OFFSET,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        return bounded;
    }
    offset
}

/// The value, or that of `MIN` and `MAX` which is closest.
#[inline(always)]
pub fn clamped<const MIN: u32, const MAX: u32>(value: u32) -> u32 {
    const { assert!(MIN <= MAX && MAX <= i32::MAX as u32) };
    #[cfg(target_arch = "bpf")]
    {
        let mut clamped = u64::from(value);
        // SAFETY: computes with a register, and jumps within the block.
        unsafe {
            core::arch::asm!(
                "if {clamped} >= {min} goto +1",
                "{clamped} = {min}",
                "if {clamped} <= {max} goto +1",
                "{clamped} = {max}",
                clamped = inout(reg) clamped,
                min = const MIN,
                max = const MAX,
                options(pure, nomem, nostack),
            );
        }
        clamped as u32
    }
    #[cfg(not(target_arch = "bpf"))]
    value.clamp(MIN, MAX)
}
