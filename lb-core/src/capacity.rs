//! The capacity of the maps, and how much of it is left for a plan.
//!
//! The reconciler checks whether each Service fits, so that only a Service that does not fit has to wait. Without these
//! checks, the kernel would reject an entry in the middle of a plan, and all steps after that entry would wait.

use crate::plan::Contents;

/// Numbers of entries or slots that the maps can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of slots of `BACKENDS`, and of `ACTIVE`.
    pub backends: u32,
    /// Number of slots of `TABLES`.
    pub tables: u32,
    /// Number of frontends that `SERVICES` can hold.
    pub frontends: u32,
    /// Number of names of service ports that `SERVICE_NAMES` can hold.
    pub names: u32,
    /// Number of networks that `SOURCE_RANGES` can hold.
    pub source_ranges: u32,
    /// Number of service ports that `LIMITS` can hold.
    pub limits: u32,
    /// Services may add addresses to `VIPS` while the map has fewer addresses than this. The node's own addresses also
    /// count, but the agent adds them even beyond this limit.
    pub vips: u32,
}

impl Capacity {
    /// Capacities with arenas of these sizes, and practically unlimited hash maps.
    pub const fn of_arenas(backends: u32, tables: u32) -> Self {
        let plenty = u32::MAX;
        Self {
            backends,
            tables,
            frontends: plenty,
            names: plenty,
            source_ranges: plenty,
            limits: plenty,
            vips: plenty,
        }
    }
}

/// Which map has no room for a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Backends,
    Tables,
    Counters,
    Frontends,
    Names,
    SourceRanges,
    Limits,
    Vips,
}

/// Numbers of entries that a plan adds to hash maps, and deletes from them, for one Service.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    pub(crate) frontends: usize,
    /// Number of frontends that the plan deletes before it writes any.
    pub(crate) frontends_gone: usize,
    pub(crate) names: usize,
    pub(crate) source_ranges: usize,
    pub(crate) limits: usize,
    pub(crate) vips: usize,
    /// Number of addresses in `VIPS` that the plan deletes before it writes any.
    pub(crate) vips_gone: usize,
}

/// How much room hash maps have for the rest of a plan: numbers of free entries, unless a field says otherwise. A plan
/// deletes names, source ranges and limits after it writes new ones, so these deletions free no entries for the same
/// plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remaining {
    pub(crate) frontends: usize,
    pub(crate) names: usize,
    pub(crate) source_ranges: usize,
    pub(crate) limits: usize,
    /// Number of addresses that `VIPS` will have. The node's own addresses can raise it above `vips_limit`, and an
    /// address that a Service shared with the node remains after the node loses it.
    vips: usize,
    vips_limit: usize,
}

impl Remaining {
    /// `vips` is the number of addresses that `VIPS` would have after this plan if the plan changed no Service.
    pub(crate) fn new(capacity: Capacity, contents: &Contents, vips: usize) -> Self {
        let left = |capacity: u32, used: usize| (capacity as usize).saturating_sub(used);
        Self {
            frontends: left(capacity.frontends, contents.frontends.len()),
            names: left(capacity.names, contents.service_labels.len()),
            source_ranges: left(capacity.source_ranges, contents.source_ranges.len()),
            limits: left(capacity.limits, contents.limits.len()),
            vips,
            vips_limit: capacity.vips as usize,
        }
    }

    /// How many more addresses Services may add to `VIPS`.
    pub(crate) const fn free_vips(&self) -> usize {
        self.vips_limit.saturating_sub(self.vips)
    }

    /// Subtracts the whole demand, or returns which map has no room for it.
    pub(crate) fn take(&mut self, demand: Demand) -> Result<(), Full> {
        let frontends = self.frontends + demand.frontends_gone;
        let frontends = frontends.checked_sub(demand.frontends).ok_or(Full::Frontends)?;
        let names = self.names.checked_sub(demand.names).ok_or(Full::Names)?;
        let source_ranges = self.source_ranges.checked_sub(demand.source_ranges).ok_or(Full::SourceRanges)?;
        let limits = self.limits.checked_sub(demand.limits).ok_or(Full::Limits)?;
        let vips = (self.vips + demand.vips).saturating_sub(demand.vips_gone);
        if demand.vips > 0 && vips > self.vips_limit {
            return Err(Full::Vips);
        }
        *self = Self { frontends, names, source_ranges, limits, vips, ..*self };
        Ok(())
    }
}
