//! Reads the annotations of a Service. They set how its backends are chosen, checked and reached, and how its
//! connections are limited, ended and logged. The agent reports annotations for load balancers of clouds if they have
//! no effect. This module treats an invalid annotation as unset, and a [`Condition`](crate::plan::Condition) reports
//! it; the other annotations apply.

use std::{
    collections::BTreeMap, fmt::Display, ops::RangeInclusive, str::FromStr, sync::Arc, time::Duration,
};

use crate::{
    api,
    ip::parse_ip,
    model::{AnnotationError, Member, ServiceSettings},
};

use super::{
    aws::{self, Origin},
    values::{boolean, duration, within},
};

/// The annotation that sets the scheduler: a name of [`lb_common::Scheduler`].
pub const SCHEDULER: &str = "lb.dev/scheduler";
/// The annotation that sets the size of the Maglev table: a [`crate::tables::TableSize`].
pub const MAGLEV_TABLE_SIZE: &str = "lb.dev/maglev-table-size";
/// The annotation that sets how packets reach backends on other nodes: a [`crate::north_south::NorthSouthMode`].
pub const NORTH_SOUTH_MODE: &str = "lb.dev/north-south-mode";
/// The annotation that sets weights of endpoints: a JSON object whose keys are the name of a pod, an address,
/// `node:NAME` or `zone:NAME`.
pub const WEIGHTS: &str = "lb.dev/weights";

/// The annotation that sets the duration of the slow start of an endpoint that has become usable, such as `30s`.
pub const SLOW_START: &str = "lb.dev/slow-start";

/// The annotation of AWS that sets whether endpoints of all zones are used: `true` or `false`.
pub(super) const CROSS_ZONE: &str =
    "service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled";
/// The annotation that sets whether the flow log has the connections of the Service: `true` or `false`.
pub const ACCESS_LOG: &str = "service.beta.kubernetes.io/aws-load-balancer-access-log-enabled";
/// The annotation that sets after how many minutes, at the earliest, the flow log has another line about an open
/// connection: 5 or 60.
pub const ACCESS_LOG_INTERVAL: &str = "service.beta.kubernetes.io/aws-load-balancer-access-log-emit-interval";

const SLOW_STARTS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_mins(15);

/// The largest weight, as in IPVS.
const MAX_WEIGHT: u32 = 65_535;

/// The settings from annotations, and the annotations to report; `None` if there are neither.
pub(super) fn read(service: &api::Service, origin: Origin) -> Option<Arc<ServiceSettings>> {
    let (annotations, ignored) = aws::applicable(service, origin)?;
    let annotations = &*annotations;
    let text = |name| annotations.get(name).map(|text| text.trim());
    let mut settings = ServiceSettings { ignored, ..ServiceSettings::default() };
    if let Some(text) = text(SCHEDULER) {
        settings.scheduler = settings.noted(SCHEDULER, text, parsed(text));
    }
    if let Some(text) = text(MAGLEV_TABLE_SIZE) {
        settings.table_size = settings.noted(MAGLEV_TABLE_SIZE, text, parsed(text));
    }
    if let Some(text) = text(NORTH_SOUTH_MODE) {
        settings.north_south = settings.noted(NORTH_SOUTH_MODE, text, parsed(text));
    }
    if let Some(text) = text(WEIGHTS) {
        settings.weights = settings.noted(WEIGHTS, text, weights(text)).unwrap_or_default();
    }
    if let Some(text) = text(SLOW_START) {
        let parsed = within(text, duration(text), &SLOW_STARTS);
        settings.slow_start = settings.noted(SLOW_START, text, parsed);
    }
    if let Some(text) = text(CROSS_ZONE) {
        settings.cross_zone = settings.noted(CROSS_ZONE, text, boolean(text));
    }
    super::connection_ends::read(annotations, &mut settings);
    super::limits::read(annotations, &mut settings);
    super::proxy_protocol::read(annotations, &mut settings);
    super::health::read(annotations, &mut settings);
    let is_sent = settings.proxy_protocol;
    settings.check = settings.check.map(|check| check.with_proxy_header(is_sent));
    settings.ignored.extend(super::clouds::ignored(annotations));
    if let Some(text) = text(ACCESS_LOG) {
        settings.flow_log.logged = settings.noted(ACCESS_LOG, text, boolean(text));
    }
    if let Some(text) = text(ACCESS_LOG_INTERVAL) {
        settings.flow_log.interval = settings.noted(ACCESS_LOG_INTERVAL, text, emit_interval(text));
    }
    (settings != ServiceSettings::default()).then(|| Arc::new(settings))
}

