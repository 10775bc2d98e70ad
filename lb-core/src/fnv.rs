//! The 64-bit FNV-1a hash of texts, which takes little code and gives the same result on all machines and in all
//! versions.

/// The hash of the parts, each with a `/` after it.
pub fn fnv1a(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([b'/']));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
