//! Words of map values: copies, comparisons, and atomic operations (`core` has none for BPF). The atomic operations are
//! fully ordered, except [`add`] and a [`compare_exchange`] that fails: these two order nothing.

use core::arch::asm;

use bytemuck::Pod;

/// Copies a value of whole words into a map value, one word after the other. (For an assignment, LLVM would load all
/// words before it stores the first one, and would need stack for the words that do not fit into registers.)
///
/// # Safety
/// The pointer leads to a writable map value of type `T`, aligned to 8 bytes.
#[inline(always)]
pub(super) unsafe fn copy<T: Pod>(from: &T, to: *mut T) {
    const { assert!(size_of::<T>() % 8 == 0 && align_of::<T>() == 8) };
    let (from, to) = ((&raw const *from).cast::<u64>(), to.cast::<u64>());
    for index in 0..size_of::<T>() / 8 {
        // SAFETY: both values are aligned, and `index` is less than the number of words in each.
        unsafe { to.add(index).write_volatile(from.add(index).read()) };
    }
}

/// Whether two values, given as words, are equal: one branch instead of one for each word, for the verifier and the
/// CPU. (In assembly, because LLVM would compare each word with a branch of its own.)
#[inline(always)]
pub(super) fn are_equal<const WORDS: usize>(left: [u32; WORDS], right: [u32; WORDS]) -> bool {
    let mut difference = 0u64;
    for (left, right) in left.into_iter().zip(right) {
        // SAFETY: only registers change.
        unsafe {
            asm!(
                "{left} ^= {right}",
                "{difference} |= {left}",
                left = inout(reg) u64::from(left) => _,
                right = in(reg) u64::from(right),
                difference = inout(reg) difference,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
    }
    difference == 0
}

/// Adds to a word in one step.
///
/// # Safety
/// The pointer leads to an aligned word of a map value. All programs change this word atomically, or only programs on
/// this CPU change it.
#[inline(always)]
pub(crate) unsafe fn add(word: *mut u64, difference: u64) {
    // SAFETY: the caller passes an aligned word of a map value, and the instruction changes that word atomically.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) word, in(reg) difference, options(nostack)) };
}

/// Adds to a word and returns its previous value.
///
/// # Safety
/// The pointer leads to an aligned word of a map value. Programs change this word only atomically.
#[inline(always)]
pub(super) unsafe fn fetch_add(word: *mut u64, difference: u64) -> u64 {
    let mut value = difference;
    // SAFETY: the caller passes an aligned word of a map value, and the instruction changes that word atomically.
    unsafe {
        asm!("{1} = atomic_fetch_add((u64 *)({0} + 0), {1})", in(reg) word, inout(reg) value, options(nostack));
    }
    value
}

/// Inverts those bits of a word that are set in `bits`, and returns the word's previous value.
///
/// # Safety
/// As for [`fetch_add`].
#[inline(always)]
pub(super) unsafe fn fetch_xor(word: *mut u64, bits: u64) -> u64 {
    let mut value = bits;
    // SAFETY: the caller passes an aligned word of a map value, and the instruction changes that word atomically.
    unsafe {
        asm!("{1} = atomic_fetch_xor((u64 *)({0} + 0), {1})", in(reg) word, inout(reg) value, options(nostack));
    }
    value
}

/// Replaces the value `from` of a word by `to`; returns false if the word has another value.
///
/// # Safety
/// As for [`fetch_add`].
#[inline(always)]
pub(super) unsafe fn compare_exchange(word: *mut u64, from: u64, to: u64) -> bool {
    let mut found = from;
    // SAFETY: the caller passes an aligned word of a map value, and the instruction changes that word atomically.
    unsafe {
        asm!(
            "r0 = cmpxchg_64({word} + 0, r0, {to})",
            word = in(reg) word,
            to = in(reg) to,
            inout("r0") found,
            options(nostack),
        );
    }
    found == from
}

/// Replaces a word.
///
/// # Safety
/// As for [`fetch_add`].
#[inline(always)]
pub(super) unsafe fn exchange(word: *mut u64, to: u64) {
    // SAFETY: the caller passes an aligned word of a map value, and the instruction changes that word atomically.
    unsafe {
        asm!(
            "{value} = xchg_64({word} + 0, {value})",
            word = in(reg) word,
            value = inout(reg) to => _,
            options(nostack),
        );
    }
}
