//! XDP forwards packets of external clients to backends on other nodes.

use std::{
    io,
    ops::Deref,
    slice::from_ref,
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{Xdp, XdpMode, xdp::XdpLinkId},
};
use lb_datapath::load_program;
use lb_tests::{
    client::{Connection, PATIENCE, ask_udp},
    cluster::{ClientLink, PodLink, Wiring},
    netns::Netns,
    offload::{self, Offload},
    skip, wait_for,
};

use crate::lan::{
    EVERY, EXTERNAL, Expect,
    Frontend::{self, ExternalIp, LoadBalancer, NodePort},
    Lan, Protocol, Seen, node_addresses,
};

const WIRING: Wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: true };

/// The reason for which a test is skipped.
const NO_FEATURES: &str = "the kernel does not tell the XDP features of devices before Linux 6.3";

/// The router's ends of the nodes' veths.
const PORTS: [&str; 2] = ["node1", "node2"];

/// A LAN whose nodes can send frames by XDP: the router's end of each node's veth also has an XDP program
/// ([`passing_program`]). Dropping this value detaches those programs.
pub(crate) struct Wires {
    lan: Lan,
    ends: Vec<Ebpf>,
}

impl Wires {
    /// The LAN, and the programs that must stay loaded as long as it exists.
    pub(crate) fn lan_and_ends(self) -> (Lan, Vec<Ebpf>) {
        (self.lan, self.ends)
    }
}

impl Deref for Wires {
    type Target = Lan;

    fn deref(&self) -> &Lan {
        &self.lan
    }
}

/// A LAN whose agents run with `--xdp` in this mode. Frames carry complete checksums, and the far ends of the nodes'
/// veths accept frames that XDP sends. Service 1 has a backend on node 1, service 2 one on node 2.
pub(crate) fn wires(mode: &str) -> Wires {
    let lan = Lan::without_agents(WIRING);
    let ends = PORTS.map(|port| passing_program(lan.cluster.router.as_ref().unwrap(), port));
    Wires { lan: with_checksums(lan, mode), ends: ends.into() }
}

/// Starts agents with `--xdp` in this mode and adds services 1 and 2. Before that, makes the router's ends complete all
/// checksums, so that XDP may send every packet of a routed flow.
fn with_checksums(mut lan: Lan, mode: &str) -> Lan {
    let router = lan.cluster.router.as_ref().unwrap();
    for port in PORTS {
        router.run(|| offload::set(port, Offload::TransmitChecksum, false)).unwrap();
    }
    for node in [1, 2] {
        lan.start_agent(node, &["--xdp", mode]);
    }
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    lan
}

/// Attaches an XDP program to a veth, because a veth end with an XDP program accepts all frames that an XDP program
/// sends at the other end. Dropping the result detaches the program.
pub(crate) fn passing_program(netns: &Netns, device: &str) -> Ebpf {
    let mut ebpf = load_passing_program();
    attach(&mut ebpf, netns, device);
    ebpf
}

fn attach(ebpf: &mut Ebpf, netns: &Netns, device: &str) -> XdpLinkId {
    let program = xdp_native(ebpf);
    netns.run(|| program.attach(device, XdpMode::Driver).map_err(io::Error::other)).unwrap()
}

fn xdp_native(ebpf: &mut Ebpf) -> &mut Xdp {
    ebpf.program_mut("xdp_native").unwrap().try_into().unwrap()
}

/// Loads an XDP program that passes every packet: a copy of the agent's, with empty maps.
fn load_passing_program() -> Ebpf {
    let mut loader = EbpfLoader::new();
    for map in [
        "SERVICES",
        "BACKENDS",
        "FLOWS",
        "CONNTRACK",
        "AFFINITY",
        "FRAGMENTS",
        "SOCKET_BACKENDS",
        "SOCKET_VIPS",
    ] {
        loader.map_max_entries(map, 16);
    }
    let mut ebpf = loader.load(lb_datapath::OBJECT).unwrap();
    load_program(ebpf.program_mut("xdp_native").unwrap()).unwrap();
    ebpf
}

fn status(lan: &Lan, node: usize) -> serde_json::Value {
    lan.agents[node - 1].as_ref().unwrap().json(&["status"]).unwrap()
}

fn counted(lan: &Lan, outcome: &str) -> u64 {
    lan.agents[0].as_ref().unwrap().counted(outcome).unwrap()
}

/// XDP mode of a device of node 1, from `status`.
fn mode(lan: &Lan, device: &str) -> serde_json::Value {
    let status = status(lan, 1);
    let devices = status["agent"]["devices"].as_array().unwrap();
    devices.iter().find(|found| found["name"] == device).unwrap()["xdp"].clone()
}

