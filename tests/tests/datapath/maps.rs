//! Tests of what `apply` writes to the maps, and of what `contents` reads from them.

use std::time::Instant;

use bytemuck::Zeroable as _;
use lb_common::{Service, service_flags};
use lb_core::{plan::Step, tables::Digest};
use lb_datapath::{Datapath, Options, grace};

use super::{
    contents::{backend, endpoint, key, service, service_labels, steps},
    cost::cpu_time,
    sandbox::Sandbox,
};

/// Maximum CPU time of `apply`, as a multiple of the CPU time of writing all entries one by one. (The measured multiple
/// was about 0.8, with and without optimisation.)
const COST_LIMIT: u32 = 10;

#[test]
fn applied_steps_are_read_back() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let (steps, mut contents) = steps(50, 3);
        datapath.maps().apply(&steps).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "batches: {batches}");

        contents.frontends.remove(&key(7));
        contents.service_labels.remove(&7);
        contents.endpoint_labels.remove(&endpoint(21));
        let base = contents.frontends[&key(8)].backends_base;
        contents.backends.retain(|slot, _| !(base - 6..base).contains(slot));
        let deletions = [
            Step::DeleteFrontend(key(7)),
            Step::DeleteFrontend(key(600)),
            Step::DeleteFrontend(key(601)),
            Step::ReleaseBackends { base: base - 6, count: 3 },
            Step::DeleteServiceLabels(7),
            Step::DeleteEndpointLabels(endpoint(21)),
        ];
        datapath.maps().apply(&deletions).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "batches: {batches}");
        datapath.maps().apply(&deletions).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "a deleted entry may be deleted again");
    }
}

#[test]
fn lookup_tables_are_read_back() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let tables: [Vec<u32>; 2] = [(0..251).collect(), vec![7, u32::MAX]];
        let record = Service { id: 1, table_base: 10, table_count: 251, ..Service::zeroed() };
        let internal = Service { internal_table_base: 500, internal_table_count: 2, ..record };
        let internal = Service { flags: service_flags::SHORT_CIRCUIT, ..internal };
        let steps = [
            Step::WriteTable { base: 10, entries: tables[0].clone() },
            Step::WriteTable { base: 500, entries: tables[1].clone() },
            Step::PutFrontend(key(1), Box::new(record.sealed(&key(1)))),
            Step::PutFrontend(key(2), Box::new(internal.sealed(&key(2)))),
            Step::ReleaseTable { base: 900, count: 9 },
        ];
        datapath.maps().apply(&steps).unwrap();
        let wanted = [(10, Digest::of(&tables[0])), (500, Digest::of(&tables[1]))];
        assert_eq!(datapath.maps().contents().unwrap().tables, wanted.into(), "batches: {batches}");
        let beyond = Step::WriteTable { base: 4095, entries: vec![1, 2] };
        let error = datapath.maps().apply(&[beyond]).unwrap_err();
        assert!(error.to_string().contains("a table of 2 entries at slot 4095"), "{error}");
    }
}

#[test]
fn apply_error_counts_the_steps_already_in_the_kernel() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let slots = datapath.maps().room().backends;
        let steps = [
            Step::PutServiceLabels(1, Box::new(service_labels(1))),
            Step::WriteBackends { base: 0, backends: vec![backend(1)] },
            Step::WriteBackends { base: slots - 1, backends: vec![backend(2), backend(3)] },
            Step::PutFrontend(key(1), Box::new(service(1, 0, 1))),
        ];
        let error = datapath.maps().apply(&steps).unwrap_err();
        assert_eq!(error.applied, 2, "batches: {batches}");
        assert!(error.to_string().contains("2 backends at slot"), "{error}");
        let contents = datapath.maps().contents().unwrap();
        assert!(contents.frontends.is_empty(), "no step after the failed one is applied");

        let many: Vec<Step> =
            (1..=2000).map(|id| Step::PutFrontend(key(id), Box::new(service(id, 0, 1)))).collect();
        let error = datapath.maps().apply(&many).unwrap_err();
        assert_eq!(datapath.maps().contents().unwrap().frontends.len(), error.applied, "batches: {batches}");
        assert!(error.to_string().contains("the map is full"), "{error}");
    }
}

/// The limit is a multiple of the CPU time of writing all entries one by one, because a slow machine takes longer for
/// both.
#[test]
fn ten_thousand_services_cost_little_cpu_time() {
    let sandbox = Sandbox::new();
    let datapath = Datapath::open(&Options::new(sandbox.bpffs())).unwrap();
    let (steps, contents) = steps(10_000, 5);
    let ((), applied) = cpu_time(|| datapath.maps().apply(&steps).unwrap());
    let (read, reading) = cpu_time(|| datapath.maps().contents().unwrap());
    assert!(read == contents);

    let entries = contents.backends.len()
        + contents.frontends.len()
        + contents.service_labels.len()
        + contents.endpoint_labels.len();
    let mut map = aya::maps::HashMap::<_, [u8; 20], [u8; 48]>::create(1, 0).unwrap();
    let ((), reference) = cpu_time(|| (0..entries).for_each(|_| map.insert([0; 20], [0; 48], 0).unwrap()));
    println!("{entries} entries: written in {applied:?}, read in {reading:?}, one by one {reference:?}");
    assert!(applied < reference * COST_LIMIT, "{applied:?}, but {reference:?} for {entries} single updates");
}

#[test]
fn grace_period_ends() {
    let _sandbox = Sandbox::new();
    let start = Instant::now();
    grace::wait().unwrap();
    println!("grace period: {:?}", start.elapsed());
}
