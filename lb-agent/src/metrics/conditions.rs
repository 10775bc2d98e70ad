//! The metrics `lb_healthy`, and `lb_conditions{about="…"}`: how many conditions the agent reports. `lb-agent status`
//! lists more: also failures, shortages, and conditions that the command itself finds.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};

/// The agent's state, as far as metrics show it.
pub(crate) trait AgentState: fmt::Debug + Send + Sync + 'static {
    /// Whether the agent has synchronised at least once, and no change has waited for too long.
    fn is_healthy(&self) -> bool;

    /// For each subject, the number of its conditions now.
    fn condition_counts(&self) -> Vec<(&'static str, usize)>;
}

/// Exports the health and the numbers of conditions, which it reads at each scrape.
#[derive(Debug)]
pub(super) struct Conditions<S>(pub(super) S);

impl<S: AgentState> Collector for Conditions<S> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help =
            "1 after the first synchronisation, while no change waits for longer than a minute, else 0";
        let healthy = ConstGauge::new(i64::from(self.0.is_healthy()));
        healthy.encode(encoder.encode_descriptor("lb_healthy", help, None, healthy.metric_type())?)?;
        let help = "Conditions that the agent reports, by what they are about (`lb-agent status` lists more)";
        let kind = ConstGauge::new(0i64).metric_type();
        let mut family = encoder.encode_descriptor("lb_conditions", help, None, kind)?;
        for (about, count) in self.0.condition_counts() {
            let label = [("about", about)];
            ConstGauge::new(super::gauge(count)).encode(family.encode_family(&label)?)?;
        }
        Ok(())
    }
}
