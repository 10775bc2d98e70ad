//! Lets the programs read `ip_summed` of the kernel's `sk_buff`: whether a packet has its checksum, or the device is to
//! compute it.
//!
//! The object has four placeholder instructions wherever a program asks for the field
//! (`lb-ebpf/src/datapath/checksum.rs`). They return "unknown". This module replaces them by four instructions that
//! read the field through `bpf_cast_to_kern_ctx` (Linux 6.2).

use std::{borrow::Cow, sync::LazyLock};

use tracing::debug;

use crate::bpf::{
    kernel_types::KernelTypes,
    loader::OBJECT,
    sys::{self, Instruction},
};

/// The placeholder instructions in the object: `r0 = value` four times.
const PLACEHOLDER: [Instruction; 4] = [
    Instruction::set(0, 0x4c42_0001),
    Instruction::set(0, 0x4c42_0002),
    Instruction::set(0, 0x4c42_0003),
    Instruction::set(0, 4),
];

static LINKED: LazyLock<Cow<'static, [u8]>> = LazyLock::new(|| link(OBJECT));

/// The BPF object for this kernel: [`OBJECT`], with the placeholders replaced if programs can read `ip_summed`.
pub fn linked_object() -> &'static [u8] {
    &LINKED
}

/// Replaces the placeholders in `object`; leaves them if programs cannot read `ip_summed` on this kernel.
pub fn link(object: &[u8]) -> Cow<'_, [u8]> {
    let reads = KernelTypes::read().and_then(|types| read_ip_summed(&types));
    let Some(reads) = reads.filter(accepts) else {
        debug!("this kernel does not show sk_buff::ip_summed: the programs look at the packets");
        return Cow::Borrowed(object);
    };
    Cow::Owned(replace(object, bytemuck::bytes_of(&PLACEHOLDER), bytemuck::bytes_of(&reads)))
}

/// The instructions that read `ip_summed` of the `sk_buff` whose context is in r1.
fn read_ip_summed(types: &KernelTypes) -> Option<[Instruction; 4]> {
    let cast = types.function("bpf_cast_to_kern_ctx")?;
    let field = types.field("sk_buff", "ip_summed").filter(|field| field.bits == 2)?;
    // Requires both bits of `ip_summed` in one byte, and a little-endian machine, where BTF numbers the bits of a byte
    // from the lowest.
    let shift =
        i32::try_from(field.offset % 8).ok().filter(|shift| *shift <= 6 && cfg!(target_endian = "little"))?;
    Some([
        Instruction::call_kernel(i32::try_from(cast).ok()?),
        Instruction::load_byte(0, 0, i16::try_from(field.offset / 8).ok()?),
        Instruction::shift_right(0, shift),
        Instruction::and(0, 3),
    ])
}

/// Whether the kernel accepts the instructions, and they read `CHECKSUM_NONE` in a test run.
fn accepts(reads: &[Instruction; 4]) -> bool {
    let program: Vec<Instruction> = reads.iter().copied().chain([Instruction::exit()]).collect();
    match sys::run_once(&program) {
        Ok(0) => true,
        Ok(other) => {
            debug!("sk_buff::ip_summed of a test run is {other}");
            false
        }
        Err(error) => {
            debug!("cannot read sk_buff::ip_summed: {error}");
            false
        }
    }
}

/// A copy of `object` in which `to` replaces every `from`; both have the same length.
fn replace(object: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut replaced = object.to_vec();
    for at in places(object, from) {
        replaced[at..][..to.len()].copy_from_slice(to);
    }
    replaced
}

/// Offsets of the instructions in the object; instructions are aligned to their size.
fn places<'a>(object: &'a [u8], instructions: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    (0..object.len()).step_by(size_of::<Instruction>()).filter(|at| object[*at..].starts_with(instructions))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_asks_for_the_field() {
        let from = bytemuck::bytes_of(&PLACEHOLDER);
        let count = places(OBJECT, from).count();
        let anywhere = OBJECT.windows(from.len()).filter(|bytes| *bytes == from).count();
        assert_eq!(count, anywhere, "all are aligned");
        assert!(count >= 4, "both tc hooks, on both kinds of devices, rewrite packets: {count}");
        let replaced = replace(OBJECT, from, &[0; 32]);
        assert_eq!(replaced.len(), OBJECT.len());
        assert_eq!(places(&replaced, from).count(), 0);
    }
}
