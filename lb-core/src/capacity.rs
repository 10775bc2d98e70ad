//! How much the maps can hold, and what of it a plan may still give out.
//!
//! What does not fit is refused here, for the one Service that asks for it. The kernel would refuse it in the middle of a
//! plan, and everything after it, of whatever Service, would wait.

use crate::plan::Contents;

/// How much the maps can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Slots of `BACKENDS`, and of `ACTIVE`.
    pub backends: u32,
    /// Slots of `TABLES`.
    pub tables: u32,
    /// Frontends in `SERVICES`.
    pub frontends: u32,
    /// Names of service ports in `SERVICE_NAMES`.
    pub names: u32,
    /// Networks in `SOURCE_RANGES`.
    pub source_ranges: u32,
}

impl Capacity {
    /// Arenas of these sizes, and hash maps that are never full.
    pub const fn of_arenas(backends: u32, tables: u32) -> Self {
        Self { backends, tables, frontends: u32::MAX, names: u32::MAX, source_ranges: u32::MAX }
    }
}

/// What has no room for a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Backends,
    Tables,
    Counters,
    /// `SERVICES`, or the names that go with it.
    Frontends,
    SourceRanges,
}

/// New entries of hash maps that a plan makes for a Service.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    pub(crate) frontends: usize,
    /// Frontends that certainly go, which they do before anything is made.
    pub(crate) frontends_gone: usize,
    pub(crate) names: usize,
    pub(crate) source_ranges: usize,
}

/// Entries of hash maps that are free for the rest of a plan. Names and networks go after new ones are made, so that those
/// which go make no room in the same plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remaining {
    pub(crate) frontends: usize,
    names: usize,
    pub(crate) source_ranges: usize,
}

impl Remaining {
    pub(crate) fn new(capacity: Capacity, contents: &Contents) -> Self {
        let left = |capacity: u32, used: usize| (capacity as usize).saturating_sub(used);
        Self {
            frontends: left(capacity.frontends, contents.frontends.len()),
            names: left(capacity.names, contents.service_labels.len()),
            source_ranges: left(capacity.source_ranges, contents.source_ranges.len()),
        }
    }

    /// Gives out all of the demand, or nothing.
    pub(crate) fn take(&mut self, demand: Demand) -> Result<(), Full> {
        let frontends = self.frontends + demand.frontends_gone;
        let frontends = frontends.checked_sub(demand.frontends).ok_or(Full::Frontends)?;
        let names = self.names.checked_sub(demand.names).ok_or(Full::Frontends)?;
        let source_ranges = self.source_ranges.checked_sub(demand.source_ranges).ok_or(Full::SourceRanges)?;
        *self = Self { frontends, names, source_ranges };
        Ok(())
    }
}