fn transfers(lan: &Lan, frontend: Frontend) {
    for family in [0, 1] {
        let http = frontend.of(2, (Protocol::Tcp, family));
        let mut connection = Connection::open(lan.netns("client"), http).unwrap();
        assert_eq!(connection.download(16 << 20).unwrap(), "pod3", "{http}");
        assert_eq!(connection.upload(16 << 20).unwrap().server, "pod3", "{http}");
        for bytes in [0, 1_400, 8_192, 60_000] {
            let udp = frontend.of(2, (Protocol::Udp, family));
            assert_eq!(ask_udp(lan.netns("client"), udp, bytes).unwrap().server, "pod3", "{udp}, {bytes}");
        }
    }
}

#[test]
fn xdp_forwards_external_clients_to_remote_backends_bypassing_the_stack() {
    for how in ["native", "generic"] {
        let lan = wires(how);
        assert_eq!(mode(&lan, "eth0"), "native", "a veth supports native XDP");
        for (number, pod) in [(1, "pod2"), (2, "pod3")] {
            let frontends = [NodePort(1), LoadBalancer, ExternalIp];
            lan.check(&["client", "client2"], number, &frontends, Expect::Answer(&[pod], Seen::Node(1)));
            lan.check(&["client"], number, &[NodePort(2)], Expect::Answer(&[pod], Seen::Node(2)));
        }
        lan.check(&["pod1"], 2, &[NodePort(1), LoadBalancer], Expect::Answer(&["pod3"], Seen::Node(1)));
        transfers(&lan, NodePort(1));
        transfers(&lan, LoadBalancer);
        let flows = counted(&lan, "new_routed_flow");
        assert!(flows >= 30, "{flows} flows were routed");
        assert!(counted(&lan, "routed") > 20_000);
        assert_eq!((counted(&lan, "no_route"), counted(&lan, "rewrite_failed")), (0, 0));
    }
}

#[test]
fn generic_xdp_forwards_to_remote_backends() {
    // A bridge has no native XDP.
    let lan = Lan::without_agents(WIRING);
    let node = lan.cluster.node(1);
    let (v4, v6) = (node_addresses(1)[0], node_addresses(1)[1]);
    node.ip(&format!(
        "address flush dev eth0\nlink add br0 type bridge\nlink set br0 up\nlink set eth0 master br0\n\
         address add {v4}/24 dev br0\naddress add {v6}/64 dev br0 nodad\n\
         route replace default via 172.18.0.254\nroute replace default via fd00:172:18::fe\n\
         route replace 10.244.2.0/24 via 172.18.0.2\nroute replace fd00:10:244:2::/64 via fd00:172:18::2\n"
    ))
    .unwrap();
    let mut lan = lan;
    lan.start_agent(1, &["--xdp", "generic", "--wire-device", "br0", "--workload-device", "pod*"]);
    lan.start_agent(2, &[]);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    assert_eq!(mode(&lan, "br0"), "generic");
    lan.check(&["client"], 2, &[NodePort(1), LoadBalancer], Expect::Answer(&["pod3"], Seen::Node(1)));
    lan.check(&["client"], 1, &[NodePort(1), LoadBalancer], Expect::Answer(&["pod2"], Seen::Node(1)));
    transfers(&lan, NodePort(1));
    let routed = counted(&lan, "routed");
    assert!(routed > 100, "{routed}: {:#}", status(&lan, 1)["outcomes"]);
}

/// Whether a condition of `status` names `eth0` of node 1.
fn is_named(lan: &Lan) -> bool {
    let conditions = &status(lan, 1)["agent"]["problems"];
    let mut conditions = conditions.as_array().unwrap().iter().filter_map(serde_json::Value::as_str);
    conditions.any(|text| text.contains("veth eth0") && text.contains("XDP program"))
}

/// Waits until the program runs natively on `eth0` of node 1 and no condition names `eth0`; if `native` is false, until
/// it does not run natively and a condition names `eth0`.
#[track_caller]
fn becomes(lan: &Lan, native: bool) {
    let is_so = || (mode(lan, "eth0") == "native") == native && is_named(lan) != native;
    assert!(wait_for(PATIENCE, || is_so().then_some(())).is_some(), "{:#}", status(lan, 1)["agent"]);
}

/// Time from a check of all devices by the agent to the next one, if no event comes earlier: `ROUTINE` in
/// lb-agent/src/daemon/devices.rs.
const ROUTINE: Duration = Duration::from_secs(30);

/// Asserts that the kernel's events make the agent follow the far end of node 1's veth. The test makes each change
/// right after the agent has followed the previous one. Without events, the agent would notice the change only at a
/// routine check, [`ROUTINE`] later. It suffices that the agent follows one attachment and one detachment within
/// [`ROUTINE`]: on a slow machine, a single change may take longer.
fn assert_follows_events(lan: &Lan) {
    let router = lan.cluster.router.as_ref().unwrap();
    let mut end = load_passing_program();
    let mut follows = [false; 2];
    let mut last: Option<Instant> = None;
    for _ in 0..3 {
        let attached = Instant::now();
        let link = attach(&mut end, router, PORTS[0]);
        becomes(lan, true);
        follows[0] |= last.is_some_and(|last| last.elapsed() < ROUTINE);
        let detached = Instant::now();
        xdp_native(&mut end).detach(link).unwrap();
        becomes(lan, false);
        follows[1] |= attached.elapsed() < ROUTINE;
        last = Some(detached);
    }
    assert_eq!(follows, [true; 2], "earlier than a routine check: attached, detached");
}

