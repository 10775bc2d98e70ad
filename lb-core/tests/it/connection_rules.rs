//! Tests which Services have timeouts for connections, and whether their frontends have the flag `RESET_UNKNOWN`.

use std::time::Duration;

use lb_common::{Scheduler, service_flags};
use lb_core::{
    connection_rules::Rules,
    model::{Change, ConnectionTimeouts, Service, ServiceSettings},
    reconciler::Reconciler,
};

use super::health::{name, plan, reconciler};

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
