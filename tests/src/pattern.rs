//! The content of large transfers: a fixed pseudo-random stream that both ends can compute.
//!
//! A comparison is stricter than a checksum and locates the first wrong byte. The period is a prime and longer than any
//! segment, so after a lost or duplicated segment, the bytes differ from those that the receiver expects.

use std::sync::OnceLock;

/// Number of bytes after which the stream repeats; a prime.
const PERIOD: usize = 1_048_573;

/// Maximum number of bytes that [`at`] returns.
pub const MAX_PIECE: usize = 256 * 1024;

fn stream() -> &'static [u8] {
    static STREAM: OnceLock<Vec<u8>> = OnceLock::new();
    STREAM.get_or_init(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            // The pseudo-random generator xorshift64*, of which the top byte is used.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()[0]
        };
        let mut period: Vec<u8> = (0..PERIOD).map(|_| next()).collect();
        period.extend_from_within(..MAX_PIECE);
        period
    })
}

/// `len` bytes (at most [`MAX_PIECE`]) of the stream, from `offset` on.
pub fn at(offset: u64, len: usize) -> &'static [u8] {
    let start = usize::try_from(offset % PERIOD as u64).unwrap_or_default();
    &stream()[start..start + len.min(MAX_PIECE)]
}

/// Compares `bytes` with the stream at `offset`; the error names the first position that differs.
pub fn check(offset: u64, bytes: &[u8]) -> Result<(), String> {
    let mut position = offset;
    for piece in bytes.chunks(MAX_PIECE) {
        let expected = at(position, piece.len());
        if piece != expected {
            let differs = piece.iter().zip(expected).take_while(|(got, want)| got == want).count();
            return Err(format!("byte {} of the stream is wrong", position + differs as u64));
        }
        position += piece.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_segment_is_detected() {
        let mut content = [at(0, 100_000), at(100_000, 100_000)].concat();
        assert_eq!(check(0, &content), Ok(()));
        assert_eq!(check(PERIOD as u64, &content), Ok(()));
        content.drain(1448..2896);
        assert!(check(0, &content).is_err());
        assert!(check(1, at(0, 10)).is_err());
    }
}
