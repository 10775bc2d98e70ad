//! Keeping our programs on the devices of the node, which come and go with its pods.

use std::{convert::Infallible, sync::Arc, time::Duration};

use tokio::{sync::watch, task, time};
use tracing::{debug, info, warn};

use super::state::{DeviceReport, State};
use crate::{metrics::Metrics, node::DetectLocal};
use lb_datapath::{
    AttachPoint, Attacher, DatapathError, Device, DeviceKind, DeviceMap, DevicePatterns, DeviceWatcher,
    InternalDevices, Network, SyncReport, XdpAttacher,
};

/// How often devices are looked at without a reason: others may have detached our programs.
const ROUTINE: Duration = Duration::from_secs(30);
/// How soon after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// State of the task.
#[derive(Debug)]
pub(super) struct Devices {
    watcher: DeviceWatcher,
    attacher: Attacher,
    xdp: XdpAttacher,
    map: DeviceMap,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    inside: Inside,
    network: watch::Sender<Network>,
    /// What failed last time, so that it is said once.
    failed: Vec<AttachPoint>,
}

/// The devices of clients inside the cluster: which they are, and where the programs look them up.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) detect: DetectLocal,
    pub(super) map: InternalDevices,
}

impl Devices {
    /// Watches this network namespace.
    pub(super) fn new(
        (attacher, xdp, map): (Attacher, XdpAttacher, DeviceMap),
        patterns: DevicePatterns,
        inside: Inside,
        state: Arc<State>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, DatapathError> {
        let mut watcher = DeviceWatcher::open(patterns)?;
        let (network, _) = watch::channel(watcher.network()?);
        Ok(Self { watcher, attacher, xdp, map, state, metrics, inside, network, failed: Vec::new() })
    }

    /// The network namespace, now and whenever it changes.
    pub(super) fn network(&self) -> watch::Receiver<Network> {
        self.network.subscribe()
    }

    /// Puts the programs where they belong now; whether all are there.
    pub(super) fn sync(&mut self) -> Result<bool, DatapathError> {
        let network = self.watcher.network()?;
        // Before the programs, so that they know where the first packet of a new device comes from.
        self.inside.map.set(&self.inside.detect.devices(&network))?;
        self.network.send_if_modified(|known| {
            let modified = *known != network;
            if modified {
                *known = network;
            }
            modified
        });
        let devices = self.watcher.devices()?;
        let SyncReport { attached, detached, failed } = self.attacher.sync(&devices)?;
        // When tc is there: what XDP leaves alone is handled by it.
        self.xdp.sync(&devices)?;
        self.map.sync(&devices, |index| self.xdp.mode_of(index))?;
        for (places, said) in [(&attached, "attached"), (&detached, "detached")] {
            if !places.is_empty() {
                let places: Vec<_> = places.iter().map(ToString::to_string).collect();
                info!(mode = self.attacher.mode().as_str(), devices = places.join(", "), "{said}");
            }
        }
        for (place, error) in &failed {
            if self.failed.contains(place) {
                debug!("{error}");
            } else {
                warn!("{error}; trying again");
            }
        }
        for kind in [DeviceKind::Wire, DeviceKind::Workload] {
            let count = devices.iter().filter(|device| device.kind == kind).count();
            self.metrics.set_devices(kind.as_str(), count);
        }
        let report = |device: Device| {
            let Device { index, name, kind, .. } = device;
            let xdp = self.xdp.mode_of(index).map(|mode| mode.as_str().to_owned());
            DeviceReport { index, name, kind: kind.as_str().to_owned(), xdp }
        };
        self.state.set_devices(devices.into_iter().map(report).collect());
        self.failed = failed.into_iter().map(|(place, _)| place).collect();
        Ok(self.failed.is_empty())
    }

    /// Runs for ever, after a first [`Self::sync`].
    pub(super) async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut well = true;
        loop {
            if well {
                tokio::select! {
                    changed = self.watcher.changed() => changed?,
                    () = time::sleep(ROUTINE) => {}
                }
            } else {
                // What failed counts as changed until it is read: waiting for a change would be no pause.
                time::sleep(RETRY).await;
            }
            well = match task::block_in_place(|| self.sync()) {
                Ok(well) => well,
                Err(error) => {
                    warn!("{error}; trying again");
                    false
                }
            };
        }
    }
}
