//! Reads the annotations that set the timeouts after which the agent ends connections.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use super::values::{boolean, duration, within};
use crate::model::{IgnoredAnnotation, ServiceSettings};

/// The annotation that sets how long connections go on after the Service has lost their backend, such as `60s`.
pub const DRAIN_TIMEOUT: &str = "lb.dev/drain-timeout";
/// The annotation that sets how long connections may be idle, such as `5m`.
pub const IDLE_TIMEOUT: &str = "lb.dev/idle-timeout";

const AWS_DRAINS: &str = "service.beta.kubernetes.io/aws-load-balancer-connection-draining-enabled";
const AWS_DRAIN_TIMEOUT: &str = "service.beta.kubernetes.io/aws-load-balancer-connection-draining-timeout";
const AWS_IDLE_TIMEOUT: &str = "service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout";
/// The annotations of AWS that this module reads.
pub(super) const AWS: [&str; 3] = [AWS_DRAINS, AWS_DRAIN_TIMEOUT, AWS_IDLE_TIMEOUT];

/// The drain timeout of AWS where draining is enabled and no annotation sets another timeout.
const AWS_DRAIN: Duration = Duration::from_mins(5);

const DRAINS: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_hours(1);
const IDLE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_hours(24);

/// Sets the timeouts from the annotations; records invalid annotations, and annotations of AWS that have no effect. The
/// annotations of this project override those of AWS.
pub(super) fn read(annotations: &BTreeMap<String, String>, settings: &mut ServiceSettings) {
    let text = |name| annotations.get(name).map(|text| text.trim());
    let mut of = |name, range| {
        let text = text(name)?;
        settings.noted(name, text, within(text, duration(text), range))
    };
    let (drain, idle) = (of(DRAIN_TIMEOUT, &DRAINS), of(IDLE_TIMEOUT, &IDLE));
    let aws_drain = of(AWS_DRAIN_TIMEOUT, &DRAINS).unwrap_or(AWS_DRAIN);
    let aws_idle = of(AWS_IDLE_TIMEOUT, &IDLE);
    let drains = text(AWS_DRAINS).and_then(|text| settings.noted(AWS_DRAINS, text, boolean(text)));
    settings.timeouts.drain = drain.or_else(|| drains.unwrap_or(false).then_some(aws_drain));
    settings.timeouts.idle = idle.or(aws_idle);
    let without_effect = [
        (AWS_DRAIN_TIMEOUT, drain.is_some(), "lb.dev/drain-timeout overrides it"),
        (
            AWS_DRAIN_TIMEOUT,
            drain.is_none() && drains != Some(true),
            "connection draining is not enabled by its own annotation",
        ),
        (AWS_IDLE_TIMEOUT, idle.is_some(), "lb.dev/idle-timeout overrides it"),
    ];
    for (name, _, why) in without_effect.into_iter().filter(|(_, holds, _)| *holds) {
        let ignored =
            |value: &String| IgnoredAnnotation { annotation: name.into(), value: value.as_str().into(), why };
        settings.ignored.extend(annotations.get(name).map(ignored));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ConnectionTimeouts;

    fn of(annotations: &[(&str, &str)]) -> (ConnectionTimeouts, Vec<&'static str>) {
        let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut settings = ServiceSettings::default();
        read(&owned.collect(), &mut settings);
        (settings.timeouts, settings.annotation_errors.into_iter().map(|error| error.annotation).collect())
    }

    const fn timeouts(drain: Option<u64>, idle: Option<u64>) -> ConnectionTimeouts {
        const fn seconds(seconds: Option<u64>) -> Option<Duration> {
            match seconds {
                Some(seconds) => Some(Duration::from_secs(seconds)),
                None => None,
            }
        }
        ConnectionTimeouts { idle: seconds(idle), drain: seconds(drain) }
    }

    #[test]
    fn annotations_set_the_timeouts() {
        for (annotations, expected) in [
            (&[][..], timeouts(None, None)),
            (&[(DRAIN_TIMEOUT, " 30s ")], timeouts(Some(30), None)),
            (&[(DRAIN_TIMEOUT, "0")], timeouts(Some(0), None)),
            (&[(IDLE_TIMEOUT, "5m")], timeouts(None, Some(300))),
            (&[(AWS_IDLE_TIMEOUT, "60")], timeouts(None, Some(60))),
            (&[(AWS_DRAINS, "true")], timeouts(Some(300), None)),
            (&[(AWS_DRAINS, "true"), (AWS_DRAIN_TIMEOUT, "60")], timeouts(Some(60), None)),
            (&[(AWS_DRAINS, "false"), (AWS_DRAIN_TIMEOUT, "60")], timeouts(None, None)),
            (&[(AWS_DRAIN_TIMEOUT, "60")], timeouts(None, None)),
            (&[(AWS_IDLE_TIMEOUT, "60"), (IDLE_TIMEOUT, "90")], timeouts(None, Some(90))),
            (&[(AWS_DRAINS, "true"), (DRAIN_TIMEOUT, "7")], timeouts(Some(7), None)),
        ] {
            assert_eq!(of(annotations), (expected, vec![]), "{annotations:?}");
        }
    }

    #[test]
    fn timeout_that_another_annotation_switches_off_is_reported() {
        let [enabled, timeout, idle] = AWS;
        for (annotations, expected) in [
            (&[(timeout, "60")][..], &[timeout][..]),
            (&[(timeout, "60"), (enabled, "true")], &[]),
            (&[(timeout, "60"), (enabled, "false")], &[timeout]),
            (&[(timeout, "60"), (enabled, "true"), (DRAIN_TIMEOUT, "5s")], &[timeout]),
            (&[(timeout, "60"), (enabled, "true"), (DRAIN_TIMEOUT, "2 minutes")], &[]),
            (&[(idle, "60"), (IDLE_TIMEOUT, "5s")], &[idle]),
            (&[(idle, "60")], &[]),
        ] {
            let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            let mut settings = ServiceSettings::default();
            read(&owned.collect(), &mut settings);
            let reported: Vec<&str> = settings.ignored.iter().map(|ignored| &*ignored.annotation).collect();
            assert_eq!(reported, expected, "{annotations:?}");
        }
    }

    #[test]
    fn invalid_timeout_is_reported_and_unset() {
        for (name, value) in [
            (DRAIN_TIMEOUT, "2 minutes"),
            (DRAIN_TIMEOUT, "61m"),
            (IDLE_TIMEOUT, "0"),
            (IDLE_TIMEOUT, "25h"),
            (AWS_IDLE_TIMEOUT, "-1"),
            (AWS_DRAINS, "yes"),
        ] {
            assert_eq!(of(&[(name, value)]), (timeouts(None, None), vec![name]), "{name}: {value}");
        }
    }
}
