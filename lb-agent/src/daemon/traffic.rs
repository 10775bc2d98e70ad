//! Counts the traffic of Services for the metrics. The connection tracking task adds it up from the flow table; each
//! scrape looks up the names of the Services.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lb_core::traffic::Tally;
use tracing::warn;

use crate::{
    cli::ServiceMetrics,
    metrics::{TrafficLabels, TrafficSource},
};
use lb_datapath::{Datapath, DatapathError, Ledger, ServiceMaps};

/// Traffic of each service port and backend since [`Self::begin`]. Clones share the counters.
#[derive(Clone)]
pub(super) struct ServiceTraffic {
    ledger: Arc<Mutex<Ledger>>,
    maps: ServiceMaps,
    of_backends: bool,
}

impl fmt::Debug for ServiceTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceTraffic").field("of_backends", &self.of_backends).finish_non_exhaustive()
    }
}

impl ServiceTraffic {
    /// Starts to count from the present counters of the flow table; `None` if `--service-metrics` is `none`.
    pub(super) fn begin(of: ServiceMetrics, datapath: &Datapath) -> Result<Option<Self>, DatapathError> {
        if of == ServiceMetrics::None {
            return Ok(None);
        }
        let mut ledger = Ledger::default();
        // The first walk only records the counters, so that traffic from before the start of the agent does not count.
        datapath.conntrack().tally(&mut ledger)?;
        let of_backends = of == ServiceMetrics::Backend;
        Ok(Some(Self { ledger: Arc::new(Mutex::new(ledger)), maps: datapath.maps().clone(), of_backends }))
    }

    /// Locks the sums of traffic. A walk through the flow table adds to them.
    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // A panic while the lock is held leaves the sums valid, so poisoning is ignored.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sums of each service port, and if configured of each backend; each entry begins with the id of the service
    /// port.
    fn sums(&self) -> Vec<(u32, Option<SocketAddr>, Tally)> {
        let ledger = self.ledger();
        let services = ledger.services().into_iter().map(|(id, tally)| (id, None, tally));
        let mut sums: Vec<_> = services.collect();
        if self.of_backends {
            let backends = ledger.backends();
            sums.extend(backends.map(|(endpoint, tally)| {
                let backend = SocketAddr::new(endpoint.address.into(), endpoint.port);
                (endpoint.service, Some(backend), *tally)
            }));
        }
        sums
    }
}

impl TrafficSource for ServiceTraffic {
    fn traffic(&self) -> Vec<(TrafficLabels, Tally)> {
        let mut names = BTreeMap::new();
        let mut named = Vec::new();
        for (id, backend, tally) in self.sums() {
            let name = names.entry(id).or_insert_with(|| {
                let labels = self.maps.labels_of(id);
                labels.inspect_err(|error| warn!("a scrape lacks service {id}: {error}")).ok().flatten()
            });
            // Counters of a deleted Service are left out: it has no labels any more.
            if let Some(labels) = name {
                named.push((TrafficLabels { service: labels.name.clone(), backend }, tally));
            }
        }
        named
    }
}
