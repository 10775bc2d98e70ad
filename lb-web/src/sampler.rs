//! Reads the counters every few seconds, and all Services while browsers request them.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant, SystemTime},
};

use tokio::{task, time};
use tracing::debug;

use crate::{
    history::{History, Plots, Reading, STEP},
    services::Services,
    source::{Fill, ServiceReader, Source, Status},
};

/// The sampler reads the fill of the maps only once in this many readings of the counters, because it has to walk the
/// maps.
const FILL_EVERY: u32 = 5;
/// How long the sampler goes on reading the Services after the last request for them.
const ATTENTION: Duration = Duration::from_secs(30);
/// How old a status may be before it is read again. Each reading walks the maps and sends requests to other programs.
const STATUS_AGE: Duration = Duration::from_secs(4);

/// Reads the data plane, and keeps what the pages show: the history of the counters, the Services and the status.
pub(crate) struct Sampler<S> {
    pub(crate) source: S,
    history: Mutex<Counted>,
    services: Mutex<Followed>,
    status: Mutex<Option<(Instant, Status)>>,
}

#[derive(Default)]
struct Counted {
    history: History,
    fill: Arc<Vec<Fill>>,
    readings: u32,
}

/// The Services, which the sampler reads while browsers request them.
#[derive(Default)]
struct Followed {
    services: Services,
    reader: Option<Box<dyn ServiceReader>>,
    read: Option<Instant>,
    wanted: Option<Instant>,
}

impl<S: Source> Sampler<S> {
    pub(crate) fn new(source: S) -> Self {
        Self { source, history: Mutex::default(), services: Mutex::default(), status: Mutex::default() }
    }

    /// Reads the counters every [`STEP`] until nothing else refers to the sampler.
    pub(crate) async fn run(sampler: Weak<Self>) -> Option<Infallible> {
        let mut pulse = time::interval(STEP);
        pulse.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            pulse.tick().await;
            let sampler = sampler.upgrade()?;
            let read = task::spawn_blocking(move || {
                sampler.count();
                sampler.follow();
            });
            if let Err(error) = read.await {
                debug!(%error, "a reading of the counters has failed");
            }
        }
    }

    /// Adds a reading to the history. Only this function changes the history, so it need not hold the lock while it
    /// reads the data plane.
    fn count(&self) {
        let (readings, mut fill) = {
            let mut counted = lock(&self.history);
            counted.readings = counted.readings.wrapping_add(1);
            (counted.readings, Arc::clone(&counted.fill))
        };
        if readings % FILL_EVERY == 1
            && let Ok(fresh) = self.source.fill()
        {
            fill = Arc::new(fresh);
        }
        let (time, at, packets) = (milliseconds(), Instant::now(), self.source.packets());
        let mut counted = lock(&self.history);
        counted.fill = Arc::clone(&fill);
        match packets {
            Ok(packets) => counted.history.push(Reading { time, at, packets, fill }),
            Err(error) => {
                debug!("cannot read the packet counters: {error:#}");
                counted.history.push_gap(time);
            }
        }
    }

    /// Reads the Services if a browser has requested them recently; otherwise drops the Services that were read before.
    fn follow(&self) {
        let mut followed = lock(&self.services);
        if followed.wanted.is_some_and(|wanted| wanted.elapsed() < ATTENTION) {
            if let Err(error) = followed.read(&self.source) {
                debug!("cannot read the Services: {error:#}");
            }
        } else {
            *followed = Followed::default();
        }
    }

    /// The history as lines to draw.
    pub(crate) fn plots(&self) -> Plots {
        lock(&self.history).history.plots()
    }

    /// Passes the Services, read at most some seconds ago, to `show`.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    pub(crate) fn services<T>(&self, show: impl FnOnce(&Services) -> T) -> anyhow::Result<T> {
        let mut followed = lock(&self.services);
        followed.wanted = Some(Instant::now());
        if followed.read.is_none_or(|read| read.elapsed() > 2 * STEP) {
            followed.read(&self.source)?;
        }
        Ok(show(&followed.services))
    }

    /// The status, read at most some seconds ago.
    ///
    /// # Errors
    /// There is no data plane, or it cannot be read.
    pub(crate) fn status(&self) -> anyhow::Result<Status> {
        // Requests that arrive together wait for one reading.
        let mut known = lock(&self.status);
        if let Some((_, status)) = known.as_ref().filter(|(read, _)| read.elapsed() < STATUS_AGE) {
            return Ok(status.clone());
        }
        *known = None;
        let status = self.source.status()?;
        *known = Some((Instant::now(), status.clone()));
        Ok(status)
    }
}

impl Followed {
    fn read(&mut self, source: &impl Source) -> anyhow::Result<()> {
        let reader = self.reader.get_or_insert_with(|| source.services());
        match reader.read() {
            Ok(ports) => {
                let elapsed = self.read.map_or(STEP, |read| read.elapsed());
                self.read = Some(Instant::now());
                self.services.update(ports, elapsed);
                Ok(())
            }
            Err(error) => {
                let wanted = self.wanted;
                *self = Self { wanted, ..Self::default() };
                Err(error)
            }
        }
    }
}

/// Locks a mutex, even if a thread has panicked while it held the lock: the readings are valid in any case.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The current time in milliseconds since 1970.
fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
