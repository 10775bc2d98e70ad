//! Compares `lb-agent explain` with the programs: for random packets in random states it must predict the result.
//!
//! `tables` gives `explain` the maps of a testbed, and `world` generates the states and packets.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use lb_agent::explain::{Conclusion, HookPoint, PacketKind, Question, explain};
use lb_common::Outcome;
use lb_datapath::{Globals, Routes};

use self::{tables::TestbedTables, world::World};
use super::{
    clock,
    node_dns::Sockets,
    packets::Packet,
    stage::Family,
    testbed::{Device, Testbed},
    wire::{NARROW, NARROW_MTU, OTHER, WIRE, set_up},
};

mod tables;
mod world;

/// Number of random worlds in one test.
const WORLDS: u64 = 120;

/// The outcomes that `explain` predicts at tc for a packet that arrives on a wire and begins a flow: one outcome for
/// each backend that the flow may get.
pub(crate) fn outcomes_at_tc(bed: &Testbed, packet: &Packet, kind: PacketKind) -> Vec<Outcome> {
    let (tuple, hook, now) = (packet.tuple(), HookPoint::Ingress, clock::tick());
    let question = Question { tuple, knows_port: true, kind, hook, from_node: false, device: WIRE, now };
    let (routes, globals) = (RefCell::new(Routes::open().unwrap()), Globals::default());
    let tables = TestbedTables { bed, routes, device: WIRE, globals };
    let verdict = explain(&tables, &question).unwrap().verdict;
    let Conclusion::Begins { backends } = verdict else { panic!("{packet:?} begins no flow: {verdict:?}") };
    backends.iter().map(|candidate| candidate.outcome).collect()
}

/// The outcomes and steps that the packets of a test have covered.
#[derive(Default)]
struct Coverage {
    pub(super) outcomes: BTreeMap<Outcome, u32>,
    /// Number of packets for which `explain` has predicted one backend out of several.
    pub(super) named: u32,
    /// Numbers of packets: those that XDP processed itself, and those that it left to tc.
    pub(super) xdp: [u32; 2],
    pub(super) steps: BTreeSet<String>,
    /// The kinds of source addresses that the programs gave new flows as `explain` had predicted.
    pub(super) sources: BTreeSet<String>,
}

fn is_emulated() -> bool {
    lb_tests::patience() > 1
}

/// Runs random worlds; returns their coverage.
fn run_worlds(bed: &mut Testbed, wires: bool, globals: Globals, worlds: std::ops::Range<u64>) -> Coverage {
    let mut seen = Coverage::default();
    let _sockets = Sockets::open();
    // On an emulated machine, which is slow, fewer worlds suffice to compare kernels.
    let fewer = if is_emulated() { 11 } else { 1 };
    for seed in worlds.step_by(fewer) {
        let family = Family::BOTH[(seed % 2) as usize];
        let context = format!("explain, seed {seed}, {family:?}, wires {wires}, {globals:?}");
        assert!(bed.start(&context, Device::Ethernet));
        // Under `--forwarding direct`, masqueraded flows are routed if there are wire devices. Half of these worlds
        // have no wire devices, so that the test also covers flows that a second flow masquerades.
        if wires && !(globals.direct && seed % 4 < 2) {
            for (device, mtu) in [(WIRE, 1500), (OTHER, 1500), (NARROW, NARROW_MTU)] {
                bed.add_wire(device, mtu);
            }
        }
        let dice = fastrand::Rng::with_seed(seed);
        let full = seed % 16 == 7;
        let takeover = seed % 8 == 5;
        let dns = !wires && seed % 4 < 2;
        // Backends begin at slot 1, because each backend has the same slot in the map `ACTIVE`, whose slot 0 is unused.
        let (slot, entry) = (1, 0);
        let seen = &mut seen;
        World { bed, dice, family, wires, globals, slot, entry, full, takeover, dns, seen }.run(&context);
    }
    seen
}

#[track_caller]
fn assert_seen(seen: &Coverage, outcomes: &[Outcome]) {
    if is_emulated() {
        return;
    }
    let missing: Vec<_> = outcomes.iter().filter(|outcome| !seen.outcomes.contains_key(outcome)).collect();
    assert!(missing.is_empty(), "no packet had {missing:?}, only {:?}", seen.outcomes);
    assert!(seen.named > 50, "one backend out of several was named only {} times", seen.named);
}

#[test]
fn explain_agrees_with_the_programs() {
    use Outcome::*;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let mut bed = Testbed::new();
    let seen = run_worlds(&mut bed, false, Globals::default(), 0..WORLDS);
    assert_seen(
        &seen,
        &[
            NoService,
            DnsQuery,
            DnsAnswer,
            OtherHook,
            NewFlow,
            Forward,
            Reply,
            Hairpin,
            RejectTcp,
            RejectUdp,
            StrayReset,
            ConntrackFull,
            NoSourcePort,
            TornService,
            Masquerade,
            NoLocalBackend,
            UnknownVip,
            SourceNotAllowed,
            ConnectionLimited,
            NoRoute,
            LeftToEarlier,
        ],
    );
    for source in ["Client", "ClientOnNode", "Vip"] {
        assert!(is_emulated() || seen.sources.contains(source), "only {:?}", seen.sources);
    }
    let steps = [
        "NewConnection",
        "Retransmission",
        "Affinity",
        "Client",
        "Scheduler",
        "DeniedSource",
        "SourceRanges",
        "PortTaken",
        "NodePortTaken",
    ];
    for step in steps {
        assert!(
            is_emulated() || seen.steps.contains(step),
            "no explanation had {step}, only {:?}",
            seen.steps
        );
    }
}

#[test]
fn explain_agrees_with_the_programs_between_wires() {
    use Outcome::*;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    set_up();
    let mut bed = Testbed::new();
    let seen = run_worlds(&mut bed, true, Globals::default(), WORLDS..2 * WORLDS);
    assert!(is_emulated() || seen.sources.contains("Node"), "{:?}", seen.sources);
    assert_seen(
        &seen,
        &[NewFlow, NewRoutedFlow, Routed, NewTunnelledFlow, Tunnelled, Masquerade, SourceNotAllowed],
    );
    assert!(is_emulated() || seen.xdp.iter().all(|times| *times > 100), "XDP: {:?}", seen.xdp);
}

#[test]
fn explain_agrees_with_the_programs_bypassing_the_stack() {
    use Outcome::*;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    set_up();
    let globals = Globals { direct: true, ..Globals::default() };
    let seen = run_worlds(&mut Testbed::with_globals(globals), true, globals, 2 * WORLDS..3 * WORLDS);
    assert_seen(
        &seen,
        &[
            NewDirectFlow,
            Direct,
            NewFlow,
            Forward,
            Reply,
            Hairpin,
            Masquerade,
            NewRoutedFlow,
            Routed,
            NewTunnelledFlow,
            OtherHook,
        ],
    );
    assert!(is_emulated() || seen.steps.contains("BypassesStack"), "only {:?}", seen.steps);
}

#[test]
fn explain_agrees_with_the_programs_about_unanswered_syns() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let globals = Globals { syn_retries: 1, ..Globals::default() };
    let seen = run_worlds(&mut Testbed::with_globals(globals), false, globals, 0..WORLDS);
    assert!(is_emulated() || seen.steps.contains("NextBackend"), "only {:?}", seen.steps);
}
