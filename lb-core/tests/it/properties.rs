//! Tests of invariants that must hold for any events in any order.

use lb_common::{Address, Backend, ConnectionLimits, Service, ServiceKey, SourceRangeKey, Vip};
use lb_core::{
    capacity::Capacity,
    family::Families,
    model::{self, Change, NodeAddresses, ObjectName, Policy, Protocol, ServicePortName},
    plan::{Contents, ServiceLabels},
    tables::Digest,
};
use proptest::{collection, prelude::*};

use crate::{
    kernel::{Kernel, Node},
    world::{self, World, change},
};

const PLENTY: u32 = 1000;

#[derive(Clone, Debug)]
enum Event {
    Change(Change),
    Zone(Option<&'static str>),
    Addresses(NodeAddresses),
    DetectsInside(Families),
    Sync,
    /// Only this many steps of the plan are applied; the others fail.
    FailAfter(usize),
    EndEpoch,
    Grace,
    Restart,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        10 => change().prop_map(Event::Change),
        1 => world::zone().prop_map(Event::Zone),
        1 => world::addresses().prop_map(Event::Addresses),
        1 => world::families().prop_map(Event::DetectsInside),
        4 => Just(Event::Sync),
        2 => (0..12_usize).prop_map(Event::FailAfter),
        2 => Just(Event::EndEpoch),
        2 => Just(Event::Grace),
        1 => Just(Event::Restart),
    ];
    collection::vec(event, 0..60)
}

/// Plays all events; returns the node, and the objects that exist in the end.
fn live(slots: u32, policy: Policy, events: &[Event]) -> (Node, World) {
    live_on(Node::with_policy(slots, policy), events)
}

