//! Reads the annotations that set health checks: those of this project, and those of AWS with the same meaning. If a
//! Service has both, the annotation of this project applies, except an invalid annotation for an interval, a timeout or
//! a threshold: then the annotation of AWS applies. An empty value stands for the default.

use std::{collections::BTreeMap, ops::RangeInclusive, sync::Arc, time::Duration};

use super::values::{boolean, duration, within};
use crate::{
    model::{AnnotationError, IgnoredAnnotation, ServiceSettings},
    probe::check::{Check, Kind, NOT_IN_PATHS, Probe, Timing, is_path},
};

/// The annotation that sets the [`Probe`] of the health check; `none` turns the check off.
pub const HEALTH_CHECK: &str = "lb.dev/health-check";
/// The annotation that sets the usual time from one probe to the next ([`Timing::interval`]), such as `10s` or `500ms`;
/// a number is seconds.
pub const INTERVAL: &str = "lb.dev/health-check-interval";
/// The annotation that sets how long a probe may take; less than the interval.
pub const TIMEOUT: &str = "lb.dev/health-check-timeout";
/// The annotation that sets how many good results in a row make an endpoint healthy.
pub const HEALTHY_THRESHOLD: &str = "lb.dev/health-check-healthy-threshold";
/// The annotation that sets how many failures in a row make an endpoint unhealthy.
pub const UNHEALTHY_THRESHOLD: &str = "lb.dev/health-check-unhealthy-threshold";
/// The annotation that sets whether a node refuses new connections while it finds all endpoints unhealthy: `true` or
/// `false`.
pub const FAIL_CLOSED: &str = "lb.dev/fail-closed";

const TIMINGS: [&str; 4] = [INTERVAL, TIMEOUT, HEALTHY_THRESHOLD, UNHEALTHY_THRESHOLD];

/// The annotations of AWS. Without [`HEALTH_CHECK`], any one of them turns a health check on; this is a TCP check
/// unless `AWS_PROTOCOL` sets another protocol.
const AWS_PROTOCOL: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol";
const AWS_PORT: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-port";
const AWS_PATH: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-path";
const AWS_INTERVAL: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval";
const AWS_TIMEOUT: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout";
const AWS_HEALTHY: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold";
const AWS_UNHEALTHY: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold";
pub(super) const AWS: [&str; 7] =
    [AWS_PROTOCOL, AWS_PORT, AWS_PATH, AWS_INTERVAL, AWS_TIMEOUT, AWS_HEALTHY, AWS_UNHEALTHY];

const BY_CHECK: &str = "lb.dev/health-check overrides it";
/// Each annotation of AWS, the annotation of this project that overrides it, and the text by which the agent reports
/// the override.
const OVERRIDDEN: [(&str, &str, &str); 7] = [
    (AWS_PROTOCOL, HEALTH_CHECK, BY_CHECK),
    (AWS_PORT, HEALTH_CHECK, BY_CHECK),
    (AWS_PATH, HEALTH_CHECK, BY_CHECK),
    (AWS_INTERVAL, INTERVAL, "lb.dev/health-check-interval overrides it"),
    (AWS_TIMEOUT, TIMEOUT, "lb.dev/health-check-timeout overrides it"),
    (AWS_HEALTHY, HEALTHY_THRESHOLD, "lb.dev/health-check-healthy-threshold overrides it"),
    (AWS_UNHEALTHY, UNHEALTHY_THRESHOLD, "lb.dev/health-check-unhealthy-threshold overrides it"),
];

/// The default unhealthy threshold if annotations of AWS, not [`HEALTH_CHECK`], turn the check on: AWS's default.
const AWS_UNHEALTHY_THRESHOLD: u8 = 6;

const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(600);
const THRESHOLDS: RangeInclusive<u8> = 1..=100;

/// Whether an annotation that defines the check is invalid: [`HEALTH_CHECK`], or, if there is a check, an annotation
/// for its timing or an annotation of AWS. (Without a check, an annotation for its timing has no effect.)
pub(crate) fn has_invalid_check(settings: &ServiceSettings) -> bool {
    let is_used = |name: &str| TIMINGS.contains(&name) || AWS.contains(&name);
    let mut errors = settings.annotation_errors.iter().map(|error| error.annotation);
    errors.any(|name| name == HEALTH_CHECK || settings.check.is_some() && is_used(name))
}

/// Whether the annotation [`FAIL_CLOSED`] is invalid.
pub(crate) fn has_invalid_fail_closed(settings: &ServiceSettings) -> bool {
    settings.annotation_errors.iter().any(|error| error.annotation == FAIL_CLOSED)
}