/// The far end of the veth decides whether frames that XDP sends back arrive there.
#[test]
fn native_xdp_is_not_attached_to_a_veth_that_drops_its_frames() {
    if skip::is_older_than(6, 3) {
        return skip::whole(NO_FEATURES);
    }
    let lan = with_checksums(Lan::without_agents(WIRING), "native");
    let serves = || {
        lan.check(&["client"], 1, &EXTERNAL, Expect::Answer(&["pod2"], Seen::Node(1)));
        lan.check(&["client"], 2, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Node(1)));
    };
    serves();
    assert!(mode(&lan, "eth0").is_null());
    assert!(is_named(&lan), "{:#}", status(&lan, 1)["agent"]);
    let router = lan.cluster.router.as_ref().unwrap();
    let mut connection = Connection::open(lan.netns("client"), NodePort(1).of(2, EVERY[0])).unwrap();
    for _again in 0..2 {
        let ends = PORTS.map(|port| passing_program(router, port));
        becomes(&lan, true);
        serves();
        assert_eq!(connection.download(1 << 20).unwrap(), "pod3");
        drop(ends);
        becomes(&lan, false);
        serves();
        assert_eq!(connection.download(1 << 20).unwrap(), "pod3");
    }
    assert!(counted(&lan, "routed") > 100);
    assert_follows_events(&lan);
}

/// A far end with GRO but without an XDP program does not process frames that XDP sends back (`XDP_TX`).
#[test]
fn native_xdp_sends_no_frames_back_through_a_veth_whose_far_end_has_only_gro() {
    let lan = Lan::without_agents(WIRING);
    for port in PORTS {
        let router = lan.cluster.router.as_ref().unwrap();
        router.run(|| offload::set(port, Offload::Reception, true)).unwrap();
    }
    let lan = with_checksums(lan, "native");
    assert_eq!(mode(&lan, "eth0"), "native");
    lan.check(&["client"], 2, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Node(1)));
    transfers(&lan, NodePort(1));
}

#[test]
fn generic_xdp_serves_a_veth_whose_far_end_has_no_program() {
    if skip::is_older_than(6, 3) {
        return skip::whole(NO_FEATURES);
    }
    let lan = with_checksums(Lan::without_agents(WIRING), "generic");
    assert_eq!(mode(&lan, "eth0"), "generic");
    assert!(!is_named(&lan));
    lan.check(&["client"], 2, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Node(1)));
    transfers(&lan, NodePort(1));
    assert!(counted(&lan, "routed") > 100);
}

#[test]
fn veth_is_served_at_tc_by_default() {
    let lan = Lan::with(&[]);
    assert!(mode(&lan, "eth0").is_null());
}

#[test]
fn connections_survive_xdp_mode_changes() {
    let mut lan = wires("native");
    let open = |lan: &Lan| -> Vec<Connection> {
        let to = |family| NodePort(1).of(2, (Protocol::Tcp, family));
        [0, 1].map(|family| Connection::open(lan.netns("client"), to(family)).unwrap()).into()
    };
    let mut connections = open(&lan);
    for mode in ["off", "native", "generic", "auto"] {
        lan.lan.start_agent(1, &["--xdp", mode]);
        for connection in &mut connections {
            assert_eq!(connection.ask().unwrap().server, "pod3", "--xdp {mode}");
            assert_eq!(connection.download(1 << 20).unwrap(), "pod3", "--xdp {mode}");
        }
        connections.extend(open(&lan));
    }
}

#[test]
fn xdp_flows_survive_backend_edits_and_neighbour_flushes() {
    let lan = wires("native");
    let mut connection =
        Connection::open(lan.netns("client"), NodePort(1).of(2, (Protocol::Tcp, 0))).unwrap();
    assert_eq!(connection.ask().unwrap().server, "pod3");
    lan.apply(&[lan.service(2, &["pod4"])]);
    assert_eq!(connection.ask().unwrap().server, "pod3", "the connection keeps its backend");
    for how in EVERY {
        assert_eq!(lan.server("client", 2, NodePort(1), how), "pod4");
    }
    // The neighbour table is flushed; the programs resolve the next hop again.
    lan.cluster.node(1).ip("neighbour flush dev eth0\n").unwrap();
    thread::sleep(Duration::from_millis(1_200));
    assert_eq!(connection.ask().unwrap().server, "pod3");
    lan.apply(from_ref(&lan.service(2, &["pod3"])));
}
