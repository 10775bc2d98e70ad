//! The memory of the flow table: elements of maps, and the atomic operations of BPF.

use core::arch::asm;

use aya_ebpf::Global;
use lb_common::{
    capacity,
    conntrack::{Flow, Tuple},
    flow_table::{self, Control, Header, Memory, Overflow, OverflowInsert, Places, Slot},
};

use super::overflow;
use crate::datapath::{maps::FLOW_TABLE, words};

/// The number of slots. The agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static FLOW_SLOTS: Global<u32> = Global::new(capacity::FLOWS as u32);

/// The pointer to the header of the table, looked up once.
#[derive(Clone, Copy)]
pub(crate) struct Table(*mut Header);

/// A slot: its index, and its element of `FLOWS`.
#[derive(Clone, Copy)]
pub(crate) struct Element {
    pub(super) index: u32,
    slot: *mut Slot,
}

impl Table {
    /// The table. (An array always has its element; the verifier relies on that since Linux 6.14.)
    #[inline(always)]
    pub(crate) fn get() -> Option<Self> {
        FLOW_TABLE.get_ptr_mut(0).map(Self)
    }

    /// The places that an entry with this key may take.
    #[inline(always)]
    pub(super) fn places(&self, key: &Tuple) -> Places {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs. The agent writes
        // the seed before it attaches a program, and never again.
        let hash = unsafe { &(*self.0).seed }.hash(key);
        Places::new(hash, FLOW_SLOTS.load())
    }

    /// Whether the overflow may have entries.
    #[inline(always)]
    pub(super) fn has_overflow(&self) -> bool {
        self.count() != 0
    }
}

impl Element {
    /// The slot with this index.
    #[inline(always)]
    pub(super) fn at(index: u32) -> Option<Self> {
        super::slot(index).map(|slot| Self { index, slot })
    }

    #[inline(always)]
    pub(super) fn flow(self) -> &'static mut Flow {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs, and every bit
        // pattern is a valid `Flow`. Other CPUs may write counters of the same flow: plain integers for which any
        // recent value will do. Another flow takes the slot meanwhile only if this flow is deleted (expired, evicted,
        // replaced or purged) and the other flow is inserted within the nanoseconds of this use. The packet then gets a
        // wrong checksum, and its receiver drops it. The other flow counts the packet, and may take the packet's FIN or
        // RST for its own.
        unsafe { &mut (*self.slot).flow }
    }

    #[inline(always)]
    const fn control(self) -> *mut u64 {
        // SAFETY: the pointer is that of an element of the array, which lives as long as the program runs.
        unsafe { &raw mut (*self.slot).control }
    }
}

// The pointers of all functions below are those of elements of arrays, which live as long as the program runs. Control
// words are aligned, and all CPUs and the agent change them atomically.
impl Memory for Table {
    type Slot = Element;
    type Key = Tuple;
    type Value = Flow;

    const IS_AGENT: bool = false;

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<Element> {
        Element::at(index)
    }

    #[inline(always)]
    fn control(&self, slot: Element) -> Control {
        // SAFETY: see above. Aligned 64-bit loads are atomic on 64-bit CPUs, and volatile ones are not split.
        Control(unsafe { slot.control().read_volatile() })
    }

    #[inline(always)]
    fn acquire(&self, slot: Element, control: Control) -> Element {
        let Element { index, mut slot } = slot;
        if cfg!(bpf_target_arch = "x86_64") {
            // x86-64 CPUs load in order. An address that depends on `control` would only keep the CPU from loading both
            // cache lines of a slot at once.
            // SAFETY: the pointer stays the same. The compiler moves no load across the block.
            unsafe { asm!("{0} += 0", inout(reg) slot, options(nostack)) };
            return Element { index, slot };
        }
        let mut index = u64::from(index);
        // SAFETY: only registers change, and pointer and index remain the same: 0 is added to them. The CPU can compute
        // that 0 only once `control` is loaded, so it loads afterwards through the pointer, and through any pointer
        // that is computed from the index. The compiler moves no load across the block.
        unsafe {
            asm!(
                "{zero} &= 0",
                "{slot} += {zero}",
                "{index} += {zero}",
                zero = inout(reg) control.0 => _,
                slot = inout(reg) slot,
                index = inout(reg) index,
                options(nostack),
            );
        }
        Element { index: index as u32, slot }
    }

