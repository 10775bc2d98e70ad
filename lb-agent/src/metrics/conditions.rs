//! The metric `lb_conditions{about="…"}`: how many conditions `lb-agent status` lists.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};

/// A source of the numbers of conditions.
pub(crate) trait ConditionCounts: fmt::Debug + Send + Sync + 'static {
    /// For each subject, the number of its conditions now.
    fn condition_counts(&self) -> Vec<(&'static str, usize)>;
}

/// Exports the numbers of conditions, which it reads at each scrape.
#[derive(Debug)]
pub(super) struct Conditions<C>(pub(super) C);

impl<C: ConditionCounts> Collector for Conditions<C> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Conditions that `lb-agent status` lists, by what they are about";
        let kind = ConstGauge::new(0i64).metric_type();
        let mut family = encoder.encode_descriptor("lb_conditions", help, None, kind)?;
        for (about, count) in self.0.condition_counts() {
            let label = [("about", about)];
            ConstGauge::new(super::gauge(count)).encode(family.encode_family(&label)?)?;
        }
        Ok(())
    }
}
