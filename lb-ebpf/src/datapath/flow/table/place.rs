//! Results of the operations on the flow table.

/// The place of one entry, valid until another entry takes that place. (The overflow does not tell successive entries
/// with the same key apart: there, the place is that of the current one.)
#[repr(C)]
pub(crate) struct Place {
    /// The control word of the slot when the entry was found.
    pub(super) control: u64,
    /// The index of the slot, or [`IN_OVERFLOW`].
    pub(super) index: u32,
    pub(super) zero: u32,
}

/// The index of a [`Place`] that is not in the table.
pub(super) const IN_OVERFLOW: u32 = u32::MAX;

/// The result of [`insert`](super::insert).
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Inserted {
    /// The entry is new.
    New = 0,
    /// The key has an entry. A look-up finds it, unless another CPU has removed it or takes very long to insert it.
    Exists = 1,
    /// Neither the table nor the overflow has room, or the kernel has no memory.
    Full = 2,
}
