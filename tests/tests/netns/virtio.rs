//! Native XDP on a real driver: virtio network cards with two queues, mergeable buffers and MTU 9000 are the wire
//! between node 1 and the router. The tests run only in guests, which have such cards.

use aya::{
    programs::loaded_programs,
    sys::{Stats, enable_stats},
};
use lb_tests::{
    client::{Connection, ask_udp},
    cluster::{ClientLink, PodLink, Wiring},
    guest,
    netns::Netns,
    skip,
    virtio::{Cards, MTU, PAIRS, Pair},
};
use serde_json::Value;

use crate::lan::{
    CLUSTER_CIDR, EXTERNAL, Expect,
    Frontend::{self, NodePort},
    Lan, Protocol, Seen,
};

const WIRING: Wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: true };
/// Size in bytes of a datagram that fills several receive buffers of a card, and fits into the card's MTU.
const LARGE: usize = 8_500;
/// Size of each transfer in bytes: more than a hundred frames of the MTU.
const TRANSFER: u64 = 1 << 20;

/// A LAN whose node 1 has a virtio card and an agent with `arguments` and native XDP.
fn lan(pair: Pair, arguments: &[&str]) -> (Lan, Cards) {
    let mut lan = Lan::without_agents(WIRING);
    let mut cards = None;
    let connect = |node: (&Netns, &str), router: (&Netns, &str)| {
        cards = Some(pair.connect([node, router])?);
        Ok(())
    };
    lan.cluster.rewire_lan_node(1, connect).unwrap();
    enlarge_frames(&lan);
    lan.start_agent(1, &[arguments, &["--xdp", "native"]].concat());
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    (lan, cards.unwrap())
}

/// Gives all devices between the client and the pods 2 and 3 the MTU of the cards.
fn enlarge_frames(lan: &Lan) {
    let set = |netns: &Netns, devices: &[&str]| {
        let commands: String =
            devices.iter().map(|device| format!("link set {device} mtu {MTU}\n")).collect();
        netns.ip(&commands).unwrap();
    };
    let cluster = &lan.cluster;
    set(&cluster.client, &["eth0"]);
    set(cluster.router.as_ref().unwrap(), &["eth0", "node1", "node2", "lan"]);
    set(&cluster.node1, &["eth0", "pod2"]);
    set(&cluster.node2, &["eth0", "pod3"]);
    for pod in ["pod2", "pod3"] {
        set(lan.netns(pod), &["eth0"]);
    }
}

fn ask(lan: &Lan, arguments: &[&str]) -> Value {
    lan.agents[0].as_ref().unwrap().json(arguments).unwrap()
}

fn counted(lan: &Lan, outcome: &str) -> u64 {
    lan.agents[0].as_ref().unwrap().counted(outcome).unwrap()
}

/// Downloads and uploads over TCP in full-size frames, and sends UDP datagrams from 0 bytes to more than the MTU.
fn transfer(lan: &Lan, frontend: Frontend) {
    for family in [0, 1] {
        let http = frontend.of(2, (Protocol::Tcp, family));
        let mut connection = Connection::open(lan.netns("client"), http).unwrap();
        assert_eq!(connection.download(TRANSFER).unwrap(), "pod3", "{http}");
        assert_eq!(connection.upload(TRANSFER).unwrap().server, "pod3", "{http}");
        let udp = frontend.of(2, (Protocol::Udp, family));
        for bytes in [0, 1_400, LARGE, 20_000] {
            assert_eq!(ask_udp(lan.netns("client"), udp, bytes).unwrap().server, "pod3", "{udp}, {bytes}");
        }
    }
}

fn assert_nothing_was_lost(lan: &Lan) {
    for outcome in ["rewrite_failed", "no_route", "no_backend"] {
        assert_eq!(counted(lan, outcome), 0, "{outcome}");
    }
}

/// Number of runs of a program that the kernel has counted.
fn run_count(id: u64) -> u64 {
    let mut programs = loaded_programs().map(Result::unwrap);
    programs.find(|info| u64::from(info.id()) == id).unwrap().run_count()
}

/// The number of runs of node 1's programs during `traffic`: XDP, and tc at ingress.
fn runs_during(lan: &Lan, traffic: impl FnOnce()) -> [u64; 2] {
    let profile = ask(lan, &["profile", "--seconds", "1"]);
    let programs = profile["programs"].as_array().unwrap();
    let ids = ["xdp_native", "tc_ingress"].map(|name| {
        let program = programs.iter().find(|program| program["program"] == name);
        program.unwrap_or_else(|| panic!("{name} is not among {programs:#?}"))["programId"].as_u64().unwrap()
    });
    let count = || ids.map(run_count);
    let counting = enable_stats(Stats::RunTime).unwrap();
    let before = count();
    traffic();
    let after = count();
    drop(counting);
    [after[0] - before[0], after[1] - before[1]]
}

/// Most frames of routed flows must stay in XDP: it leaves only unusual ones to tc, such as fragments.
#[track_caller]
fn assert_mostly_xdp([xdp, tc]: [u64; 2]) {
    println!("{xdp} runs of XDP, {tc} of tc");
    assert!(xdp > 200 && tc < xdp / 2, "{xdp} runs of XDP, {tc} of tc at ingress");
}

fn mode(lan: &Lan) -> Value {
    let status = ask(lan, &["status"]);
    let devices = status["agent"]["devices"].as_array().unwrap();
    devices.iter().find(|device| device["name"] == "eth0").unwrap()["xdp"].clone()
}

/// Whether the test is skipped: before Linux 6.3 the driver has no native XDP with frames that fill several buffers, so
/// none with this MTU. Panics outside of a guest.
fn skips() -> bool {
    guest::only();
    let old = skip::is_older_than(6, 3);
    if old {
        skip::whole("before Linux 6.3 virtio_net runs native XDP only with an MTU below the page size");
    }
    old
}

#[test]
#[ignore = "only in a guest: `cargo xtask vm` runs it"]
fn native_xdp_on_virtio_masquerades_large_and_partial_frames() {
    if skips() {
        return;
    }
    for pair in PAIRS {
        let (lan, _cards) = lan(pair, &CLUSTER_CIDR);
        assert_eq!(mode(&lan), "native", "{pair:?}");
        lan.check(&["client"], 1, &EXTERNAL, Expect::Answer(&["pod2"], Seen::Node(1)));
        lan.check(&["client"], 2, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Node(1)));
        assert_mostly_xdp(runs_during(&lan, || transfer(&lan, NodePort(1))));
        assert!(counted(&lan, "routed") > 200, "{pair:?}");
        assert_nothing_was_lost(&lan);
    }
}
