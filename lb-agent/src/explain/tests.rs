//! Tests of what the packet tests do not cover: system calls, and the texts of steps.

use std::{collections::BTreeMap, net::IpAddr};

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Affinity, Backend, ConnectionLimits, ConnectionRate, DeviceInfo, DnsIntercept, FrontendKind,
    Network, Networks, Outcome, Scheduler, Service, ServiceClient, ServiceKey, Settings, Vip, backend_flags,
    conntrack::{Flow, Tick, Tuple, flow_flags, seen},
    device_flags,
    handover::OVER,
    protocol, service_flags, vip_flags,
};

use super::*;
use lb_datapath::{DatapathError, Globals, Route};

/// Fake tables with one service, `default/web`.
struct Shelf {
    service: Option<(ServiceKey, Service)>,
    backends: Vec<Backend>,
    flows: BTreeMap<Tuple, Flow>,
    settings: Settings,
    source_allowed: bool,
    affinity: Option<Affinity>,
    limits: Option<ConnectionLimits>,
    buckets: BTreeMap<ServiceClient, u64>,
    dns: Option<(ServiceKey, DnsIntercept)>,
    /// Flags of every device; `None` if `DEVICES` has no entry.
    device_flags: Option<u32>,
    /// The MAC address of every device in `DEVICES`.
    mac: [u8; 6],
    /// The route to every address.
    route: Option<Route>,
    globals: Globals,
}

const NOW_NANOS: u64 = 1_000_000_000_000;

impl Tables for Shelf {
    fn flow(&self, tuple: &Tuple) -> Result<Option<Flow>, DatapathError> {
        Ok(self.flows.get(tuple).copied())
    }

    fn free_conntrack_entries(&self) -> Result<usize, DatapathError> {
        Ok(100)
    }

    fn service(&self, key: &ServiceKey) -> Result<Option<Service>, DatapathError> {
        Ok(self.service.filter(|(of, _)| of == key).map(|(_, service)| service))
    }

    fn backends(&self, base: u32, count: u32) -> Result<Vec<Backend>, DatapathError> {
        Ok(self.backends.iter().skip(base as usize).take(count as usize).copied().collect())
    }

    fn table_entries(&self, _: u32, _: u32) -> Result<Vec<u32>, DatapathError> {
        Ok(Vec::new())
    }

    fn active_flows(&self, _: u32) -> i64 {
        0
    }

    fn affinity(&self, _: &ServiceClient) -> Result<Option<Affinity>, DatapathError> {
        Ok(self.affinity)
    }

    fn vip(&self, _: &Address) -> Result<Option<Vip>, DatapathError> {
        Ok(Some(Vip { flags: vip_flags::CLUSTER_IP }))
    }

    fn is_in_source_range(&self, _: u32, client: &Address) -> Result<bool, DatapathError> {
        Ok(self.source_allowed && *client == self.settings.source_v4)
    }

    fn is_node(&self, _: &Address) -> Result<bool, DatapathError> {
        Ok(false)
    }

    fn limits(&self, _: u32) -> Result<Option<ConnectionLimits>, DatapathError> {
        Ok(self.limits)
    }

    fn limit_bucket(&self, key: &ServiceClient) -> Result<Option<u64>, DatapathError> {
        Ok(self.buckets.get(key).copied())
    }

    fn dns_intercept(&self, key: &ServiceKey) -> Result<Option<DnsIntercept>, DatapathError> {
        Ok(self.dns.filter(|(of, _)| of == key).map(|(_, entry)| entry))
    }

    fn nanos(&self) -> u64 {
        NOW_NANOS
    }

    fn is_internal_device(&self, _: u32) -> Result<bool, DatapathError> {
        Ok(false)
    }

    fn device(&self, _: u32) -> Result<Option<DeviceInfo>, DatapathError> {
        Ok(self.device_flags.map(|flags| DeviceInfo { flags, mac: self.mac, ..DeviceInfo::UNKNOWN }))
    }

    fn settings(&self) -> Result<Settings, DatapathError> {
        Ok(self.settings)
    }

    fn handover(&self) -> Result<u32, DatapathError> {
        Ok(OVER)
    }

    fn globals(&self) -> Globals {
        self.globals
    }

    fn route(&self, _: &Address) -> Result<Option<Route>, DatapathError> {
        Ok(self.route)
    }

    fn device_name(&self, _: u32) -> Option<String> {
        None
    }

    fn service_name(&self, _: u32) -> Result<Option<String>, DatapathError> {
        Ok(Some("default/web:http".to_owned()))
    }

