//! Tests which Services have timeouts for connections, and whether their frontends have the flag `RESET_UNKNOWN`.

use std::time::Duration;

use lb_common::{Address, Scheduler, conntrack::Tick, service_flags};
use lb_core::{
    capacity::Capacity,
    connection_rules::{Drains, End, Rules},
    model::{Change, ConnectionTimeouts, Endpoint, Hints, ObjectName, Policy, Service, ServiceSettings},
    plan::Contents,
    reconciler::Reconciler,
};

use super::health::{endpoint, name, plan, reconciler, slice};

fn service(idle: Option<Duration>) -> Service {
    let scheduler = Some(Scheduler::Random);
    let timeouts = ConnectionTimeouts { idle, drain: None };
    let settings = ServiceSettings { scheduler, timeouts, ..ServiceSettings::default() };
    Service { settings: Some(settings.into()), ..super::health::service(false) }
}

fn resets(reconciler: &Reconciler) -> bool {
    let record = reconciler.contents().frontends.values().next().expect("a frontend");
    record.flags & service_flags::RESET_UNKNOWN != 0
}

#[test]
fn rules_follow_the_annotations_of_a_service() {
    let minute = Some(Duration::from_mins(1));
    let mut reconciler = reconciler(service(None));
    let mut rules = Rules::new();
    let mut plan = |reconciler: &mut Reconciler| {
        plan(reconciler);
        reconciler.take_rules_changes().into_iter().for_each(|change| change.apply(&mut rules));
        rules.len()
    };
    assert_eq!((plan(&mut reconciler), resets(&reconciler)), (0, false));
    reconciler.handle(vec![Change::Service(name(), Some(service(minute)))]);
    assert_eq!((plan(&mut reconciler), resets(&reconciler)), (1, true));
    reconciler.handle(vec![Change::Service(name(), Some(service(None)))]);
    assert_eq!((plan(&mut reconciler), resets(&reconciler)), (0, false));
    reconciler.handle(vec![Change::Service(name(), Some(service(minute)))]);
    plan(&mut reconciler);
    reconciler.handle(vec![Change::Service(name(), None)]);
    assert_eq!(plan(&mut reconciler), 0, "a deleted Service");
}

/// Hints and traffic policies apply only to new connections.
#[test]
fn connection_to_a_ready_endpoint_that_hints_leave_out_goes_on() {
    let settings = ServiceSettings {
        timeouts: ConnectionTimeouts { idle: None, drain: Some(Duration::ZERO) },
        ..ServiceSettings::default()
    };
    let service = Service { settings: Some(settings.into()), ..super::health::service(false) };
    let hinted = |last: u8, node: &str| {
        let hints = Hints { zones: Vec::new(), nodes: vec![node.into()] };
        Endpoint { hints: Some(hints.into()), ..endpoint(last) }
    };
    let policy = Policy { node_name: "here".into(), ..Policy::default() };
    let mut reconciler = Reconciler::new(Contents::default(), Capacity::of_arenas(100, 1 << 20), policy);
    reconciler.handle(vec![Change::Service(name(), Some(service))]);
    let mut rules = Rules::new();
    let mut end = |endpoints: Vec<Endpoint>| {
        let slice = Change::EndpointSlice(ObjectName::new("default", "web-1"), Some(slice(endpoints)));
        reconciler.handle(vec![slice]);
        plan(&mut reconciler);
        reconciler.take_rules_changes().into_iter().for_each(|change| change.apply(&mut rules));
        let (id, _) = rules.first_key_value().expect("a rule");
        let connection = (*id, (Address::from_v4([10, 1, 0, 2]), 8080));
        Drains::default().end_of(&rules, connection, None, Tick(1000))
    };
    assert_eq!(end(vec![hinted(2, "there")]), None, "no endpoint is meant for this node: all are used");
    assert_eq!(end(vec![hinted(2, "there"), hinted(1, "here")]), None);
    let leaves = Endpoint { ready: false, ..hinted(2, "there") };
    assert_eq!(end(vec![leaves, hinted(1, "here")]), Some(End::Drained));
}
