//! Tests that the work for one change does not grow with the number of Services. (`examples/scale.rs` measures the
//! time.)

use lb_core::model::{
    Change, Endpoint, EndpointPort, EndpointSlice, ObjectName, Protocol, Service, ServicePort,
};
use lb_core::plan::Step;
use lb_core::{capacity::Capacity, reconciler::Reconciler};

fn changes(services: u32, endpoints: u32) -> Vec<Change> {
    (0..services).flat_map(|n| [service(n), slice(n, endpoints, 0)]).collect()
}

fn name(n: u32) -> ObjectName {
    ObjectName::new(&format!("ns-{}", n % 50), &format!("service-{n}"))
}

fn service(n: u32) -> Change {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: None };
    let ip = std::net::Ipv4Addr::from(0x0a60_0000 + n + 1);
    Change::Service(
        name(n),
        Some(Service { cluster_ips: vec![ip.into()], ports: vec![port], ..Service::default() }),
    )
}

fn slice(n: u32, endpoints: u32, moved: u32) -> Change {
    let endpoint = |i: u32| Endpoint {
        hints: None,
        address: std::net::Ipv4Addr::from(0x0b00_0000 + n * endpoints + i + if i == 0 { moved } else { 0 })
            .into(),
        ready: true,
        serving: true,
        terminating: false,
        node: Some(format!("node-{}", i % 100).into()),
        zone: Some("zone-a".into()),
        pod: Some(format!("service-{n}-{i}-abcde").into()),
    };
    let ports = vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }];
    let slice = EndpointSlice { service: name(n), ports, endpoints: (0..endpoints).map(endpoint).collect() };
    Change::EndpointSlice(name(n), Some(slice))
}

#[test]
fn one_changed_endpoint_among_many_services_costs_five_steps() {
    let mut reconciler =
        Reconciler::new(Default::default(), Capacity::of_arenas(1 << 16, 0), Default::default());
    reconciler.handle(changes(2000, 5));
    let plan = reconciler.plan();
    assert_eq!(plan.problems, []);
    assert_eq!(
        plan.steps.len(),
        2000 * 4 + 10_000,
        "name, backends, frontend, virtual address; and each endpoint"
    );
    plan.steps.iter().for_each(|step| reconciler.applied(step));
    reconciler.handle(vec![slice(7, 5, 1 << 20)]);
    let plan = reconciler.plan();
    let backends = |step: &Step| matches!(step, Step::WriteBackends { backends, .. } if backends.len() == 5);
    assert_eq!(plan.steps.len(), 5);
    assert_eq!(plan.steps.iter().filter(|step| backends(step)).count(), 1);
}

/// For a plan of very many Services, the reconciler does not keep the Services' ports in memory: it computes the ports
/// once for the claims of all Services, and again for the steps of each Service.
#[test]
fn very_many_services_in_one_plan_are_planned_as_in_several() {
    const SERVICES: u32 = 5000;
    let mut all = changes(SERVICES, 2);
    // The last Service also claims the address of the first one.
    let Change::Service(of_first, first) = service(0) else { unreachable!() };
    let Change::Service(of_last, _) = service(SERVICES - 1) else { unreachable!() };
    all.push(Change::Service(of_last.clone(), first));
    let run = |parts: usize| {
        let capacity = Capacity::of_arenas(1 << 16, 0);
        let mut reconciler = Reconciler::new(Default::default(), capacity, Default::default());
        for part in all.chunks(all.len() / parts + 1) {
            reconciler.handle(part.to_vec());
            reconciler.plan().steps.iter().for_each(|step| reconciler.applied(step));
        }
        assert!(!reconciler.needs_plan());
        reconciler
    };
    let (mut whole, parts) = (run(1), run(10));
    let sizes = |of: &Reconciler| {
        let contents = of.contents();
        (
            contents.frontends.len(),
            contents.backends.len(),
            contents.endpoint_labels.len(),
            contents.vips.len(),
        )
    };
    assert_eq!(sizes(&whole), sizes(&parts));
    assert!(whole.problems().eq(parts.problems()) && whole.problems().count() == 1, "{of_first} {of_last}");
    let before = whole.contents().clone();
    whole.compact();
    assert_eq!(*whole.contents(), before);
    whole.handle(vec![slice(7, 2, 1 << 20)]);
    assert_eq!(whole.plan().steps.len(), 5);
}
