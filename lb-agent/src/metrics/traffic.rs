//! Metrics of the traffic of service ports and backends.

use std::{
    fmt::{self, Debug},
    net::SocketAddr,
};

use lb_core::{
    model::ServicePortName,
    traffic::{Tally, Volume},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use super::gauge;

/// Labels of a sum of traffic: a service port, and perhaps one of its backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrafficLabels {
    pub(crate) service: ServicePortName,
    /// The backend of the sum; `None` for the sum of all backends of the port.
    pub(crate) backend: Option<SocketAddr>,
}

/// Provides the sums of traffic at each scrape.
pub(crate) trait TrafficSource: Debug + Send + Sync + 'static {
    /// All sums, those of service ports first.
    fn traffic(&self) -> Vec<(TrafficLabels, Tally)>;
}

/// Exports sums of traffic, which it reads at each scrape.
#[derive(Debug)]
pub(super) struct Traffic<S>(pub(super) S);

type Labels<'a> = Vec<(&'static str, &'a str)>;
type Sums<'a> = Vec<(Labels<'a>, Tally)>;

impl<S: TrafficSource> Collector for Traffic<S> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let sums = self.0.traffic();
        let backends: Vec<String> = sums
            .iter()
            .map(|(counted, _)| counted.backend.map_or_else(String::new, |b| b.to_string()))
            .collect();
        let (mut of_services, mut of_backends) = (Sums::new(), Sums::new());
        for ((counted, tally), backend) in sums.iter().zip(&backends) {
            let mut labels = labels(&counted.service);
            if counted.backend.is_none() {
                of_services.push((labels, *tally));
            } else {
                labels.push(("backend", backend));
                of_backends.push((labels, *tally));
            }
        }
        encode(&mut encoder, "lb_service", "service ports", &of_services)?;
        encode(&mut encoder, "lb_backend", "backends of service ports", &of_backends)
    }
}

fn labels(name: &ServicePortName) -> Labels<'_> {
    let ServicePortName { service, port, protocol } = name;
    vec![
        ("namespace", &service.namespace),
        ("service", &service.name),
        ("port", port),
        ("protocol", protocol.as_str()),
    ]
}

fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    prefix: &str,
    whose: &str,
    sums: &[(Labels<'_>, Tally)],
) -> fmt::Result {
    if sums.is_empty() {
        return Ok(());
    }
    let (name, help) = (format!("{prefix}_active_flows"), format!("Active flows of {whose}"));
    let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Gauge)?;
    for (labels, tally) in sums {
        let active = gauge(usize::try_from(tally.active).unwrap_or(usize::MAX));
        ConstGauge::new(active).encode(family.encode_family(labels)?)?;
    }
    let (name, help) = (format!("{prefix}_new_flows"), format!("New flows of {whose}"));
    let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
    for (labels, tally) in sums {
        ConstCounter::new(tally.total.flows).encode(family.encode_family(labels)?)?;
    }
    encode_volume(encoder, prefix, "packets", whose, sums, |volume| volume.packets)?;
    encode_volume(encoder, prefix, "bytes", whose, sums, |volume| volume.bytes)
}

fn encode_volume(
    encoder: &mut DescriptorEncoder<'_>,
    prefix: &str,
    what: &str,
    whose: &str,
    sums: &[(Labels<'_>, Tally)],
    of: fn(&Volume) -> u64,
) -> fmt::Result {
    let (name, help) =
        (format!("{prefix}_{what}"), format!("{what} of flows of {whose}, as the network layer counts them"));
    let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
    for (labels, tally) in sums {
        for (direction, volume) in [("sent", &tally.total.sent), ("answered", &tally.total.answered)] {
            let mut labels = labels.clone();
            labels.push(("direction", direction));
            ConstCounter::new(of(volume)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
