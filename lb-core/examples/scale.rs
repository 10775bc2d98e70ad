//! Measures the time and memory that the control plane needs for many Services, without a kernel:
//! `cargo run --release -p lb-core --example scale -- [services] [endpoints of each]`.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use lb_core::{
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, ObjectName, Policy, Protocol, Service, ServicePort,
    },
    plan::{Contents, Step},
    {capacity::Capacity, reconciler::Reconciler},
};

const SLOTS: u32 = 1 << 22;
const ROUNDS: u32 = 1000;
const BATCH: usize = 1 << 15;

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let (services, endpoints) = (arguments.next().unwrap_or(10_000), arguments.next().unwrap_or(5));
    let changes = (0..services).flat_map(|n| [service(n), slice(n, endpoints, 0)]).collect();
    let mut reconciler =
        Reconciler::new(Contents::default(), Capacity::of_arenas(SLOTS, 0), Policy::default());
    let start = Instant::now();
    reconciler.handle(changes);
    let handled = start.elapsed();
    let steps = synchronise(&mut reconciler);
    println!(
        "{services} services of {endpoints} endpoints: store {handled:.1?}, {steps} steps planned and applied {:.1?}",
        start.elapsed()
    );
    println!("resident {} MB, at most {} MB", resident_kb("VmRSS:") / 1024, resident_kb("VmHWM:") / 1024);
    let mut times: Vec<Duration> =
        (1..=ROUNDS).map(|round| one_change(&mut reconciler, round, services, endpoints)).collect();
    times.sort();
    println!(
        "one changed endpoint: median {:.1?}, slowest of {ROUNDS} {:.1?}",
        times[times.len() / 2],
        times[times.len() - 1]
    );
    let start = Instant::now();
    let mut again =
        Reconciler::new(reconciler.contents().clone(), Capacity::of_arenas(SLOTS, 0), Policy::default());
    again.set_complete();
    let adopted = start.elapsed();
    let steps = again.plan().steps.len();
    println!(
        "adopted {adopted:.1?}; removing everything takes {steps} steps, planned {:.1?}",
        start.elapsed() - adopted
    );
}

/// Plans the Services part by part, and applies each part batch by batch, as the agent does. Returns the number of
/// steps.
fn synchronise(reconciler: &mut Reconciler) -> usize {
    let mut count = 0;
    loop {
        let plan = reconciler.plan_part(Reconciler::PART);
        assert!(plan.problems.is_empty());
        count += plan.steps.len();
        let mut steps = plan.steps.into_iter();
        loop {
            let batch: Vec<Step> = steps.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                break;
            }
            batch.iter().for_each(|step| reconciler.applied(step));
        }
        if !reconciler.is_partial() {
            break;
        }
        reconciler.compact_if_grown();
    }
    if count > BATCH {
        reconciler.compact();
    }
    if let Some(epoch) = reconciler.end_epoch() {
        reconciler.grace_elapsed(epoch);
    }
    count
}

fn one_change(reconciler: &mut Reconciler, round: u32, services: u32, endpoints: u32) -> Duration {
    let changed = slice(round % services, endpoints, round << 20);
    let start = Instant::now();
    reconciler.handle(vec![changed]);
    synchronise(reconciler);
    start.elapsed()
}

fn resident_kb(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn name(n: u32) -> ObjectName {
    ObjectName::new(&format!("namespace-{}", n % 50), &format!("service-{n}"))
}

fn service(n: u32) -> Change {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: None };
    let cluster_ips = vec![Ipv4Addr::from(0x0a60_0000 + n + 1).into()];
    Change::Service(name(n), Some(Service { cluster_ips, ports: vec![port], ..Service::default() }))
}

/// The EndpointSlice of Service number `n`, whose first endpoint's address depends on `moved`.
fn slice(n: u32, endpoints: u32, moved: u32) -> Change {
    let endpoint = |i: u32| Endpoint {
        hints: None,
        address: Ipv4Addr::from((0x0b00_0000 + n * endpoints + i) ^ if i == 0 { moved } else { 0 }).into(),
        ready: true,
        serving: true,
        terminating: false,
        node: Some(format!("node-{}", i % 100).into()),
        zone: Some("zone-a".into()),
        pod: Some(format!("service-{n}-7d4b9c8f6d-{i:05}").into()),
    };
    let ports = vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }];
    let endpoints = (0..endpoints).map(endpoint).collect();
    Change::EndpointSlice(name(n), Some(EndpointSlice { service: name(n), ports, endpoints }))
}
