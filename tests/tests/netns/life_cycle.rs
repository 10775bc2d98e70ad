//! What happens to an agent while there is traffic: none of it may notice.

use std::time::Duration;

use lb_tests::{agent::Agent, wait_for};

use crate::bed::Bed;

/// Backends on both nodes: packets of some are forwarded to the other one.
const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];
/// Until the kernel has verified the programs, while it has other things to do, too.
const VERIFIED: Duration = Duration::from_secs(15);

#[test]
fn a_restart_under_load_costs_nothing() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    assert!(bed.agent.take().unwrap().terminate().unwrap().success());
    traffic.goes_on().unwrap();
    bed.start_agent();
    traffic.goes_on().unwrap();
    traffic.stop().assert_unharmed();
}

/// At some moment, too, in which the next one has only begun.
#[test]
fn a_kill_under_load_costs_nothing() {
    let mut bed = Bed::with_web(&PODS);
    let traffic = bed.traffic();
    bed.agent.take().unwrap().kill().unwrap();
    traffic.goes_on().unwrap();
    let settings = bed.cluster.agent_settings(1);
    let half_started = Agent::spawn(&bed.cluster.node1, settings).unwrap();
    let begun = || (half_started.log().matches("opened the data plane").count() == 2).then_some(());
    wait_for(VERIFIED, begun).unwrap();
    half_started.kill().unwrap();
    traffic.goes_on().unwrap();
    bed.start_agent();
    traffic.goes_on().unwrap();
    traffic.stop().assert_unharmed();
}
