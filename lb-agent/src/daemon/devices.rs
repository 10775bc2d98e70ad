//! Keeps the BPF programs on the interfaces of the node, which come and go with its pods.

use std::{convert::Infallible, sync::Arc, time::Duration};

use tokio::{sync::watch, task, time};
use tracing::{debug, info, warn};

use super::{report::DeviceReport, state::State};
use crate::{log_few::warn_new, metrics::Metrics, node::DetectLocal};
use lb_datapath::{
    AttachPoint, Attacher, DatapathError, Device, DeviceKind, DeviceMap, DevicePatterns, DeviceWatcher,
    InternalDevices, Network, SyncReport, XdpAttacher,
};

/// Interval between two checks of all interfaces without an event: other software may have detached programs.
const ROUTINE: Duration = Duration::from_secs(30);
/// Pause before the next attempt after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// The task that keeps the BPF programs attached to the interfaces of the node.
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
    /// Publishes the interface index of the catch device while its programs are attached, else `None`.
    catch: watch::Sender<Option<u32>>,
    /// Attachments that failed in the last run. If they fail again, the error is logged at debug level only.
    failed: Vec<AttachPoint>,
}

/// How the agent recognises interfaces of internal clients, and the map that names these interfaces to the programs.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) detect: DetectLocal,
    pub(super) map: InternalDevices,
}

impl Devices {
    /// Creates the task, and starts to watch the interfaces of this network namespace.
    pub(super) fn new(
        (attacher, xdp, map): (Attacher, XdpAttacher, DeviceMap),
        patterns: DevicePatterns,
        inside: Inside,
        state: Arc<State>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, DatapathError> {
        let mut watcher = DeviceWatcher::open(patterns)?;
        let (network, _) = watch::channel(watcher.network()?);
        let (catch, _) = watch::channel(None);
        Ok(Self { watcher, attacher, xdp, map, state, metrics, inside, network, catch, failed: Vec::new() })
    }

    /// Links and addresses of the network namespace, updated on each change.
    pub(super) fn network(&self) -> watch::Receiver<Network> {
        self.network.subscribe()
    }

    /// The interface index of the catch device while its programs are attached, else `None`.
    pub(super) fn catch(&self) -> watch::Receiver<Option<u32>> {
        self.catch.subscribe()
    }

    /// Attaches and detaches programs according to the current interfaces. Returns whether all programs at tc are
    /// attached.
    pub(super) fn sync(&mut self) -> Result<bool, DatapathError> {
        let network = self.watcher.network()?;
        // The map is written before the programs are attached, so they classify the first packet of a new interface
        // correctly.
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
        // XDP is attached after tc, because tc must handle the packets that XDP passes on.
        self.xdp.sync(&devices)?;
        self.map.sync(&devices, &self.xdp)?;
        self.report_catch(&devices, &failed);
        let unattached = failed.iter().map(|(_, error)| format!("{error}; the agent keeps trying"));
        self.state.set_device_conditions(unattached.chain(self.xdp.conditions()).collect());
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
                warn!("{error}; retrying");
            }
        }
        for kind in [DeviceKind::Wire, DeviceKind::Workload] {
            let of_kind = devices.iter().filter(|device| device.kind == kind);
            let served = of_kind.filter(|device| is_served(device.index, &failed)).count();
            self.metrics.set_devices(kind.as_str(), served);
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

    /// Publishes the interface index of the catch device if its programs are attached. The caller must have written the
    /// map of devices.
    fn report_catch(&self, devices: &[Device], failed: &[(AttachPoint, DatapathError)]) {
        let device = devices.iter().find(|device| device.kind == DeviceKind::Catch);
        let index = device.map(|device| device.index);
        let served = index.filter(|index| is_served(*index, failed));
        self.catch.send_if_modified(|known| {
            let modified = *known != served;
            *known = served;
            modified
        });
    }

    /// Runs the task; the caller has called [`Self::sync`] once.
    pub(super) async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut last: Result<bool, DatapathError> = Ok(self.failed.is_empty());
        let mut failures = Vec::new();
        loop {
            let pause = match last {
                Ok(true) => ROUTINE,
                // A change that would make the attachment succeed may never come.
                Ok(false) => RETRY,
                Err(_) => {
                    // After a failed read, `changed` returns immediately.
                    time::sleep(RETRY).await;
                    Duration::ZERO
                }
            };
            tokio::select! {
                changed = self.watcher.changed() => changed?,
                () = time::sleep(pause) => {}
            }
            last = task::block_in_place(|| self.sync());
            let failure = last.as_ref().err().map(|error| format!("{error}; retrying"));
            warn_new(&mut failures, failure.as_slice());
        }
    }
}

/// Whether the device with this index has all its programs at tc, given the attachments that have failed.
fn is_served(index: u32, failed: &[(AttachPoint, DatapathError)]) -> bool {
    failed.iter().all(|(point, _)| point.index != index)
}