impl ServiceSettings {
    /// The parsed value of an annotation; if it is invalid, records the error and returns `None`.
    pub(super) fn noted<T>(
        &mut self,
        annotation: &'static str,
        value: &str,
        parsed: Result<T, String>,
    ) -> Option<T> {
        let note =
            |why| self.annotation_errors.push(AnnotationError { annotation, value: value.to_owned(), why });
        parsed.map_err(note).ok()
    }
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn emit_interval(text: &str) -> Result<Duration, String> {
    match text {
        "5" => Ok(Duration::from_mins(5)),
        "60" => Ok(Duration::from_mins(60)),
        _ => Err("give 5 or 60 (minutes)".to_owned()),
    }
}

fn weights(text: &str) -> Result<BTreeMap<Member, u32>, String> {
    const FORM: &str = r#"give a JSON object such as {"web-0": 3, "10.1.0.5": 2, "node:a": 1, "zone:b": 0}"#;
    let weights: BTreeMap<String, u32> =
        serde_json::from_str(text).map_err(|error| format!("{error}: {FORM}"))?;
    match weights.iter().find(|(_, weight)| **weight > MAX_WEIGHT) {
        Some((name, weight)) => Err(format!("the weight {weight} of {name:?} is above {MAX_WEIGHT}")),
        None => Ok(weights.into_iter().map(|(name, weight)| (member(&name), weight)).collect()),
    }
}

fn member(name: &str) -> Member {
    if let Some(address) = parse_ip(name) {
        return Member::Address(address);
    }
    match name.split_once(':') {
        Some(("node", node)) => Member::Node(node.into()),
        Some(("zone", zone)) => Member::Zone(zone.into()),
        Some(_) | None => Member::Pod(name.into()),
    }
}

#[cfg(test)]
mod tests {
    use lb_common::Scheduler;

    use super::*;
    use crate::{model::Endpoint, north_south::NorthSouthMode, tables::TableSize};

    fn of(annotations: &[(&str, &str)]) -> Option<Arc<ServiceSettings>> {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let annotations = Some(annotations.collect());
        let spec = api::ServiceSpec { type_: Some("LoadBalancer".to_owned()), ..Default::default() };
        let metadata = api::ObjectMeta { annotations, ..Default::default() };
        read(&api::Service { metadata, spec: Some(spec), status: None }, Origin::Manifests)
    }

    #[test]
    fn foreign_annotations_are_ignored() {
        assert_eq!(read(&api::Service::default(), Origin::Manifests), None);
        assert_eq!(of(&[("kubernetes.io/description", "rr")]), None);
    }

    #[test]
    fn names_have_the_prefix() {
        for name in [SCHEDULER, MAGLEV_TABLE_SIZE, NORTH_SOUTH_MODE, WEIGHTS, SLOW_START] {
            assert!(name.starts_with(super::super::ANNOTATION_PREFIX));
        }
    }

