//! The log line about synchronisations; if they are frequent, one line sums up several.

use std::time::{Duration, Instant};

use tracing::info;

/// Minimum interval between two log lines.
const APART: Duration = Duration::from_secs(1);

/// The sums over the synchronisations since the last log line.
#[derive(Debug, Default)]
pub(super) struct SyncLog {
    synchronisations: usize,
    /// Number of changed objects.
    changes: usize,
    /// Number of map updates.
    steps: usize,
    slowest: Duration,
    services: usize,
    endpoints: usize,
    last_line: Option<Instant>,
}

impl SyncLog {
    pub(super) const fn count_changes(&mut self, changes: usize) {
        self.changes += changes;
    }

    pub(super) const fn count_steps(&mut self, steps: usize) {
        self.steps += steps;
    }

    /// Records a complete synchronisation. `took` is its duration, from the arrival of the first change or, if no
    /// change caused the synchronisation, from its start. `services` and `endpoints` are the numbers of service ports
    /// and backends in the kernel.
    pub(super) fn synchronised(&mut self, took: Duration, services: usize, endpoints: usize) {
        self.synchronisations += 1;
        self.slowest = self.slowest.max(took);
        (self.services, self.endpoints) = (services, endpoints);
        if self.due().is_none_or(|due| due <= Instant::now()) {
            self.flush();
        }
    }

    /// When the next line is due; `None` if there is nothing to log, or if no line has been written yet: the first line
    /// is written at once.
    pub(super) fn due(&self) -> Option<Instant> {
        let last = self.last_line.filter(|_| self.synchronisations > 0)?;
        Some(last + APART)
    }

    /// Writes the log line, and resets the sums.
    pub(super) fn flush(&mut self) {
        let Self { synchronisations, changes, steps, slowest, services, endpoints, .. } = *self;
        let milliseconds = slowest.as_secs_f64() * 1e3;
        let elapsed = format_args!("{milliseconds:.1}ms");
        if synchronisations == 1 {
            info!(services, endpoints, changes, steps, %elapsed, "synchronised");
        } else {
            info!(services, endpoints, changes, steps, slowest = %elapsed, "synchronised {synchronisations} times");
        }
        *self = Self { services, endpoints, last_line: Some(Instant::now()), ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_is_immediate_and_later_ones_are_summed_up() {
        let mut log = SyncLog::default();
        assert_eq!(log.due(), None);
        log.count_changes(3);
        log.synchronised(Duration::from_millis(2), 1, 2);
        assert_eq!((log.synchronisations, log.changes), (0, 0), "the line was written");
        assert_eq!(log.due(), None, "nothing to log");
        log.synchronised(Duration::from_millis(2), 1, 2);
        log.synchronised(Duration::from_millis(5), 1, 3);
        assert_eq!((log.synchronisations, log.slowest), (2, Duration::from_millis(5)));
        assert!(log.due().unwrap() > Instant::now());
        log.flush();
        assert_eq!(log.due(), None);
    }
}
