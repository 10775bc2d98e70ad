use core::sync::atomic::{AtomicU64, Ordering, fence};

use bytemuck::must_cast;

use super::{Control, Entry, Memory, Slot, Snapshot};
use crate::conntrack::{Flow, Tuple};

const CONTROL: usize = 0;
const KEY: usize = 1;
const FLOW: usize = KEY + size_of::<Tuple>() / 8;
const WORDS: usize = size_of::<Slot>() / 8;

const _: () =
    assert!(core::mem::offset_of!(Slot, key) == 8 * KEY && core::mem::offset_of!(Slot, flow) == 8 * FLOW);

/// Slots in memory that programs change at the same time: the array `FLOWS`, mapped by the agent.
///
/// Programs write keys and flows by plain stores. So the agent reads them word by word, by atomic loads, and checks the
/// control word afterwards.
#[derive(Clone, Copy, Debug)]
pub struct SharedSlots<'a> {
    words: &'a [AtomicU64],
}

impl<'a> SharedSlots<'a> {
    /// The slots in `words`; an incomplete slot at the end is left out.
    pub const fn new(words: &'a [AtomicU64]) -> Self {
        Self { words }
    }

    /// The number of slots.
    pub const fn len(&self) -> usize {
        self.words.len() / WORDS
    }

    /// Whether there are no slots.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the flow of an entry in place, as programs do for a packet: lookups find the entry all the time. Returns
    /// false if the entry is gone, or if programs have changed the flow during each of several attempts.
    ///
    /// Each word changes by a compare-and-swap from the value that `change` has seen, so `change` never overwrites what
    /// a program has written to a word since then. `change` may run several times, and must be idempotent: a failed
    /// attempt may have written some words.
    pub fn change(&self, entry: &Entry<<Self as Memory>::Slot>, change: impl Fn(&mut Flow)) -> bool {
        (0..ATTEMPTS).any(|_| {
            let before = load::<FLOW_WORDS>(&entry.slot[FLOW..]);
            if self.control_after(entry.slot) != entry.control {
                return false;
            }
            let mut flow: Flow = must_cast(before);
            change(&mut flow);
            let after: [u64; FLOW_WORDS] = must_cast(flow);
            let changes = before.into_iter().zip(after).zip(&entry.slot[FLOW..]);
            changes.filter(|((before, after), _)| before != after).all(|((before, after), word)| {
                word.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            })
        })
    }
}

/// Maximum number of attempts to change a flow that programs change at the same time.
const ATTEMPTS: u32 = 16;

fn load<const N: usize>(words: &[AtomicU64]) -> [u64; N] {
    core::array::from_fn(|index| words[index].load(Ordering::Relaxed))
}

fn store<const N: usize>(words: &[AtomicU64], values: [u64; N]) {
    for (word, value) in words.iter().zip(values) {
        word.store(value, Ordering::Relaxed);
    }
}

const KEY_WORDS: usize = FLOW - KEY;
const FLOW_WORDS: usize = WORDS - FLOW;

impl<'a> Memory for SharedSlots<'a> {
    type Slot = &'a [AtomicU64; WORDS];
    type Key = Tuple;
    type Value = Flow;

    const IS_AGENT: bool = true;

    fn slot(&self, index: u32) -> Option<Self::Slot> {
        let start = index as usize * WORDS;
        self.words.get(start..start + WORDS)?.try_into().ok()
    }

    fn control(&self, slot: Self::Slot) -> Control {
        Control(slot[CONTROL].load(Ordering::Relaxed))
    }

    fn acquire(&self, slot: Self::Slot, _control: Control) -> Self::Slot {
        fence(Ordering::Acquire);
        slot
    }

    fn control_after(&self, slot: Self::Slot) -> Control {
        fence(Ordering::Acquire);
        self.control(slot)
    }

    fn compare_exchange(&self, slot: Self::Slot, from: Control, to: Control) -> bool {
        fence(Ordering::SeqCst);
        let result = slot[CONTROL].compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        result.is_ok()
    }

    fn set(&self, slot: Self::Slot, to: Control) {
        fence(Ordering::SeqCst);
        slot[CONTROL].swap(to.0, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    fn has_key(&self, slot: Self::Slot, key: &Tuple) -> bool {
        load::<KEY_WORDS>(&slot[KEY..]) == must_cast::<Tuple, [u64; KEY_WORDS]>(*key)
    }

    fn write_key(&self, slot: Self::Slot, key: &Tuple) {
        store::<KEY_WORDS>(&slot[KEY..], must_cast(*key));
    }

    fn write_value(&self, slot: Self::Slot, flow: &Flow) {
        store::<FLOW_WORDS>(&slot[FLOW..], must_cast(*flow));
    }
}

impl Snapshot for SharedSlots<'_> {
    fn copy(&self, slot: Self::Slot) -> (Tuple, Flow) {
        (must_cast(load::<KEY_WORDS>(&slot[KEY..])), must_cast(load::<FLOW_WORDS>(&slot[FLOW..])))
    }
}
