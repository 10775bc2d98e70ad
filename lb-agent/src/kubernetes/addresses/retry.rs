//! Writes to the API server that have failed: when the agent tries each of them again, and what it logs and shows in
//! `status`.

use std::{collections::BTreeMap, time::Duration};

use lb_core::model::ObjectName;
use tokio::time::Instant;

/// Pause after the first failure of a write. Each further failure in a row doubles it, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// The agent logs a failing write, and shows it in `status`, after this many failures in a row. One failure is common:
/// another writer was faster, or the API server restarts.
const FAILURES_UNTIL_TOLD: u32 = 2;

/// The Services whose last write has not succeeded and is to be repeated.
#[derive(Debug, Default)]
pub(super) struct Retries(BTreeMap<ObjectName, Retry>);

#[derive(Debug, Default)]
struct Retry {
    /// Number of failures in a row; 0 if the agent has only put the write off.
    failures: u32,
    /// Why the last write has failed.
    why: String,
    /// When the agent tries again; `None` means at once.
    at: Option<Instant>,
}

impl Retry {
    const fn is_told(&self) -> bool {
        self.failures >= FAILURES_UNTIL_TOLD
    }

    fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }
}

impl Retries {
    /// Records that a write has failed. Returns whether the agent must log [`Self::conditions`]: the write has failed
    /// often enough, and no current failure that is already reported has the same reason.
    pub(super) fn failed(&mut self, service: &ObjectName, why: String, now: Instant) -> bool {
        let is_known = self.0.values().any(|retry| retry.is_told() && retry.why == why);
        let retry = self.0.entry(service.clone()).or_default();
        retry.failures = retry.failures.saturating_add(1);
        (retry.why, retry.at) = (why, Some(now + pause(retry.failures)));
        retry.is_told() && !is_known
    }

    /// Records that the agent has not sent a write, and tries again soon.
    pub(super) fn put_off(&mut self, service: &ObjectName, now: Instant) {
        self.0.entry(service.clone()).or_default().at = Some(now + SHORTEST);
    }

    /// Records that a write has succeeded. Returns whether the failures of this write were reported, and no other
    /// reported failure is left.
    pub(super) fn succeeded(&mut self, service: &ObjectName) -> bool {
        let told = self.0.remove(service).is_some_and(|retry| retry.is_told());
        told && !self.0.values().any(Retry::is_told)
    }

    /// Records that the Service has changed, so that its write is due at once.
    pub(super) fn service_changed(&mut self, service: &ObjectName) {
        if let Some(retry) = self.0.get_mut(service) {
            retry.at = None;
        }
    }

    /// Whether a write of this Service may be sent.
    pub(super) fn is_due(&self, service: &ObjectName, now: Instant) -> bool {
        self.0.get(service).is_none_or(|retry| retry.is_due(now))
    }

    /// Removes the Services whose write is due and not `wanted` any more.
    pub(super) fn forget_unwanted(&mut self, wanted: impl Fn(&ObjectName) -> bool, now: Instant) {
        self.0.retain(|service, retry| !retry.is_due(now) || wanted(service));
    }

    /// When the next write is due; `None` if no write waits for its time.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(|retry| retry.at).min()
    }

    /// The reasons for which writes have failed repeatedly, as sentences for `lb-agent status`.
    pub(super) fn conditions(&self) -> impl Iterator<Item = String> {
        let mut reasons: BTreeMap<&str, Vec<&ObjectName>> = BTreeMap::new();
        for (service, retry) in self.0.iter().filter(|(_, retry)| retry.is_told()) {
            reasons.entry(&retry.why).or_default().push(service);
        }
        reasons.into_iter().map(|(why, services)| sentence(why, &services))
    }
}

fn pause(failures: u32) -> Duration {
    SHORTEST.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST)
}

fn sentence(why: &str, services: &[&ObjectName]) -> String {
    let first = services.first().map_or_else(String::new, ToString::to_string);
    let others = match services.len() {
        0 | 1 => String::new(),
        2 => ", and of 1 other".to_owned(),
        count => format!(", and of {} others", count - 1),
    };
    format!(
        "cannot write the addresses of Service {first}{others} to the Service's status, and tries again at least every {} s: \
         {why}",
        LONGEST.as_secs()
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
            let told = retries.failed(&web(), why.to_owned(), begin);
            (told, (retries.next_due().unwrap() - begin).as_secs(), retries.conditions().count())
        };
        assert_eq!(fail("no answer"), (false, 1, 0));
        assert_eq!(fail("forbidden"), (true, 2, 1));
        assert_eq!([0; 6].map(|_| fail("forbidden").1), [4, 8, 16, 32, 60, 60]);
        assert_eq!(fail("forbidden"), (false, 60, 1));
        assert!(retries.succeeded(&web()) && !retries.succeeded(&web()));
        assert_eq!(retries.conditions().count(), 0);
    }

    #[test]
    fn services_with_one_reason_share_a_condition() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        let services = ["a", "b", "c"].map(|name| ObjectName::new("default", name));
        let told = [0, 1].map(|_| {
            let fail = |service| retries.failed(service, "403 Forbidden".to_owned(), begin);
            services.iter().map(fail).filter(|told| *told).count()
        });
        assert_eq!(told, [0, 1]);
        let [condition] = <[String; 1]>::try_from(retries.conditions().collect::<Vec<_>>()).unwrap();
        assert!(condition.contains("default/a, and of 2 others") && condition.ends_with("403 Forbidden"));
        assert_eq!(services.map(|service| retries.succeeded(&service)), [false, false, true]);
    }

    #[test]
    fn write_waits_until_its_time_or_a_change_of_its_service() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        assert!(retries.is_due(&web(), begin));
        retries.failed(&web(), "conflict".to_owned(), begin);
        assert!(!retries.is_due(&web(), begin) && retries.is_due(&web(), begin + SHORTEST));
        retries.service_changed(&web());
        assert!(retries.is_due(&web(), begin));
    }

    #[test]
    fn write_that_was_put_off_does_not_count_as_failed() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        for _ in 0..9 {
            retries.put_off(&web(), begin);
        }
        assert_eq!((retries.next_due(), retries.conditions().count()), (Some(begin + SHORTEST), 0));
    }

    #[test]
    fn unwanted_write_is_forgotten_once_it_is_due() {
        let (mut retries, begin) = (Retries::default(), Instant::now());
        retries.failed(&web(), "forbidden".to_owned(), begin);
        retries.forget_unwanted(|_| false, begin);
        assert_eq!(retries.next_due(), Some(begin + SHORTEST));
        retries.forget_unwanted(|service| *service == web(), begin + SHORTEST);
        assert_eq!(retries.next_due(), Some(begin + SHORTEST));
        retries.forget_unwanted(|_| false, begin + SHORTEST);
        assert_eq!(retries.next_due(), None);
    }
}
