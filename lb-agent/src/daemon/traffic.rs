//! What services do, for whoever scrapes the metrics: counted by the task that forgets connections, named when somebody asks.

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
    metrics::{Counted, TrafficSource},
};
use lb_datapath::{Datapath, DatapathError, Ledger, ServiceMaps};

/// The sums since the agent started. Cloning shares them.
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
    /// Begins to count, if anything is to be counted.
    pub(super) fn begin(of: ServiceMetrics, datapath: &Datapath) -> Result<Option<Self>, DatapathError> {
        if of == ServiceMetrics::None {
            return Ok(None);
        }
        let mut ledger = Ledger::default();
        // What connections have done before is not of this life.
        datapath.conntrack().tally(&mut ledger)?;
        let of_backends = of == ServiceMetrics::Backend;
        Ok(Some(Self { ledger: Arc::new(Mutex::new(ledger)), maps: datapath.maps().clone(), of_backends }))
    }

    /// The sums, for the one who walks through the entries.
    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Sums are whole between any two statements that could panic.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sums of each service port, then of each backend if those are wanted, by id.
    fn sums(&self) -> Vec<(u32, Option<SocketAddr>, Tally)> {
        let ledger = self.ledger();
        let services = ledger.services().into_iter().map(|(id, tally)| (id, None, tally));
        let mut sums: Vec<_> = services.collect();
        if self.of_backends {
            let backends = ledger.backends();
            sums.extend(backends.map(|(counted, tally)| {
                let backend = SocketAddr::new(counted.address.into(), counted.port);
                (counted.service, Some(backend), *tally)
            }));
        }
        sums
    }
}

impl TrafficSource for ServiceTraffic {
    fn traffic(&self) -> Vec<(Counted, Tally)> {
        let mut names = BTreeMap::new();
        let mut named = Vec::new();
        for (id, backend, tally) in self.sums() {
            let name = names.entry(id).or_insert_with(|| {
                let labels = self.maps.labels_of(id);
                labels
                    .inspect_err(|error| warn!("a scrape goes without service {id}: {error}"))
                    .ok()
                    .flatten()
            });
            // Services without a name are gone.
            if let Some(labels) = name {
                named.push((Counted { service: labels.name.clone(), backend }, tally));
            }
        }
        named
    }
}
