//! What holds whatever happens, in whatever order.

use lb_common::{Address, Backend, Service, ServiceKey};
use lb_core::{
    model::{Change, ObjectName, Protocol, ServicePortName},
    plan::{Contents, ServiceLabels},
};
use proptest::{collection, prelude::*};

use crate::{
    kernel::{Kernel, Node},
    world::{World, change},
};

const PLENTY: u32 = 1000;

#[derive(Clone, Debug)]
enum Event {
    Change(Change),
    Sync,
    /// Only the first steps of the plan reach the kernel.
    FailAfter(usize),
    EndEpoch,
    Grace,
    Restart,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        10 => change().prop_map(Event::Change),
        4 => Just(Event::Sync),
        2 => (0..12_usize).prop_map(Event::FailAfter),
        2 => Just(Event::EndEpoch),
        2 => Just(Event::Grace),
        1 => Just(Event::Restart),
    ];
    collection::vec(event, 0..60)
}

/// Lets everything happen; the node and the world as it is then.
fn live(slots: u32, events: &[Event]) -> (Node, World) {
    let mut node = Node::new(slots);
    let mut world = World::default();
    for event in events {
        match event {
            Event::Change(change) => {
                world.apply(change);
                node.reconciler.handle(vec![change.clone()]);
            }
            Event::Sync => {
                node.sync();
            }
            Event::FailAfter(steps) => {
                node.sync_some(*steps);
            }
            Event::EndEpoch => node.end_epoch(),
            Event::Grace => node.grace(),
            Event::Restart => {
                node.restart();
                node.reconciler.handle(world.changes());
            }
        }
    }
    (node, world)
}

fn dump_of(changes: Vec<Change>) -> String {
    let mut node = Node::new(PLENTY);
    node.reconciler.handle(changes);
    node.settle();
    node.kernel.dump()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_life_ends_in_the_state_the_objects_describe(events in events()) {
        let (mut node, world) = live(PLENTY, &events);
        node.settle();
        prop_assert_eq!(node.kernel.resolved(), world.expected());
        prop_assert_eq!(node.kernel.dump(), dump_of(world.changes()), "names and node ports too");
        node.reconciler.handle(world.removal());
        node.settle();
        prop_assert_eq!(node.kernel.read_back(), Contents::default());
    }

    #[test]
    fn any_order_of_events_gives_the_same_maps(
        changes in collection::vec(change(), 0..20), keys in collection::vec(any::<u32>(), 60),
    ) {
        let mut world = World::default();
        changes.iter().for_each(|change| world.apply(change));
        let mut shuffled: Vec<(u32, Change)> = keys.into_iter().zip(world.changes()).collect();
        shuffled.sort_by_key(|(key, _)| *key);
        let mut node = Node::new(PLENTY);
        for (_, change) in shuffled {
            node.reconciler.handle(vec![change]);
            node.sync();
        }
        node.settle();
        prop_assert_eq!(node.kernel.dump(), dump_of(world.changes()));
    }

    #[test]
    fn a_full_arena_breaks_no_frontend_and_leaks_nothing(slots in 1..12_u32, events in events()) {
        let (mut node, world) = live(slots, &events);
        node.settle();
        node.reconciler.handle(world.removal());
        node.settle();
        prop_assert_eq!(node.reconciler.arena().free_slots(), slots);
        prop_assert_eq!(node.reconciler.problems().count(), 0);
    }

    #[test]
    fn whatever_garbage_the_kernel_holds_is_replaced(
        garbage in garbage(), changes in collection::vec(change(), 0..20), failures in collection::vec(0..20_usize, 0..3),
    ) {
        let mut world = World::default();
        changes.iter().for_each(|change| world.apply(change));
        let mut kernel = Kernel::default();
        kernel.maps = garbage;
        let mut node = Node::started_on(kernel, PLENTY);
        node.reconciler.handle(world.changes());
        for steps in failures {
            let plan = node.reconciler.plan();
            plan.steps.iter().take(steps).for_each(|step| {
                node.kernel.apply(step);
                node.reconciler.applied(step);
            });
        }
        let plan = node.reconciler.plan();
        plan.steps.iter().for_each(|step| {
            node.kernel.apply(step);
            node.reconciler.applied(step);
        });
        node.settle();
        prop_assert_eq!(node.kernel.dump(), dump_of(world.changes()));
    }
}

/// Records that overlap, refer to slots nobody wrote or that do not exist, with broken seals and unknown ids.
fn garbage() -> impl Strategy<Value = Contents> {
    let base = prop_oneof![8 => 0..20_u32, 1 => 990..1010_u32, 1 => Just(u32::MAX)];
    let count = prop_oneof![8 => 0..6_u32, 1 => Just(u32::MAX)];
    let record = (1..4_u8, 80..82_u16, 0..4_u32, base, count, prop::bool::weighted(0.8), 0..9_u8);
    let frontends = collection::vec(record, 0..8);
    let labels = collection::btree_map(0..5_u32, (0..4_usize, any::<bool>()), 0..5);
    let backends = collection::btree_map(0..24_u32, 1..6_u8, 0..24);
    (frontends, labels, backends).prop_map(|(frontends, labels, backends)| Contents {
        frontends: frontends
            .into_iter()
            .map(|(last, port, id, backends_base, backends_count, sealed, kind)| {
                let key = ServiceKey::new(Address::from_v4([10, 96, 0, last]), port, 6);
                let record = Service {
                    id,
                    backends_base,
                    backends_count,
                    inside_base: 0,
                    inside_count: 0,
                    kind,
                    scheduler: 0,
                    affinity_seconds: 0,
                    flags: 0,
                    seal: 0,
                };
                (key, if sealed { record.sealed(&key) } else { record })
            })
            .collect(),
        backends: backends
            .into_iter()
            .map(|(slot, last)| {
                (
                    slot,
                    Backend { address: Address::from_v4([10, 0, 0, last]), port: 8080, flags: 0, weight: 1 },
                )
            })
            .collect(),
        service_labels: labels.into_iter().map(|(id, (name, tcp))| (id, labels_of(name, tcp))).collect(),
        endpoint_labels: [([10, 0, 0, 200].into(), lb_core::plan::EndpointLabels::default())].into(),
        ..Contents::default()
    })
}

fn labels_of(name: usize, tcp: bool) -> ServiceLabels {
    let service = ObjectName::new("ns", ["a", "b", "c", "gone"][name]);
    let protocol = if tcp { Protocol::Tcp } else { Protocol::Udp };
    ServiceLabels { name: ServicePortName { service, port: "".into(), protocol }, node_port: None }
}
