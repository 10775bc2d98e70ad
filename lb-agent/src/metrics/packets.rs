//! The metric `lb_packets_total{outcome="…"}`: packets by outcome, from the map `STATS`.

use std::fmt;

use lb_common::Outcome;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::counter::ConstCounter,
};

/// A source of the packet counters.
pub trait PacketCounters: fmt::Debug + Send + Sync + 'static {
    /// Packets and system calls by [`Outcome`] since the map `STATS` was created; `None` if they cannot be read now.
    fn packets(&self) -> Option<[u64; Outcome::COUNT]>;
}

/// Exports the packet counters, which it reads at each scrape.
#[derive(Debug)]
pub(super) struct Packets<C>(pub(super) C);

impl<C: PacketCounters> Collector for Packets<C> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(packets) = self.0.packets() else { return Ok(()) };
        let kind = ConstCounter::new(0u64).metric_type();
        // The library adds the suffix `_total`.
        let mut family = encoder.encode_descriptor("lb_packets", "Packets by outcome", None, kind)?;
        for (outcome, count) in Outcome::ALL.into_iter().zip(packets) {
            let label = [("outcome", outcome.as_str())];
            ConstCounter::new(count).encode(family.encode_family(&label)?)?;
        }
        Ok(())
    }
}
