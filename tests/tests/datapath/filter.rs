//! Tests how restarts of the agent affect the filter, which saves programs lookups ([`lb_common::filter`]).

use std::os::fd::AsFd as _;

use aya::maps::MapData;
use lb_common::protocol;
use lb_datapath::{FilterFill, FilterMemory};

use super::{
    flows::{NOW, flow, insert},
    sandbox::Sandbox,
};

/// Programs of another build may mark the same entries in another way, so the filter that the last agent left may lack
/// marks. The next agent therefore turns the filter off until it has marked all entries itself.
#[test]
fn entries_without_marks_of_an_earlier_build_get_them_before_the_filter_is_on() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    let conntrack = datapath.conntrack();
    insert(&conntrack, &flow(protocol::TCP, 1, NOW));
    conntrack.filter().rebuild().unwrap();
    let marks = conntrack.filter().fill().bits;
    assert!(marks > 0 && conntrack.filter().is_on());
    let map = MapData::from_pin(sandbox.pin("FILTER")).unwrap();
    let memory = FilterMemory::map(map.fd().as_fd()).unwrap();
    for copy in [0, 1] {
        memory.zero(copy);
    }
    drop((conntrack, datapath));

    let datapath = sandbox.open();
    let conntrack = datapath.conntrack();
    assert!(!conntrack.filter().is_on(), "the programs look up every packet");
    assert!(conntrack.filter().rebuild_if_due(FilterFill::EMPTY).unwrap().is_some());
    assert_eq!((conntrack.filter().fill().bits, conntrack.filter().is_on()), (marks, true));
}
