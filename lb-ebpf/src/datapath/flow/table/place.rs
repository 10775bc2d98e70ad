//! Results of the operations on the flow table. Global functions of BPF return only numbers, so some of the types have
//! a number for each value.

/// The place of one entry, valid until another entry takes that place. (The overflow does not distinguish successive
/// entries with the same key: there, the place stands for the current entry.)
#[repr(C)]
pub(crate) struct Place {
    /// The control word of the slot when the entry was found; 0 in the overflow.
    pub(super) control: u64,
    /// The index of the slot; 0 in the overflow.
    pub(super) index: u32,
    /// 1 if the entry is in the overflow, else 0.
    pub(super) in_overflow: u32,
}

impl Place {
    /// The place of all entries that the overflow has.
    pub(super) const IN_OVERFLOW: Self = Self { control: 0, index: 0, in_overflow: 1 };
}

/// Where a lookup has found the entry with its key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    /// Neither the table nor the overflow has the entry.
    Absent,
    /// The slot with this index has the entry.
    Slot(u32),
    /// The table does not have the entry, but the overflow may.
    MayBeInOverflow,
}

impl Location {
    /// The location as a number.
    #[inline(always)]
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Absent => 0,
            Self::Slot(index) => index + 1,
            Self::MayBeInOverflow => u32::MAX,
        }
    }

    /// The location with this number.
    #[inline(always)]
    pub(super) const fn of(number: u32) -> Self {
        match number {
            0 => Self::Absent,
            u32::MAX => Self::MayBeInOverflow,
            number => Self::Slot(number - 1),
        }
    }
}

/// The result of [`insert`](super::insert).
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Inserted {
    /// The entry is new.
    New = 0,
    /// The key has an entry. A lookup finds the entry, unless another CPU has removed it or takes very long to insert
    /// it.
    Exists = 1,
    /// Neither the table nor the overflow has room, or the kernel has no memory.
    Full = 2,
}

impl Inserted {
    /// The result as a number; `None` means that the table has no free place, and that the insert has not tried the
    /// overflow.
    #[inline(always)]
    pub(super) const fn number(result: Option<Self>) -> u32 {
        match result {
            Some(inserted) => inserted as u32,
            None => 3,
        }
    }

    /// The result with this number.
    #[inline(always)]
    pub(super) const fn of(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::New),
            1 => Some(Self::Exists),
            2 => Some(Self::Full),
            _no_place => None,
        }
    }
}