    #[test]
    fn valid_annotations_are_applied() {
        let settings = of(&[
            (SCHEDULER, " mh "),
            (MAGLEV_TABLE_SIZE, "65521"),
            (NORTH_SOUTH_MODE, "hybrid "),
            (WEIGHTS, r#"{"web-0": 3, "10.1.0.5": 2, "fd00::5": 9, "node:a": 5, "zone:b": 0}"#),
        ])
        .unwrap();
        assert_eq!(
            (settings.scheduler, settings.table_size),
            (Some(Scheduler::Maglev), Some(TableSize::ALL[8]))
        );
        assert_eq!(settings.north_south, Some(NorthSouthMode::Hybrid));
        assert_eq!(settings.annotation_errors, []);
        let endpoint = |address: &str, pod: &str, node: &str, zone: &str| Endpoint {
            address: address.parse().unwrap(),
            ready: true,
            serving: true,
            terminating: false,
            node: Some(node.into()),
            zone: Some(zone.into()),
            pod: Some(pod.into()),
            hints: None,
        };
        for (endpoint, weight) in [
            (endpoint("10.1.0.5", "web-0", "a", "b"), 2),
            (endpoint("10.1.0.6", "web-0", "a", "b"), 3),
            (endpoint("10.1.0.6", "web-1", "a", "b"), 5),
            (endpoint("10.1.0.6", "web-1", "c", "b"), 0),
            (endpoint("10.1.0.6", "a", "web-0", "a"), 1),
            (endpoint("fd00::5", "a", "b", "c"), 9),
        ] {
            assert_eq!(settings.weight(&endpoint), weight, "{endpoint:?}");
        }
    }

    #[test]
    fn cross_zone_annotation_is_true_or_false() {
        let of = |text| of(&[(CROSS_ZONE, text)]).unwrap();
        assert_eq!((of("true").cross_zone, of("false").cross_zone), (Some(true), Some(false)));
        assert_eq!(of("false").ignored, []);
        let invalid = of("no");
        assert_eq!(
            (invalid.cross_zone, &*invalid.annotation_errors[0].why),
            (None, "give \"true\" or \"false\"")
        );
    }

    #[test]
    fn slow_start_takes_a_second_to_a_quarter_of_an_hour() {
        let of = |text| of(&[(SLOW_START, text)]).unwrap();
        for (text, seconds) in [("30s", 30), ("1", 1), ("15m", 900)] {
            assert_eq!(of(text).slow_start, Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["0", "999ms", "901s", "1h", ""] {
            let invalid = of(text);
            assert_eq!(invalid.slow_start, None);
            let why = format!("{text:?} is not from 1s to 900s");
            assert_eq!(invalid.annotation_errors[0].why, why);
        }
    }

    #[test]
    fn annotations_about_access_logs_are_read() {
        let policy = |enabled, interval| {
            let settings = of(&[(ACCESS_LOG, enabled), (ACCESS_LOG_INTERVAL, interval)]).unwrap();
            (settings.flow_log.logged, settings.flow_log.interval, settings.annotation_errors.len())
        };
        assert_eq!(policy("true", "60"), (Some(true), Some(Duration::from_mins(60)), 0));
        assert_eq!(policy("false", "5"), (Some(false), Some(Duration::from_mins(5)), 0));
        assert_eq!(policy("yes", "10"), (None, None, 2));
    }

    #[test]
    fn invalid_annotation_is_ignored_alone() {
        let settings =
            of(&[(SCHEDULER, "least"), (MAGLEV_TABLE_SIZE, "16384"), (WEIGHTS, "{\"a\": 1}")]).unwrap();
        assert_eq!((settings.scheduler, settings.table_size), (None, None));
        assert_eq!(settings.weights.len(), 1);
        let said: Vec<_> =
            settings.annotation_errors.iter().map(|mistake| (mistake.annotation, &*mistake.value)).collect();
        assert_eq!(said, [(SCHEDULER, "least"), (MAGLEV_TABLE_SIZE, "16384")]);
        assert_eq!(settings.annotation_errors[0].why, "give one of random rr wrr lc wlc sed nq sh dh mh");
        let settings = of(&[(NORTH_SOUTH_MODE, "direct")]).unwrap();
        assert_eq!(settings.north_south, None);
        assert_eq!(settings.annotation_errors[0].why, "give one of snat dsr hybrid");
        for bad in ["", "web-0=3", "{\"web-0\": -1}", "{\"web-0\": 65536}", "[1]", "{\"a\": 1.5}"] {
            let settings = of(&[(WEIGHTS, bad)]).unwrap();
            assert!(settings.weights.is_empty() && settings.annotation_errors.len() == 1, "{bad}");
        }
    }
}
