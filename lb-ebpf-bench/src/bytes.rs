//! Loads and stores of words at any offset, in one instruction each. LLVM would access data of alignment 1, such as
//! packets, byte by byte.

use core::arch::asm;

/// Bytes that stay valid as long as the program runs.
#[derive(Clone, Copy)]
pub struct Bytes {
    start: *mut u8,
}

macro_rules! load_and_store {
    ($load:ident, $store:ident, $word:ty, $register:ty, $size:literal) => {
        /// The word at `OFFSET`, in network byte order.
        #[inline(always)]
        pub fn $load<const OFFSET: usize>(self) -> $word {
            let word: $register;
            // SAFETY: the caller of the constructor promises that `OFFSET` is in bounds.
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

        /// Stores the word at `OFFSET`, in network byte order.
        #[inline(always)]
        pub fn $store<const OFFSET: usize>(self, word: $word) {
            // SAFETY: the caller of the constructor promises that `OFFSET` is in bounds.
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

impl Bytes {
    /// The bytes of a packet from `start`, if there are at least `length` bytes between `start` and `end`.
    ///
    /// # Safety
    ///
    /// `start` and `end` are those of the program's context, and all loads and stores are within `length`.
    #[inline(always)]
    pub unsafe fn of_packet(start: usize, end: usize, length: usize) -> Option<Self> {
        if start + length > end { None } else { Some(Self { start: start as *mut u8 }) }
    }

    /// The bytes of `value`, for loads.
    ///
    /// # Safety
    ///
    /// All loads are within the value.
    #[inline(always)]
    pub unsafe fn of<T>(value: *const T) -> Self {
        Self { start: value.cast_mut().cast() }
    }

    load_and_store!(load_8, store_8, u8, u32, "u8");
    load_and_store!(load_16, store_16, u16, u32, "u16");
    load_and_store!(load_32, store_32, u32, u32, "u32");
    load_and_store!(load_64, store_64, u64, u64, "u64");
}
