//! Reads events of the BPF programs for the page Live.

use std::{
    thread,
    time::{Duration, Instant},
};

use lb_web::EventReader;

use super::super::{event_view::EventView, monitor};
use lb_datapath::{Monitor, ServiceMaps};

/// Pause between two looks into the ring buffer for events.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of events in one reading, so that the reader soon checks again whether a browser listens.
const MOST: usize = 2000;

/// Reads events from the ring buffer of the BPF programs, with the names of their Services.
pub(super) struct Events {
    maps: ServiceMaps,
    monitor: Monitor,
    lost: u64,
}

impl Events {
    pub(super) const fn new(maps: ServiceMaps, monitor: Monitor) -> Self {
        Self { maps, monitor, lost: 0 }
    }
}

impl EventReader<EventView> for Events {
    fn read(&mut self, patience: Duration) -> anyhow::Result<(Vec<EventView>, u64)> {
        self.monitor.extend()?;
        let (begun, mut views) = (Instant::now(), Vec::new());
        while views.is_empty() && begun.elapsed() < patience {
            while views.len() < MOST
                && let Some(event) = self.monitor.next_event()
            {
                views.push(monitor::view(&self.maps, &event)?);
            }
            if views.is_empty() {
                thread::sleep(PAUSE);
            }
        }
        let lost = self.monitor.lost()?;
        let more = lost.saturating_sub(self.lost);
        self.lost = lost;
        Ok((views, more))
    }
}
