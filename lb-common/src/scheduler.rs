//! The schedulers: how a backend is chosen for a new flow.

use core::{fmt, str::FromStr};

/// How a backend is chosen: the schedulers of IPVS (`net/netfilter/ipvs`) under their names, and kube-proxy's `random`.
/// No scheduler gives new flows to a backend of weight 0.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheduler {
    /// At random, in proportion to the weights.
    #[default]
    Random = 0,
    /// The backends take turns.
    RoundRobin = 1,
    /// The backends take turns, in proportion to the weights.
    WeightedRoundRobin = 2,
    /// The backend with the fewest active flows.
    LeastConnection = 3,
    /// The backend with the fewest active flows for its weight.
    WeightedLeastConnection = 4,
    /// The backend that would have the fewest active flows for its weight if it got the new flow.
    ShortestExpectedDelay = 5,
    /// A backend without active flows; if there is none, as [`Self::ShortestExpectedDelay`].
    NeverQueue = 6,
    /// By the client's address, in proportion to the weights.
    SourceHash = 7,
    /// By the virtual address.
    DestinationHash = 8,
    /// By the client's address and port, consistently (Maglev), in proportion to the weights. If the service has
    /// session affinity, by the address alone.
    Maglev = 9,
}

impl Scheduler {
    /// All schedulers, in the order of their values.
    pub const ALL: [Self; 10] = [
        Self::Random,
        Self::RoundRobin,
        Self::WeightedRoundRobin,
        Self::LeastConnection,
        Self::WeightedLeastConnection,
        Self::ShortestExpectedDelay,
        Self::NeverQueue,
        Self::SourceHash,
        Self::DestinationHash,
        Self::Maglev,
    ];

    /// The name used in flags, tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "rr",
            Self::WeightedRoundRobin => "wrr",
            Self::LeastConnection => "lc",
            Self::WeightedLeastConnection => "wlc",
            Self::ShortestExpectedDelay => "sed",
            Self::NeverQueue => "nq",
            Self::SourceHash => "sh",
            Self::DestinationHash => "dh",
            Self::Maglev => "mh",
        }
    }

    /// Whether the scheduler compares the number of active flows of each backend.
    #[inline(always)]
    pub const fn uses_active_flows(self) -> bool {
        matches!(
            self,
            Self::LeastConnection
                | Self::WeightedLeastConnection
                | Self::ShortestExpectedDelay
                | Self::NeverQueue
        )
    }

    /// Whether the scheduler gives more flows to a backend of larger weight. (All schedulers skip weight 0.)
    pub const fn is_weighted(self) -> bool {
        !matches!(self, Self::RoundRobin | Self::LeastConnection | Self::DestinationHash)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl TryFrom<u8> for Scheduler {
    type Error = u8;

    #[inline(always)]
    fn try_from(value: u8) -> Result<Self, u8> {
        match value {
            0 => Ok(Self::Random),
            1 => Ok(Self::RoundRobin),
            2 => Ok(Self::WeightedRoundRobin),
            3 => Ok(Self::LeastConnection),
            4 => Ok(Self::WeightedLeastConnection),
            5 => Ok(Self::ShortestExpectedDelay),
            6 => Ok(Self::NeverQueue),
            7 => Ok(Self::SourceHash),
            8 => Ok(Self::DestinationHash),
            9 => Ok(Self::Maglev),
            unknown => Err(unknown),
        }
    }
}

/// The error for a name that no scheduler has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownScheduler;

impl fmt::Display for UnknownScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("give one of")?;
        Scheduler::ALL.into_iter().try_for_each(|scheduler| write!(f, " {scheduler}"))
    }
}

impl core::error::Error for UnknownScheduler {}

impl FromStr for Scheduler {
    type Err = UnknownScheduler;

    fn from_str(name: &str) -> Result<Self, UnknownScheduler> {
        Self::ALL.into_iter().find(|scheduler| scheduler.as_str() == name).ok_or(UnknownScheduler)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString as _;

    use super::*;

    #[test]
    fn every_scheduler_parses_from_its_name_and_its_number() {
        for (number, scheduler) in (0..).zip(Scheduler::ALL) {
            assert_eq!(scheduler as u8, number);
            assert_eq!(Scheduler::try_from(number), Ok(scheduler));
            assert_eq!(scheduler.to_string().parse(), Ok(scheduler));
        }
        assert_eq!(Scheduler::try_from(10), Err(10));
        let error = "lblc".parse::<Scheduler>().unwrap_err().to_string();
        assert_eq!(error, "give one of random rr wrr lc wlc sed nq sh dh mh");
    }
}
