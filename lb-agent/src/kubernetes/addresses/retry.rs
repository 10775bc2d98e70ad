//! Writes to the API server that have failed: when the agent tries each of them again, and what it tells a person.

use std::{collections::BTreeMap, time::Duration};

use lb_core::model::ObjectName;
use tokio::time::Instant;

/// Pause after the first failure of a write. Each further failure in a row doubles it, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Number of failures in a row from which on a person is told. One failure is common: another writer was faster, or the
/// API server restarts.
const TOLD: u32 = 2;

/// The Services whose last write has failed.
#[derive(Debug, Default)]
pub(super) struct Retries(BTreeMap<ObjectName, Retry>);

#[derive(Debug)]
struct Retry {
    /// Number of failures in a row; at least 1.
    failures: u32,
    /// Why the last write has failed.
    why: String,
    /// When the agent tries again.
    at: Instant,
}

impl Retries {
    /// Records that a write has failed. Returns the sentence for the log if a person is to be told now.
    pub(super) fn failed(&mut self, service: &ObjectName, why: String, now: Instant) -> Option<String> {
        let failures = self.0.get(service).map_or(1, |retry| retry.failures.saturating_add(1));
        let at = now + pause(failures);
        let retry = Retry { failures, why, at };
        let sentence = (failures == TOLD).then(|| sentence(service, &retry));
        self.0.insert(service.clone(), retry);
        sentence
    }

    /// Records that a write has succeeded. Returns whether a person was told of its failure.
    pub(super) fn succeeded(&mut self, service: &ObjectName) -> bool {
        self.0.remove(service).is_some_and(|retry| retry.failures >= TOLD)
    }

    /// Records that the Service has changed, so that its write is due at once.
    pub(super) fn service_changed(&mut self, service: &ObjectName, now: Instant) {
        if let Some(retry) = self.0.get_mut(service) {
            retry.at = now;
        }
    }

    /// Whether a write of this Service may be sent.
    pub(super) fn is_due(&self, service: &ObjectName, now: Instant) -> bool {
        self.0.get(service).is_none_or(|retry| retry.at <= now)
    }

    /// Forgets the Services whose write is due and not among the `wanted`: they need no write any more.
    pub(super) fn keep(&mut self, wanted: impl Fn(&ObjectName) -> bool, now: Instant) {
        self.0.retain(|service, retry| retry.at > now || wanted(service));
    }

    /// When the next write is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|retry| retry.at).min()
    }

    /// The writes that have failed repeatedly, as sentences for `lb-agent status`.
    pub(super) fn conditions(&self) -> impl Iterator<Item = String> {
        let told = self.0.iter().filter(|(_, retry)| retry.failures >= TOLD);
        told.map(|(service, retry)| sentence(service, retry))
    }
}

fn pause(failures: u32) -> Duration {
    let doubled = 2_u32.checked_pow(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    SHORTEST.saturating_mul(doubled).min(LONGEST)
}

fn sentence(service: &ObjectName, retry: &Retry) -> String {
    format!(
        "cannot write the addresses of Service {service} to its status, and tries again at least every {} s: {}",
        LONGEST.as_secs(),
        retry.why
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> ObjectName {
        ObjectName::new("default", "web")
    }

    #[test]
    fn pauses_double_and_a_person_is_told_once() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        let mut fail = |why: &str| {
            let told = retries.failed(&web(), why.to_owned(), begin).is_some();
            (told, (retries.next().unwrap() - begin).as_secs(), retries.conditions().count())
        };
        assert_eq!(fail("no answer"), (false, 1, 0));
        assert_eq!(fail("forbidden"), (true, 2, 1));
        assert_eq!([0; 6].map(|_| fail("forbidden").1), [4, 8, 16, 32, 60, 60]);
        assert_eq!(fail("forbidden"), (false, 60, 1));
        assert!(retries.conditions().all(|text| text.contains("default/web") && text.ends_with("forbidden")));
        assert!(retries.succeeded(&web()) && !retries.succeeded(&web()));
        assert_eq!(retries.conditions().count(), 0);
    }

    #[test]
    fn write_waits_until_its_time_or_a_change_of_its_service() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        assert!(retries.is_due(&web(), begin));
        retries.failed(&web(), "conflict".to_owned(), begin);
        assert!(!retries.is_due(&web(), begin) && retries.is_due(&web(), begin + SHORTEST));
        retries.service_changed(&web(), begin);
        assert!(retries.is_due(&web(), begin));
        // It stays while it is wanted; else it would wake the agent again and again.
        retries.keep(|service| *service == web(), begin);
        assert_eq!(retries.next(), Some(begin));
        retries.keep(|_| false, begin);
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn unwanted_write_is_forgotten_only_when_it_is_due() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        retries.failed(&web(), "forbidden".to_owned(), begin);
        retries.keep(|_| false, begin);
        assert_eq!(retries.next(), Some(begin + SHORTEST));
        retries.keep(|_| false, begin + SHORTEST);
        assert_eq!(retries.next(), None);
    }
}