fn live_on(mut node: Node, events: &[Event]) -> (Node, World) {
    let mut world = World::default();
    for event in events {
        match event {
            Event::Change(change) => {
                world.apply(change);
                node.reconciler.handle(vec![change.clone()]);
            }
            Event::Zone(zone) => node.set_zone(*zone),
            Event::Addresses(addresses) => node.set_addresses(addresses.clone()),
            Event::DetectsInside(families) => node.set_detects_inside(*families),
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

/// The contents of the maps, as text, of a node like `like` that has received only these changes.
fn dump_of(changes: Vec<Change>, like: &model::Node) -> String {
    let mut node = Node::with_policy(PLENTY, like.policy.clone());
    node.set_zone(like.zone.as_deref());
    node.set_addresses(like.addresses.clone());
    node.set_detects_inside(like.detects_inside);
    node.reconciler.handle(changes);
    node.settle();
    dump(&node)
}

fn dump(node: &Node) -> String {
    node.kernel.dump() + &node.dump_health()
}

/// The frontends that Services claim, but that the maps do not have. Leaves out Services that wait for room.
fn unserved(node: &Node, world: &World) -> Vec<ServiceKey> {
    let claimed = world.claimed(&node.node, |service| !node.waits(service));
    let frontends = &node.kernel.maps.frontends;
    claimed.into_iter().filter(|key| !frontends.contains_key(key)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_history_ends_in_the_state_that_the_objects_describe(policy in world::policy(), events in events()) {
        let (mut node, world) = live(PLENTY, policy, &events);
        node.settle();
        prop_assert_eq!(node.kernel.resolved(), world.expected(&node.node));
        prop_assert_eq!(node.kernel.admitted(), world.admitted(&node.node));
        prop_assert_eq!(&node.kernel.maps.vips, &world.vips(&node.node));
        prop_assert_eq!(dump(&node), dump_of(world.changes(), &node.node), "names, node ports and health checks too");
        node.reconciler.handle(world.removal());
        node.settle();
        let own = World::default().vips(&node.node);
        prop_assert_eq!(node.kernel.read_back(), Contents { vips: own, ..Contents::default() });
    }

    /// All of `changes` arrive together, so that the reconciler plans them in several parts.
    #[test]
    fn a_plan_in_parts_ends_in_the_same_state(
        slots in prop_oneof![2 => Just(PLENTY), 1 => 1..12_u32], policy in world::policy(), before in events(),
        services in 1..4_usize, changes in collection::vec(change(), 0..20), cut in 0..20_usize, restart in any::<bool>(),
    ) {
        let (mut node, mut world) = live(slots, policy, &before);
        node.settle();
        changes.iter().for_each(|change| world.apply(change));
        if restart {
            node.restart();
            node.reconciler.handle(world.changes());
        } else {
            node.reconciler.handle(changes);
        }
        node.sync_parts(services, cut);
        node.sync_parts(services, usize::MAX);
        node.settle();
        if slots == PLENTY {
            prop_assert_eq!(node.kernel.resolved(), world.expected(&node.node));
            prop_assert_eq!(node.kernel.admitted(), world.admitted(&node.node));
            prop_assert_eq!(dump(&node), dump_of(world.changes(), &node.node));
        }
        node.reconciler.handle(world.removal());
        node.sync_parts(services, usize::MAX);
        node.settle();
        let own = World::default().vips(&node.node);
        prop_assert_eq!(node.kernel.read_back(), Contents { vips: own, ..Contents::default() });
    }

    #[test]
    fn any_order_of_events_gives_the_same_maps(
        policy in world::policy(), addresses in world::addresses(),
        changes in collection::vec(change(), 0..20), keys in collection::vec(any::<u32>(), 60),
    ) {
        let mut world = World::default();
        changes.iter().for_each(|change| world.apply(change));
        let mut shuffled: Vec<(u32, Change)> = keys.into_iter().zip(world.changes()).collect();
        shuffled.sort_by_key(|(key, _)| *key);
        let mut node = Node::with_policy(PLENTY, policy);
        node.set_addresses(addresses);
        for (_, change) in shuffled {
            node.reconciler.handle(vec![change]);
            node.sync();
        }
        node.settle();
        prop_assert_eq!(dump(&node), dump_of(world.changes(), &node.node));
    }

    #[test]
    fn full_arena_breaks_no_frontend_and_leaks_nothing(
        slots in 1..12_u32, policy in world::policy(), events in events(),
    ) {
        let (mut node, world) = live(slots, policy, &events);
        node.settle();
        prop_assert_eq!(unserved(&node, &world), Vec::new());
        node.reconciler.handle(world.removal());
        node.settle();
        prop_assert_eq!(node.reconciler.arena().free_slots(), slots);
        prop_assert_eq!(node.reconciler.table_arena().free_slots(), node.reconciler.table_arena().slots());
        prop_assert_eq!(node.reconciler.problems().count(), 0);
    }

    /// The kernel never refuses a step because a map is full: a refused step would block all other Services.
    #[test]
    fn full_maps_are_never_overfilled_and_leak_nothing(
        (frontends, names, source_ranges, limits, vips) in (1..12_u32, 1..6_u32, 1..4_u32, 1..3_u32, 1..8_u32), policy in world::policy(),
        events in events(),
    ) {
        let capacity = Capacity { frontends, names, source_ranges, limits, vips, ..Capacity::of_arenas(PLENTY, PLENTY * 64) };
        let (mut node, world) = live_on(Node::with_capacity(capacity, policy), &events);
        node.settle();
        prop_assert_eq!(unserved(&node, &world), Vec::new());
        node.reconciler.handle(world.removal());
        node.settle();
        prop_assert_eq!(node.reconciler.contents().frontends.len(), 0);
        prop_assert_eq!(node.reconciler.problems().count(), 0);
    }

    #[test]
    fn garbage_in_the_maps_is_replaced(
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
        prop_assert_eq!(dump(&node), dump_of(world.changes(), &node.node));
    }
}

/// Contents of maps with invalid records: they overlap, refer to unwritten or nonexistent slots, or have broken seals
/// or unknown ids.
fn garbage() -> impl Strategy<Value = Contents> {
    let base = prop_oneof![8 => 0..20_u32, 1 => 990..1010_u32, 1 => Just(u32::MAX)];
    let count = prop_oneof![8 => 0..6_u32, 1 => Just(u32::MAX)];
    let slice = (base, count);
    let table = prop_oneof![3 => Just((0, 0)), 1 => slice.clone()];
    let tables = (table.clone(), table);
    let sealed = prop::bool::weighted(0.8);
    let record = (1..4_u8, 80..82_u16, 0..4_u32, slice.clone(), slice, tables, sealed, 0..9_u8, 0..64_u16);
    let frontends = collection::vec(record, 0..8);
    let ranges = collection::btree_set((0..5_u32, 0..3_u8, 8..25_u8), 0..6);
    let vips = collection::btree_map((0..4_u8).prop_map(|last| [10, 96, 0, last].into()), 0..2_u32, 0..3);
    let labels = collection::btree_map(0..5_u32, (0..4_usize, any::<bool>()), 0..5);
    let backends = collection::btree_map(0..24_u32, 1..6_u8, 0..24);
    let tables = collection::btree_map(0..24_u32, collection::vec(70..80_u32, 1..6), 0..6);
    let limits = collection::btree_map(0..5_u32, Just(ConnectionLimits::NONE), 0..3);
    let all = (frontends, labels, backends, tables, ranges, vips, limits);
    all.prop_map(|(frontends, labels, backends, tables, ranges, vips, limits)| Contents {
        limits,
        frontends: frontends
            .into_iter()
            .map(|(last, port, id, outside, inside, tables, sealed, kind, flags)| {
                let key = ServiceKey::new(Address::from_v4([10, 96, 0, last]), port, 6);
                let record = Service {
                    id,
                    backends_base: outside.0,
                    backends_count: outside.1,
                    internal_base: inside.0,
                    internal_count: inside.1,
                    table_base: tables.0.0,
                    table_count: tables.0.1,
                    internal_table_base: tables.1.0,
                    internal_table_count: tables.1.1,
                    kind,
                    scheduler: 0,
                    affinity_seconds: 0,
                    flags,
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
                    Backend {
                        address: Address::from_v4([10, 0, 0, last]),
                        port: 8080,
                        flags: 0,
                        weight: 1,
                        active_flows_slot: u32::from(last % 3),
                    },
                )
            })
            .collect(),
        tables: tables.iter().map(|(base, entries)| (*base, Digest::of(entries))).collect(),
        service_labels: labels.into_iter().map(|(id, (name, tcp))| (id, labels_of(name, tcp))).collect(),
        endpoint_labels: [([10, 0, 0, 200].into(), Default::default())].into(),
        vips: vips.into_iter().map(|(address, flags)| (address, Vip { flags })).collect(),
        source_ranges: ranges
            .into_iter()
            .map(|(id, last, prefix)| SourceRangeKey::new(id, Address::from_v4([10, last, 0, 0]), prefix))
            .collect(),
    })
}

fn labels_of(name: usize, tcp: bool) -> ServiceLabels {
    let service = ObjectName::new("ns", ["a", "b", "c", "gone"][name]);
    let protocol = if tcp { Protocol::Tcp } else { Protocol::Udp };
    ServiceLabels { name: ServicePortName { service, port: "".into(), protocol }, node_port: None }
}