    #[inline(always)]
    fn control_after(&self, slot: Element) -> Control {
        // An atomic operation, because BPF has no other barrier before Linux 6.15.
        // SAFETY: see above.
        Control(unsafe { words::fetch_add(slot.control(), 0) })
    }

    #[inline(always)]
    fn compare_exchange(&self, slot: Element, from: Control, to: Control) -> bool {
        // SAFETY: see above.
        unsafe { words::compare_exchange(slot.control(), from.0, to.0) }
    }

    #[inline(always)]
    fn set(&self, slot: Element, to: Control) {
        // SAFETY: see above.
        unsafe { words::exchange(slot.control(), to.0) };
    }

    #[inline(always)]
    fn has_key(&self, slot: Element, key: &Tuple) -> bool {
        // SAFETY: see above. Another CPU may be writing the key, word by word. The caller then finds another control
        // word afterwards, or uses another flow's entry, as described at `Element::flow`.
        words::are_equal(words_of(unsafe { &(*slot.slot).key }), words_of(key))
    }

    #[inline(always)]
    fn write_key(&self, slot: Element, key: &Tuple) {
        // SAFETY: see above. This CPU has claimed the slot, so it alone writes key and value.
        unsafe { (*slot.slot).key = *key };
    }

    #[inline(always)]
    fn write_value(&self, slot: Element, flow: &Flow) {
        // SAFETY: as in `write_key`.
        unsafe { (*slot.slot).flow = *flow };
    }

    #[inline(always)]
    fn win_place(&self, slot: Element, _places: &Places, key: &Tuple, comes_first: bool) -> bool {
        flow_win_place(slot.index, key, u32::from(comes_first)) != 0
    }
}

/// [`flow_table::win_place`] for the slot with this index. (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_win_place(index: u32, key: *const Tuple, comes_first: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let (Some(key), Some(table)) = (unsafe { key.as_ref() }, Table::get()) else { return 0 };
    let Some(slot) = table.slot(index) else { return 0 };
    u32::from(flow_table::win_place(&table, slot, &table.places(key), key, comes_first != 0))
}

#[inline(always)]
fn words_of(key: &Tuple) -> [u32; 10] {
    bytemuck::must_cast(*key)
}

impl Overflow for Table {
    #[inline(always)]
    fn takes_all(&self) -> bool {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs.
        unsafe { (&raw const (*self.0).takes_all).read_volatile() != 0 }
    }

    #[inline(always)]
    fn count(&self) -> u64 {
        // SAFETY: as in `takes_all`.
        unsafe { (&raw const (*self.0).overflow).read_volatile() }
    }

    #[inline(always)]
    fn add_to_count(&self, difference: i64) {
        // SAFETY: as in `takes_all`; all CPUs and the agent change the number atomically.
        unsafe { words::fetch_add(&raw mut (*self.0).overflow, difference.cast_unsigned()) };
    }

    #[inline(always)]
    fn has(&self, key: &Tuple) -> bool {
        overflow::has(key)
    }

    #[inline(always)]
    fn insert(&self, key: &Tuple, flow: &Flow) -> OverflowInsert {
        overflow::insert(key, flow)
    }

    #[inline(always)]
    fn replace(&self, key: &Tuple, flow: &Flow) -> bool {
        overflow::replace(key, flow)
    }

    #[inline(always)]
    fn remove(&self, key: &Tuple) -> bool {
        overflow::remove(key)
    }
}