    fn pod_name(&self, _: &Address) -> Result<Option<String>, DatapathError> {
        Ok(Some("web-0".to_owned()))
    }
}

const NODE: [u8; 4] = [192, 0, 2, 254];
const VIP: [u8; 4] = [10, 96, 0, 10];

fn v4(octets: [u8; 4]) -> Address {
    Address::from_v4(octets)
}

fn shelf(flags: u16, backends: u8) -> Shelf {
    let key = ServiceKey::new(v4(VIP), 80, protocol::TCP);
    let backend =
        |last| Backend { address: v4([10, 1, 0, last]), port: 8080, weight: 1, ..Backend::zeroed() };
    let service = Service {
        id: 7,
        backends_count: backends.into(),
        affinity_seconds: 10_800,
        flags,
        scheduler: Scheduler::Random as u8,
        kind: FrontendKind::ClusterIp as u8,
        ..Service::zeroed()
    };
    Shelf {
        service: Some((key, service.sealed(&key))),
        backends: (1..=backends).map(backend).collect(),
        limits: None,
        buckets: BTreeMap::new(),
        dns: None,
        device_flags: None,
        mac: [0; 6],
        route: None,
        globals: Globals::default(),
        flows: BTreeMap::new(),
        settings: Settings {
            ports: 1,
            source_v4: v4(NODE),
            service_ranges: Networks::new([Network::new(v4([10, 96, 0, 0]), 12)]),
            ..Settings::zeroed()
        },
        source_allowed: true,
        affinity: None,
    }
}

fn question(hook: HookPoint, port: u16) -> Question {
    let tuple = Tuple::new(v4([192, 0, 2, 1]), v4(VIP), 40_000, port, protocol::TCP);
    Question {
        tuple,
        knows_port: true,
        kind: PacketKind::Syn,
        hook,
        from_node: false,
        device: 0,
        now: Tick(1000),
    }
}

fn said(shelf: &Shelf, question: &Question) -> Vec<String> {
    let explanation = explain(shelf, question).unwrap();
    let steps = explanation.steps.iter().map(step_in_words);
    steps.chain(verdict_in_words(&explanation.verdict, question)).collect()
}

#[test]
fn texts_of_a_new_connection() {
    let mut shelf = shelf(0, 2);
    let affinity = Affinity { address: v4([10, 1, 0, 2]), port: 8080, zeros: 0, last_used: Tick(900) };
    shelf.affinity = Some(affinity);
    assert_eq!(
        said(&shelf, &question(HookPoint::Ingress, 80)),
        [
            "conntrack: no entry for these addresses and ports",
            "frontend: 10.96.0.10:80/tcp is default/web:http (ClusterIP), scheduler random, affinity ClientIP 10800 s, \
             2 backends",
            "affinity: the client is pinned to 10.1.0.2:8080 for 10693 s more",
            "masquerade: no, the backend sees the client's own address",
            "sent to 10.1.0.2:8080 (web-0) (new_flow)",
        ]
    );
    shelf.affinity = None;
    let text = said(&shelf, &question(HookPoint::Ingress, 80));
    assert_eq!(
        text[2..4],
        ["affinity: no entry for this client", "scheduler: random picks one of 2 backends: at random"]
    );
    assert_eq!(text[5], "sent to one of 2 backends:");
}

#[test]
fn texts_of_an_established_connection() {
    let mut shelf = shelf(0, 2);
    let question = Question { kind: PacketKind::Data, ..question(HookPoint::Ingress, 80) };
    let to = Tuple { destination: v4([10, 1, 0, 1]), destination_port: 8080, ..question.tuple };
    let reply = Flow::new(&to.reversed(), &question.tuple.reversed(), 7, flow_flags::reverse(0), Tick(990));
    shelf.flows.insert(question.tuple, Flow::new(&question.tuple, &to, 7, 0, Tick(990)));
    shelf.flows.insert(to.reversed(), reply);
    assert_eq!(
        said(&shelf, &question),
        [
            "conntrack: entry for packets from a client of default/web:http, opening, expires in 50 s if idle: \
             sent on as 192.0.2.1:40000 -> 10.1.0.1:8080",
            "translated to 192.0.2.1:40000 -> 10.1.0.1:8080 (forward)",
        ]
    );
    let answer = Question { tuple: to.reversed(), hook: HookPoint::Ingress, ..question };
    assert_eq!(said(&shelf, &answer)[2], "left untouched (other_hook)");
    let answer = Question { hook: HookPoint::Egress, ..answer };
    assert_eq!(said(&shelf, &answer)[1], "translated to 10.96.0.10:80 -> 192.0.2.1:40000 (reply)");
}

