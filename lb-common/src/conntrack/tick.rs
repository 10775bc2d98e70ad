use bytemuck::{Pod, Zeroable};

/// A moment in coarse monotonic time: `CLOCK_MONOTONIC` nanoseconds shifted right by 30, about 1.07 s each.
/// Shifting costs one instruction where dividing into seconds would cost dozens.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable)]
pub struct Tick(pub u32);

impl Tick {
    /// The tick of a `CLOCK_MONOTONIC` time in nanoseconds.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "2^32 ticks are 146 years of uptime")]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self((nanos >> 30) as u32)
    }

    /// The number of ticks in `seconds`, rounded up. They last a little longer than `seconds`: less than 3 s longer for
    /// a day.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "fewer ticks than seconds")]
    pub const fn ticks_in(seconds: u32) -> u32 {
        // A tick is 1.0737 s; 15,259 / 2^14 is a little more than its inverse.
        ((seconds as u64 * 15_259) >> 14) as u32 + 1
    }

    /// Whole seconds from `earlier` to `self`; 0 if `earlier` is later.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a u32 of ticks has under 2^33 seconds; saturated before"
    )]
    pub const fn seconds_since(self, earlier: Self) -> u32 {
        let seconds = ((self.0.saturating_sub(earlier.0) as u64) << 30) / 1_000_000_000;
        if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 }
    }
}
