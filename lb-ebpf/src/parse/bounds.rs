//! Bounds that the verifiers of all supported kernels accept.
//!
//! LLVM may compare one copy of a value and use another. Newer verifiers track that both are equal. The verifier of
//! Linux 6.1 tracks only the bounds of the copy that was compared, and rejects an access through the other copy. So
//! each bound here is one block of assembly, and its output is the only copy of the value that has passed the
//! comparison.

use crate::parse::frame::MAX_OFFSET;

// [`bounded`] uses `MAX_OFFSET` as a mask.
const _: () = assert!((MAX_OFFSET + 1).is_power_of_two());

/// Returns `offset`, which must not exceed [`MAX_OFFSET`]; a mask proves the bound to the verifier.
#[inline(always)]
pub fn bounded(offset: u32) -> u32 {
    masked::<MAX_OFFSET>(offset)
}

/// Returns `value`, which must not exceed `MASK`; the mask proves the bound to the verifier, without a branch.
#[inline(always)]
pub fn masked<const MASK: u32>(value: u32) -> u32 {
    #[cfg(target_arch = "bpf")]
    if !core::intrinsics::is_val_statically_known(value) {
        let masked: u32;
        // SAFETY: the block reads and writes only its own register.
        unsafe {
            core::arch::asm!(
                "{masked} &= {mask}",
                masked = inout(reg) value => masked,
                mask = const MASK,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        return masked;
    }
    value
}

/// The value, clamped to `MIN..=MAX`.
#[inline(always)]
pub fn clamped<const MIN: u32, const MAX: u32>(value: u32) -> u32 {
    const { assert!(MIN <= MAX && MAX <= i32::MAX as u32) };
    #[cfg(target_arch = "bpf")]
    {
        let mut clamped = u64::from(value);
        // SAFETY: the block reads and writes only its own register, and its jumps stay within it.
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