const ROUTE: Route = Route { device: 2, source: None, mtu: 1500, neighbour: true };

/// The outcome of the packet, which begins a flow with the only backend.
fn outcome_of_begun(shelf: &Shelf, question: &Question) -> Outcome {
    let verdict = explain(shelf, question).unwrap().verdict;
    let Conclusion::Begins { backends } = verdict else { panic!("{verdict:?}") };
    backends[0].outcome
}

#[test]
fn caught_packets_to_other_nodes_need_the_ports_of_the_settings() {
    let mut shelf = shelf(0, 1);
    let source = Some(IpAddr::from([192, 0, 2, 254]));
    (shelf.device_flags, shelf.route) = (Some(device_flags::CATCH), Some(Route { source, ..ROUTE }));
    let question = question(HookPoint::Ingress, 80);
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::Caught);
    shelf.settings.ports = 0;
    let explanation = explain(&shelf, &question).unwrap();
    assert_eq!(explanation.verdict, Conclusion::Dropped { outcome: Outcome::NoSourcePort });
}

#[test]
fn packets_from_devices_without_link_layer_take_the_stack() {
    let mut shelf = shelf(0, 1);
    (shelf.globals.direct, shelf.route) = (true, Some(ROUTE));
    let question = question(HookPoint::Ingress, 80);
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::NewDirectFlow);
    (shelf.device_flags, shelf.mac) = (Some(0), [2, 0, 0, 0, 0, 1]);
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::NewDirectFlow);
    shelf.mac = [0; 6];
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::NewFlow);
}

/// XDP creates the flow, cannot send the frame, and tc finds the flow.
#[test]
fn first_packet_of_a_flow_that_xdp_cannot_send_counts_as_one_of_an_existing_flow() {
    let mut shelf = shelf(service_flags::MASQUERADE_EXTERNAL, 1);
    (shelf.device_flags, shelf.route) = (Some(device_flags::WIRE), Some(Route { neighbour: false, ..ROUTE }));
    let question = question(HookPoint::Xdp, 80);
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::Routed);
    let at_tc = Question { hook: HookPoint::Ingress, ..question };
    assert_eq!(outcome_of_begun(&shelf, &at_tc), Outcome::NewRoutedFlow);
    // XDP leaves flows to an address of the node to tc, so it creates none here, and the packet begins the flow at tc.
    shelf.backends[0].flags = backend_flags::HOST;
    assert_eq!(outcome_of_begun(&shelf, &question), Outcome::NewFlow);
}

#[test]
fn system_call_to_an_unlisted_port_is_refused_whatever_the_segment() {
    let question = Question { kind: PacketKind::Rst, ..question(HookPoint::Socket, 81) };
    let explanation = explain(&shelf(0, 1), &question).unwrap();
    assert_eq!(explanation.verdict, Conclusion::Rejected { outcome: Outcome::RejectTcp });
}

/// The flow table has the entry of a caught connection that has ended. The program at egress leaves the SYN of the next
/// connection to the program at ingress, which the packet passes when it enters the node again.
#[test]
fn egress_leaves_the_syn_after_a_caught_connection_to_ingress() {
    let mut shelf = shelf(0, 1);
    let question = Question { from_node: true, ..question(HookPoint::Egress, 80) };
    let to =
        Tuple { source: v4(VIP), destination: v4([10, 1, 0, 1]), destination_port: 8080, ..question.tuple };
    let mut forward = Flow::new(&question.tuple, &to, 7, flow_flags::CAUGHT, Tick(990));
    forward.seen = seen::PACKET | seen::SYN | seen::ACK | seen::RST;
    let flags = flow_flags::reverse(flow_flags::CAUGHT);
    let reply = Flow::new(&to.reversed(), &question.tuple.reversed(), 7, flags, Tick(990));
    shelf.flows.extend([(question.tuple, forward), (to.reversed(), reply)]);
    let explanation = explain(&shelf, &question).unwrap();
    assert_eq!(explanation.verdict, Conclusion::Untouched { outcome: Outcome::NoService });
    assert_eq!(explanation.steps.last(), Some(&TraceStep::BeginsAtIngress));
}

