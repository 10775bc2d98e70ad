//! Tests of slow start: the weights of endpoints that have become usable a short time ago.

use std::time::Duration;

use lb_common::Scheduler;
use lb_core::{
    model::{Change, ObjectName, Service, ServiceSettings},
    reconciler::Reconciler,
};

use super::health::{endpoint, name, plan, reconciler, slice, target};

fn service(scheduler: Scheduler) -> Service {
    let slow_start = Some(Duration::from_secs(20));
    let mut service = super::health::service(false);
    let settings = service.settings.take().expect("its annotations");
    let settings = ServiceSettings { scheduler: Some(scheduler), slow_start, ..(*settings).clone() };
    Service { settings: Some(settings.into()), ..service }
}

fn plan_at(reconciler: &mut Reconciler, seconds: u64) {
    reconciler.set_now(Duration::from_secs(seconds));
    plan(reconciler);
}

fn set_endpoints(reconciler: &mut Reconciler, endpoints: &[u8]) {
    let slice = slice(endpoints.iter().map(|last| endpoint(*last)).collect());
    let name = ObjectName::new("default", "web-1");
    reconciler.handle(vec![Change::EndpointSlice(name, Some(slice))]);
}

/// The last byte of each backend's address, and the backend's weight.
fn weights(reconciler: &Reconciler) -> Vec<(u8, u32)> {
    let contents = reconciler.contents();
    let record = contents.frontends.values().next().expect("a frontend");
    let slots = record.backends_base..record.backends_base + record.backends_count;
    let backends = slots.map(|slot| contents.backends[&slot]);
    backends.map(|backend| (backend.address.v4_bytes()[3], backend.weight)).collect()
}

#[test]
fn share_of_a_new_endpoint_grows_by_the_clock_alone() {
    let mut reconciler = reconciler(service(Scheduler::Random));
    set_endpoints(&mut reconciler, &[1]);
    plan_at(&mut reconciler, 100);
    assert_eq!(weights(&reconciler), [(1, 1)], "the first one");
    set_endpoints(&mut reconciler, &[1, 2]);
    plan_at(&mut reconciler, 101);
    assert_eq!(weights(&reconciler), [(1, 100), (2, 1)]);
    for (seconds, expected) in [(102, 5), (106, 25), (111, 50), (120, 95)] {
        assert!(reconciler.next_step_of_slow_start() <= Some(Duration::from_secs(seconds)));
        plan_at(&mut reconciler, seconds);
        assert_eq!(weights(&reconciler), [(1, 100), (2, expected)], "after {seconds} s");
    }
    plan_at(&mut reconciler, 121);
    assert_eq!((weights(&reconciler), reconciler.next_step_of_slow_start()), (vec![(1, 1), (2, 1)], None));
    reconciler.set_now(Duration::from_secs(200));
    assert!(!reconciler.needs_plan());
}

#[test]
fn endpoint_that_was_unhealthy_warms_again() {
    let mut reconciler = reconciler(service(Scheduler::WeightedLeastConnection));
    set_endpoints(&mut reconciler, &[1, 2]);
    plan_at(&mut reconciler, 0);
    reconciler.set_unhealthy(vec![(target(2), true)]);
    plan_at(&mut reconciler, 10);
    assert_eq!(weights(&reconciler), [(1, 1)]);
    reconciler.set_unhealthy(vec![(target(2), false)]);
    plan_at(&mut reconciler, 30);
    assert_eq!(weights(&reconciler), [(1, 100), (2, 1)]);
}

#[test]
fn removed_annotation_ends_the_slow_start() {
    let mut reconciler = reconciler(service(Scheduler::Random));
    set_endpoints(&mut reconciler, &[1]);
    plan_at(&mut reconciler, 0);
    set_endpoints(&mut reconciler, &[1, 2]);
    plan_at(&mut reconciler, 1);
    reconciler.handle(vec![Change::Service(name(), Some(super::health::service(false)))]);
    plan_at(&mut reconciler, 2);
    assert_eq!((weights(&reconciler), reconciler.next_step_of_slow_start()), (vec![(1, 1), (2, 1)], None));
}

#[test]
fn scheduler_without_support_is_a_condition() {
    for scheduler in [Scheduler::RoundRobin, Scheduler::LeastConnection, Scheduler::Maglev] {
        let mut reconciler = reconciler(service(scheduler));
        set_endpoints(&mut reconciler, &[1]);
        plan_at(&mut reconciler, 0);
        set_endpoints(&mut reconciler, &[1, 2]);
        plan_at(&mut reconciler, 1);
        assert_eq!(weights(&reconciler), [(1, 1), (2, 1)], "{scheduler}");
        let conditions: Vec<String> = reconciler.problems().map(ToString::to_string).collect();
        let why = format!("the scheduler {scheduler} does not support it");
        assert!(conditions.len() == 1 && conditions[0].contains(&why), "{conditions:?}");
    }
}
