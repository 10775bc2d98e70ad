//! The filter, which shows that most packets have neither a flow nor a Service: [`lb_common::filter`].

use core::arch::asm;

use aya_ebpf::{bindings::BPF_F_MMAPABLE, btf_maps::Array, macros::btf_map};
use lb_common::{
    Address,
    conntrack::Tuple,
    filter::{self, Mark, Memory},
};

/// Marks of the endpoints of all flows and frontends. The programs and the agent, which maps the array, add marks
/// atomically.
#[btf_map]
static FILTER: Array<filter::Filter, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

/// The pointer to the value of `FILTER`, looked up once.
#[derive(Clone, Copy)]
pub(crate) struct Filter(*mut filter::Filter);

impl Filter {
    /// The filter. (An array always has its element; the verifier relies on that since Linux 6.14.)
    #[inline(always)]
    pub(crate) fn get() -> Option<Self> {
        FILTER.get_ptr_mut(0).map(Self)
    }

    /// Whether there may be a flow or a frontend for packets of `tuple`.
    #[inline(always)]
    pub(crate) fn may_have_flow(self, tuple: &Tuple) -> bool {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs. Aligned 64-bit
        // loads are atomic on 64-bit CPUs, and volatile ones are not split.
        let active = unsafe { (&raw const (*self.0).active).read_volatile() };
        filter::may_have_flow(&self, active, tuple)
    }

    /// Whether the address may be in the range of cluster IPs.
    #[inline(always)]
    pub(crate) fn may_be_in_service_range(self, address: &Address) -> bool {
        // SAFETY: the pointer is that of an array element, which lives as long as the program runs. The agent writes
        // ranges when they change; a program that reads a range meanwhile acts as just before or after the change.
        unsafe { &(*self.0).ranges }.contains(address)
    }
}

impl Memory for Filter {
    #[inline(always)]
    fn load(&self, index: usize) -> u64 {
        // SAFETY: as in `may_have_flow`; a `Mark` has no index beyond the end, which the verifier checks.
        unsafe { (&raw const (*self.0).words).cast::<u64>().add(index).read_volatile() }
    }

    #[inline(always)]
    fn set(&self, index: usize, bits: u64) {
        // SAFETY: the word is an aligned part of an array element, which lives as long as the program runs. All CPUs
        // and the agent change it atomically.
        unsafe {
            let word = (&raw mut (*self.0).words).cast::<u64>().add(index);
            asm!("lock *(u64 *)({0} + 0) |= {1}", in(reg) word, in(reg) bits, options(nostack));
        }
    }
}

/// Marks the entry of the flow table with this key and these flags. Callers call this function before they insert the
/// entry.
#[inline(always)]
pub(crate) fn mark(key: &Tuple, flags: u8) {
    filter_mark(key, u32::from(flags));
}

/// [`mark`], as a global function: the verifier checks it once, not in every path to an insertion.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn filter_mark(key: *const Tuple, flags: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let (Some(key), Some(filter)) = (unsafe { key.as_ref() }, Filter::get()) else { return 0 };
    let [mark, other] = Mark::of_entry(key, flags as u8);
    mark.set(&filter);
    other.set(&filter);
    1
}