/// Packets at the catch device enter the node again, so no connection of the node begins there.
#[test]
fn connection_of_the_node_gets_another_port_except_at_the_catch_device() {
    let mut shelf = shelf(0, 1);
    let question = Question { from_node: true, ..question(HookPoint::Egress, 80) };
    let answers = question.tuple.reversed();
    let of_pod = Tuple { destination: v4([10, 1, 0, 9]), ..answers };
    shelf.flows.insert(answers, Flow::new(&answers, &of_pod, 7, flow_flags::REPLY, Tick(990)));
    for (flags, begins) in [(device_flags::WIRE, true), (device_flags::CATCH, false)] {
        shelf.device_flags = Some(flags);
        let verdict = explain(&shelf, &question).unwrap().verdict;
        assert_eq!(matches!(verdict, Conclusion::Begins { .. }), begins, "{verdict:?}");
    }
}

/// The node forwards a packet (for example of a masqueraded flow) whose tuple is that of a connection of the node.
#[test]
fn forwarded_packet_with_the_tuple_of_a_connection_of_the_node_is_of_another_flow() {
    let mut shelf = shelf(0, 1);
    let question = question(HookPoint::Egress, 80);
    let to = Tuple { source_port: 10_017, ..question.tuple };
    let of_node = Flow::new(&question.tuple, &to, 0, flow_flags::AT_EGRESS, Tick(990));
    shelf.flows.insert(question.tuple, of_node);
    for (from_node, is_of_other_flow) in [(false, true), (true, false)] {
        let explanation = explain(&shelf, &Question { from_node, ..question }).unwrap();
        assert_eq!(explanation.steps.contains(&TraceStep::OfOtherFlow), is_of_other_flow, "{explanation:?}");
    }
}

/// `connect(2)` of a UDP socket does not fail, because `getaddrinfo(3)` connects UDP sockets to find out source
/// addresses.
#[test]
fn udp_sockets_connect_where_no_service_has_the_port() {
    let mut shelf = shelf(0, 1);
    let (key, service) = shelf.service.unwrap();
    let key = ServiceKey::new(key.address, key.port, protocol::UDP);
    shelf.service = Some((key, service.sealed(&key)));
    let udp = |port| {
        let question = question(HookPoint::Socket, port);
        Question { tuple: Tuple { protocol: protocol::UDP, ..question.tuple }, ..question }
    };
    let connects = "socket: connect(2) of a UDP socket succeeds; the verdict is about sendto(2)";
    let text = said(&shelf, &udp(81));
    assert!(text.contains(&connects.to_owned()), "{text:?}");
    assert_eq!(text.last().unwrap(), "the call fails with ECONNREFUSED (reject_udp)");
    let text = said(&shelf, &udp(80));
    assert!(!text.contains(&connects.to_owned()), "{text:?}");
    assert_eq!(text.last().unwrap(), "sent to 10.1.0.1:8080 (web-0) (new_flow)");
}

#[test]
fn node_local_dns_is_explained() {
    let mut shelf = shelf(0, 1);
    let vip = ServiceKey::new(v4(VIP), 53, protocol::TCP);
    let server = DnsIntercept::to_server(v4(NODE), 9053, NOW_NANOS + 1);
    (shelf.dns, shelf.device_flags) = (Some((vip, server)), Some(device_flags::WORKLOAD));
    let text = said(&shelf, &question(HookPoint::Ingress, 53));
    assert_eq!(text[1], "node-local DNS: the agent answers pods of this node at 192.0.2.254:9053");
    assert_eq!(text[2], "translated to 192.0.2.1:40000 -> 192.0.2.254:9053 (dns_query)");
    shelf.dns = Some((vip, DnsIntercept { until: NOW_NANOS, ..server }));
    let text = said(&shelf, &question(HookPoint::Ingress, 53));
    let expected = "node-local DNS: the agent at 192.0.2.254:9053 does not answer now, so the endpoints of the Service do";
    assert_eq!(text[1], expected);
    let key = ServiceKey::new(v4(NODE), 9053, protocol::TCP);
    shelf.dns = Some((key, DnsIntercept::to_client(v4(VIP))));
    let tuple = Tuple::new(v4(NODE), v4([192, 0, 2, 1]), 9053, 40_000, protocol::TCP);
    let answer = Question { tuple, ..question(HookPoint::Egress, 53) };
    assert_eq!(said(&shelf, &answer)[1], "translated to 10.96.0.10:53 -> 192.0.2.1:40000 (dns_answer)");
}