/// Sets the check from the annotations; records invalid annotations, and annotations of AWS that have no effect.
pub(super) fn read(annotations: &BTreeMap<String, String>, settings: &mut ServiceSettings) {
    let mut reader = Reader { annotations, errors: &mut settings.annotation_errors };
    settings.fail_closed = reader.of(FAIL_CLOSED, boolean).unwrap_or_default();
    settings.check = reader.check().map(Arc::new);
    settings.ignored.extend(reader.overridden());
}

struct Reader<'a> {
    annotations: &'a BTreeMap<String, String>,
    errors: &'a mut Vec<AnnotationError>,
}

impl Reader<'_> {
    fn check(&mut self) -> Option<Check> {
        let is_ours = self.text(HEALTH_CHECK).is_some();
        let Probe { kind, port } = if is_ours {
            let probe = |text: &str| if text == "none" { Ok(None) } else { text.parse().map(Some) };
            self.of(HEALTH_CHECK, probe).flatten()?
        } else if AWS.iter().any(|name| self.annotations.contains_key(*name)) {
            self.probe_of_aws()?
        } else {
            for name in TIMINGS {
                self.of(name, |_| Err::<(), _>(format!("it has no effect without {HEALTH_CHECK}")));
            }
            return None;
        };
        let unhealthy = if is_ours { Timing::default().unhealthy } else { AWS_UNHEALTHY_THRESHOLD };
        let timing = self.timing(Timing { unhealthy, ..Timing::default() });
        Some(Check { kind, port, timing, proxy_header: false })
    }

    fn probe_of_aws(&mut self) -> Option<Probe> {
        let path = self.of(AWS_PATH, |text| match text.starts_with('/') && is_path(text) {
            true => Ok(text.to_owned()),
            false => Err(format!(
                "give a path that begins with / and has only visible ASCII characters, none of {NOT_IN_PATHS}"
            )),
        });
        let path: Arc<str> = path.as_deref().unwrap_or("/").into();
        let kind = self.of(AWS_PROTOCOL, |text| match &*text.to_ascii_lowercase() {
            "tcp" | "ssl" => Ok(Kind::Tcp),
            "http" => Ok(Kind::Http(path.clone())),
            "https" => Ok(Kind::Https(path.clone())),
            _ => Err("give tcp, http or https".to_owned()),
        });
        let port = self.of(AWS_PORT, |text| match text {
            "traffic-port" => Ok(None),
            text => text.parse().map(Some).map_err(|_invalid| "give a port, or traffic-port".to_owned()),
        });
        Some(Probe { kind: kind.unwrap_or(Kind::Tcp), port: port.flatten() })
    }

    fn timing(&mut self, default: Timing) -> Timing {
        let aws = |seconds: RangeInclusive<u64>| {
            Duration::from_secs(*seconds.start())..=Duration::from_secs(*seconds.end())
        };
        let interval = self.time(INTERVAL, INTERVALS).or_else(|| self.time(AWS_INTERVAL, aws(5..=300)));
        let interval = interval.unwrap_or(default.interval);
        let timeout = self.timeout(TIMEOUT, TIMEOUTS, interval);
        let timeout = timeout.or_else(|| self.timeout(AWS_TIMEOUT, aws(2..=60), interval));
        let healthy = self.count(HEALTHY_THRESHOLD, THRESHOLDS).or_else(|| self.count(AWS_HEALTHY, 2..=10));
        let unhealthy = self.count(UNHEALTHY_THRESHOLD, THRESHOLDS);
        let unhealthy = unhealthy.or_else(|| self.count(AWS_UNHEALTHY, 2..=10));
        Timing {
            interval,
            timeout: timeout.unwrap_or_else(|| default.timeout.min(interval / 2)),
            healthy: healthy.unwrap_or(default.healthy),
            unhealthy: unhealthy.unwrap_or(default.unhealthy),
        }
    }

    fn timeout(
        &mut self,
        name: &'static str,
        range: RangeInclusive<Duration>,
        interval: Duration,
    ) -> Option<Duration> {
        self.of(name, |text| {
            let timeout = within(text, duration(text), &range)?;
            if timeout < interval {
                return Ok(timeout);
            }
            Err(format!("it must be less than the interval, {interval:?}"))
        })
    }

    fn time(&mut self, name: &'static str, range: RangeInclusive<Duration>) -> Option<Duration> {
        self.of(name, |text| within(text, duration(text), &range))
    }

    fn count(&mut self, name: &'static str, range: RangeInclusive<u8>) -> Option<u8> {
        self.of(name, |text| within(text, text.parse().ok(), &range))
    }

    /// The annotations of AWS that annotations of this project override. An invalid annotation for the timing overrides
    /// no annotation of AWS.
    fn overridden(&self) -> Vec<IgnoredAnnotation> {
        let is_off = self.text(HEALTH_CHECK) == Some("none");
        let is_valid = |name| self.errors.iter().all(|error| error.annotation != name);
        let found = OVERRIDDEN.into_iter().filter_map(|(annotation, by, why)| {
            let value = self.text(annotation)?;
            let why = if is_off {
                BY_CHECK
            } else {
                self.text(by).filter(|_| by == HEALTH_CHECK || is_valid(by))?;
                why
            };
            Some(IgnoredAnnotation { annotation: annotation.into(), value: value.into(), why })
        });
        found.collect()
    }

    /// The value of an annotation; if it is invalid, records the error and returns `None`.
    fn of<T>(
        &mut self,
        annotation: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let text = self.text(annotation)?;
        let note = |why| AnnotationError { annotation, value: text.to_owned(), why };
        parse(text).map_err(note).map_err(|error| self.errors.push(error)).ok()
    }

    /// The text of an annotation, unless it is empty.
    fn text(&self, name: &str) -> Option<&str> {
        self.annotations.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::Kind;

    const S: Duration = Duration::from_secs(1);
    const P: &str = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-";

    fn of(annotations: &[(&str, &str)]) -> (Option<Check>, Vec<(&'static str, String)>, bool) {
        let owned = annotations.iter().map(|(name, value)| {
            let name =
                name.strip_prefix("aws-").map_or_else(|| (*name).to_owned(), |rest| format!("{P}{rest}"));
            (name, (*value).to_owned())
        });
        let mut settings = ServiceSettings::default();
        read(&owned.collect(), &mut settings);
        let errors = settings.annotation_errors.into_iter().map(|error| (error.annotation, error.why));
        (settings.check.map(|check| (*check).clone()), errors.collect(), settings.fail_closed)
    }

    fn timing(annotations: &[(&str, &str)]) -> (u64, u64, u8, u8) {
        let (check, errors, _) = of(annotations);
        assert_eq!(errors, [], "{annotations:?}");
        let Timing { interval, timeout, healthy, unhealthy } = check.unwrap().timing;
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap();
        (milliseconds(interval), milliseconds(timeout), healthy, unhealthy)
    }

    #[test]
    fn service_without_annotations_has_no_check() {
        assert_eq!(of(&[]), (None, vec![], false));
        assert_eq!(of(&[(HEALTH_CHECK, "")]), (None, vec![], false));
        assert_eq!(of(&[(HEALTH_CHECK, "none"), ("aws-interval", "20")]), (None, vec![], false));
    }

    #[test]
    fn annotations_of_this_project_set_the_check() {
        assert_eq!(timing(&[(HEALTH_CHECK, "tcp")]), (10_000, 5_000, 2, 3));
        let all = [
            (HEALTH_CHECK, "http://:8080/healthz"),
            (INTERVAL, "500ms"),
            (TIMEOUT, " 100ms "),
            (HEALTHY_THRESHOLD, "1"),
            (UNHEALTHY_THRESHOLD, "4"),
            (FAIL_CLOSED, "true"),
        ];
        assert_eq!(timing(&all), (500, 100, 1, 4));
        let (check, _, fail_closed) = of(&all);
        assert_eq!((check.unwrap().to_string().as_str(), fail_closed), ("http://:8080/healthz", true));
        assert_eq!(timing(&[(HEALTH_CHECK, "dns"), (INTERVAL, "1m")]), (60_000, 5_000, 2, 3));
        assert_eq!(
            timing(&[(HEALTH_CHECK, "dns"), (INTERVAL, "4")]),
            (4_000, 2_000, 2, 3),
            "a shorter timeout"
        );
    }

    #[test]
    fn annotations_of_aws_mean_the_same() {
        let seeds = [
            ("aws-healthy-threshold", ""),
            ("aws-unhealthy-threshold", "3"),
            ("aws-interval", "20"),
            ("aws-timeout", "5"),
        ];
        assert_eq!(timing(&seeds), (20_000, 5_000, 2, 3));
        assert_eq!(of(&seeds).0.unwrap().kind, Kind::Tcp);
        assert_eq!(timing(&[("aws-interval", "20")]), (20_000, 5_000, 2, 6), "the default of AWS");
        let check = |annotations: &[(&str, &str)]| of(annotations).0.unwrap().to_string();
        assert_eq!(
            check(&[("aws-protocol", "HTTP"), ("aws-path", "/up"), ("aws-port", "81")]),
            "http://:81/up"
        );
        assert_eq!(check(&[("aws-protocol", "https"), ("aws-port", "traffic-port")]), "https:///");
        assert_eq!(check(&[("aws-interval", "20"), (HEALTH_CHECK, "grpc")]), "grpc");
        assert_eq!(
            timing(&[("aws-interval", "20"), (HEALTH_CHECK, "grpc"), (TIMEOUT, "1s")]),
            (20_000, 1_000, 2, 3)
        );
    }

    #[test]
    fn invalid_annotation_is_reported_and_the_others_count() {
        for (annotation, value, why) in [
            (INTERVAL, "50ms", "\"50ms\" is not from 100ms to 3600s"),
            (INTERVAL, "10h", "\"10h\" is not from 100ms to 3600s"),
            (TIMEOUT, "10", "it must be less than the interval, 10s"),
            (HEALTHY_THRESHOLD, "0", "\"0\" is not from 1 to 100"),
            (UNHEALTHY_THRESHOLD, "x", "\"x\" is not from 1 to 100"),
            (FAIL_CLOSED, "yes", "give \"true\" or \"false\""),
            (AWS_INTERVAL, "4", "\"4\" is not from 5s to 300s"),
            (AWS_TIMEOUT, "1", "\"1\" is not from 2s to 60s"),
            (AWS_UNHEALTHY, "11", "\"11\" is not from 2 to 10"),
        ] {
            let (check, errors, _) = of(&[(HEALTH_CHECK, "tcp"), (annotation, value)]);
            assert_eq!(errors, [(annotation, why.to_owned())]);
            let timing = check.unwrap().timing;
            assert_eq!((timing.interval, timing.timeout, timing.healthy), (10 * S, 5 * S, 2), "{annotation}");
        }
        let (check, errors, _) = of(&[(HEALTH_CHECK, "ping"), (INTERVAL, "x")]);
        assert_eq!((check, errors.len(), errors[0].0), (None, 1, HEALTH_CHECK));
    }

    #[test]
    fn path_of_aws_that_no_probe_can_ask_for_is_reported() {
        for path in ["up", "/a b", "/ü", "/\u{1b}[2J", "/a#b", "/<"] {
            let (check, errors, _) = of(&[("aws-protocol", "http"), ("aws-path", path)]);
            assert_eq!(errors.len(), 1, "{path:?}: {errors:?}");
            assert_eq!(errors[0].0, AWS_PATH);
            let shown = check.unwrap().to_string();
            assert!(shown.parse::<Probe>().is_ok(), "{shown}");
        }
    }

    #[test]
    fn annotation_of_aws_that_another_one_overrides_is_reported() {
        let reported = |annotations: &[(&str, &str)]| {
            let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            let mut settings = ServiceSettings::default();
            read(&owned.collect(), &mut settings);
            let why = |ignored: IgnoredAnnotation| (ignored.annotation.to_string(), ignored.why);
            settings.ignored.into_iter().map(why).collect::<Vec<_>>()
        };
        let values = ["tcp", "80", "/up", "20", "5", "3", "4"];
        for ((name, by, why), value) in OVERRIDDEN.into_iter().zip(values) {
            let own = if by == HEALTH_CHECK { "grpc" } else { value };
            assert_eq!(why, format!("{by} overrides it"));
            assert_eq!(reported(&[(name, value)]), [], "{name}");
            let expected = [(name.to_owned(), why)];
            assert_eq!(reported(&[(name, value), (by, own)]), expected);
            assert_eq!(reported(&[(name, " "), (by, own)]), [], "{name}: an empty value asks for nothing");
            let off = [(name.to_owned(), BY_CHECK)];
            assert_eq!(reported(&[(name, value), (HEALTH_CHECK, "none")]), off);
            let invalid = reported(&[(name, value), (by, "?")]);
            assert_eq!(invalid, if by == HEALTH_CHECK { &expected[..] } else { &[] }, "{name}");
        }
    }

    #[test]
    fn timing_without_a_check_is_reported() {
        let (check, errors, _) = of(&[(INTERVAL, "10s")]);
        assert_eq!(
            (check, errors),
            (None, vec![(INTERVAL, format!("it has no effect without {HEALTH_CHECK}"))])
        );
    }

    #[test]
    fn names_have_the_prefix() {
        for name in TIMINGS.into_iter().chain([HEALTH_CHECK, FAIL_CLOSED]) {
            assert!(name.starts_with(super::super::ANNOTATION_PREFIX));
        }
    }
}
