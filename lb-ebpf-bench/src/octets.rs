//! Loads and stores of words at any offset, in one instruction each: for what has alignment 1, as packets have, LLVM would
//! go octet by octet.

use core::arch::asm;

/// Octets that are there as long as the program runs.
#[derive(Clone, Copy)]
pub struct Octets {
    start: *mut u8,
}

macro_rules! load_and_store {
    ($load:ident, $store:ident, $word:ty, $register:ty, $size:literal) => {
        /// The word at `OFFSET`, in memory order.
        #[inline(always)]
        pub fn $load<const OFFSET: usize>(self) -> $word {
            let word: $register;
            // SAFETY: who made `self` has said that the octets are there.
            unsafe {
                asm!(
                    concat!("{word} = *(", $size, " *)({start} + {offset})"),
                    word = out(reg) word,
                    start = in(reg) self.start,
                    offset = const OFFSET,
                    options(readonly, nostack, preserves_flags),
                );
            }
            word as $word
        }

        /// Stores the word at `OFFSET`, in memory order.
        #[inline(always)]
        pub fn $store<const OFFSET: usize>(self, word: $word) {
            // SAFETY: as above.
            unsafe {
                asm!(
                    concat!("*(", $size, " *)({start} + {offset}) = {word}"),
                    word = in(reg) word as $register,
                    start = in(reg) self.start,
                    offset = const OFFSET,
                    options(nostack, preserves_flags),
                );
            }
        }
    };
}

impl Octets {
    /// The octets of a packet from `start` on, if at least `length` come before `end`.
    ///
    /// # Safety
    ///
    /// `start` and `end` are those of the program's context, and what is loaded and stored lies within `length`.
    #[inline(always)]
    pub unsafe fn of_packet(start: usize, end: usize, length: usize) -> Option<Self> {
        if start + length > end { None } else { Some(Self { start: start as *mut u8 }) }
    }

    /// The octets of `value`, for loads.
    ///
    /// # Safety
    ///
    /// What is loaded lies within it.
    #[inline(always)]
    pub unsafe fn of<T>(value: *const T) -> Self {
        Self { start: value.cast_mut().cast() }
    }

    load_and_store!(load_8, store_8, u8, u32, "u8");
    load_and_store!(load_16, store_16, u16, u32, "u16");
    load_and_store!(load_32, store_32, u32, u32, "u32");
    load_and_store!(load_64, store_64, u64, u64, "u64");
}