#[test]
fn limits_on_new_connections_are_explained() {
    let mut shelf = shelf(service_flags::LIMITED, 1);
    let rate = |connections, seconds| ConnectionRate { connections, seconds };
    shelf.limits = Some(ConnectionLimits { service: rate(60, 60), client: rate(2, 1) });
    let syn = question(HookPoint::Ingress, 80);
    // XDP leaves a SYN to a Service with limits to tc, so both hooks give the same answer.
    let limits = |shelf: &Shelf| {
        let [at_tc, at_xdp] =
            [HookPoint::Ingress, HookPoint::Xdp].map(|hook| said(shelf, &question(hook, 80)));
        assert_eq!(at_tc, at_xdp[1..], "{at_xdp:?}");
        at_tc.into_iter().filter(|line| line.starts_with("limit:")).collect::<Vec<_>>()
    };
    let of_client = "limit: 2/s new connections of each client, on this node: ";
    let of_all = "limit: 60/m new connections of all clients together, on this node: ";
    assert_eq!(limits(&shelf), [format!("{of_client}2 may begin now"), format!("{of_all}60 may begin now")]);
    let all = ServiceClient { client: Address::from_v6([0; 16]), service: 7 };
    shelf.buckets.insert(all, NOW_NANOS + 60_000_000_000);
    assert_eq!(
        limits(&shelf),
        [format!("{of_client}2 may begin now"), format!("{of_all}none may begin now: dropped")]
    );
    assert_eq!(said(&shelf, &syn).pop().unwrap(), "dropped (connection_limited)");
    let client = ServiceClient { client: syn.tuple.source, service: 7 };
    shelf.buckets.insert(client, NOW_NANOS + 1_000_000_000);
    assert_eq!(limits(&shelf), [format!("{of_client}none may begin now: dropped")]);
}

#[test]
fn system_calls_fail_where_packets_are_rejected_or_dropped() {
    let last = |shelf: &Shelf, port| said(shelf, &question(HookPoint::Socket, port)).pop().unwrap();
    assert_eq!(last(&shelf(0, 0), 80), "the call fails with ECONNREFUSED (reject_tcp)");
    assert_eq!(last(&shelf(0, 1), 81), "the call fails with ECONNREFUSED (reject_tcp)");
    let local = shelf(service_flags::DROP_WITHOUT_BACKENDS, 0);
    assert_eq!(last(&local, 80), "the call fails with EHOSTUNREACH (no_local_backend)");
    let mut ranges = shelf(service_flags::SOURCE_RANGES, 1);
    assert_eq!(
        last(&ranges, 80),
        "sent to 10.1.0.1:8080 (web-0) (new_flow)",
        "the node's address is the client"
    );
    ranges.source_allowed = false;
    assert_eq!(last(&ranges, 80), "the call fails with EHOSTUNREACH (source_not_allowed)");
}

#[test]
fn sockets_only_frontends_serve_no_packets() {
    let shelf = shelf(service_flags::SOCKETS_ONLY, 1);
    assert_eq!(explain(&shelf, &question(HookPoint::Socket, 80)).unwrap().steps.len(), 3);
    let packet = explain(&shelf, &question(HookPoint::Ingress, 80)).unwrap();
    assert!(
        packet.steps.contains(&TraceStep::SocketsOnly)
            && packet.verdict == Conclusion::Rejected { outcome: Outcome::RejectTcp }
    );
}

#[test]
fn packet_without_a_source_port_begins_a_connection() {
    let question = Question { knows_port: false, ..question(HookPoint::Ingress, 80) };
    assert_eq!(explain(&shelf(0, 1), &question).unwrap().steps[0], TraceStep::NoPort);
}

#[test]
fn json_names_of_steps_and_verdict() {
    let explanation = explain(&shelf(0, 1), &question(HookPoint::Ingress, 80)).unwrap();
    let steps = serde_json::to_value(&explanation.steps).unwrap();
    assert_eq!(steps[0], serde_json::json!({ "step": "noFlow" }));
    assert_eq!(steps[1]["scheduler"], "random");
    let verdict = serde_json::to_value(&explanation.verdict).unwrap();
    assert_eq!(verdict["verdict"], "begins");
    assert_eq!(verdict["backends"][0]["outcome"], "new_flow");
}

/// Scripts match these names, so they must stay when a variant is renamed.
#[test]
fn json_names_survive_renamed_variants() {
    let name = |step: TraceStep| serde_json::to_value(step).unwrap()["step"].clone();
    for (step, json) in [
        (TraceStep::NewConnection { why: Stale::Over }, "newConnection"),
        (TraceStep::NotSyn, "notSyn"),
        (TraceStep::LeftToEarlier, "leftToEarlier"),
        (TraceStep::StraySynAck, "straySynAck"),
        (TraceStep::NextBackend, "nextBackend"),
        (TraceStep::BypassesStack { device: "eth0".into() }, "bypassesStack"),
    ] {
        assert_eq!(name(step), json);
    }
    assert_eq!(serde_json::to_value(Method::Turn).unwrap(), "turn");
}
