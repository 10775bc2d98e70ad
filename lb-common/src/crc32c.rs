//! The checksum of SCTP, CRC32c (RFC 9260 appendix A), and its update without walking the packet.
//!
//! A CRC is linear: when the first four bytes change, the change of the CRC depends only on the change of these bytes
//! and on the packet's length, not on its content. Polynomials over GF(2) are words with the coefficient of `x^0` in
//! the highest bit, because the algorithm takes bytes with their lowest bit first.

/// The generator polynomial without its highest term.
const GENERATOR: u32 = 0x82f6_3b78;
/// The polynomial 1, in the bit order of the CRC.
const ONE: u32 = 1 << 31;
/// Number of bits that hold a packet's length in bytes.
const LENGTH_BITS: usize = CrcChange::STEPS as usize;

/// `x^(8 * 2^k)` for every `k`: the factor that shifts a polynomial by 2^k bytes.
const BYTE_POWERS: [u32; LENGTH_BITS] = powers();

const fn powers() -> [u32; LENGTH_BITS] {
    let mut powers = [0; LENGTH_BITS];
    let mut power = ONE >> 8;
    let mut k = 0;
    while k < LENGTH_BITS {
        powers[k] = power;
        power = multiplied(power, power);
        k += 1;
    }
    powers
}

/// Multiplies by `x`, modulo the generator.
#[inline(always)]
const fn times_x(polynomial: u32) -> u32 {
    (polynomial >> 1) ^ (GENERATOR & 0u32.wrapping_sub(polynomial & 1))
}

/// The product of two polynomials, modulo the generator.
#[inline(always)]
const fn multiplied(a: u32, b: u32) -> u32 {
    let (mut a, mut b, mut product) = (a, b, 0);
    let mut bit = 0;
    while bit < 32 {
        product ^= b & 0u32.wrapping_sub(a >> 31);
        a <<= 1;
        b = times_x(b);
        bit += 1;
    }
    product
}

/// The change of a CRC32c (to be combined by exclusive or) when the first four bytes of a packet change.
///
/// It is computed in [`CrcChange::STEPS`] steps, so that a BPF program can run them in `bpf_loop`.
#[derive(Clone, Copy, Debug)]
pub struct CrcChange {
    change: u32,
    length: u32,
    done: u32,
}

impl CrcChange {
    /// Steps until [`Self::result`] is complete.
    pub const STEPS: u32 = 16;

    /// The change for a packet of `length` bytes (below 2^16) whose first four bytes change by `delta`: the exclusive
    /// or of their old and new values, as a little-endian word.
    #[inline(always)]
    pub const fn new(delta: u32, length: u32) -> Self {
        Self { change: delta, length, done: 0 }
    }

    /// Makes one step of the computation.
    #[inline(always)]
    pub const fn step(&mut self) {
        let bit = self.done as usize % LENGTH_BITS;
        if self.length >> bit & 1 != 0 {
            self.change = multiplied(self.change, BYTE_POWERS[bit]);
        }
        self.done += 1;
    }

    /// The result, after all steps.
    #[inline(always)]
    pub const fn result(&self) -> u32 {
        self.change
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// The CRC computed byte by byte and bit by bit, as RFC 9260 defines it.
    fn crc32c(bytes: &[u8]) -> u32 {
        let step = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| times_x(crc));
        !bytes.iter().fold(!0, step)
    }

    #[test]
    fn crc32c_has_its_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn change_of_the_first_four_bytes_updates_the_checksum() {
        for length in [4, 5, 12, 16, 100, 1_480, 65_535] {
            let before: Vec<u8> = (0..length).map(|n: u32| (n * 7 + 3).to_le_bytes()[0]).collect();
            let mut after = before.clone();
            after[..4].copy_from_slice(&[0x9c, 0x40, 0x0f, 0xa1]);
            let delta = u32::from_le_bytes([before[0], before[1], before[2], before[3]])
                ^ u32::from_le_bytes([0x9c, 0x40, 0x0f, 0xa1]);
            let mut change = CrcChange::new(delta, length);
            (0..CrcChange::STEPS).for_each(|_| change.step());
            assert_eq!(crc32c(&before) ^ change.result(), crc32c(&after), "{length} bytes");
        }
    }
}
