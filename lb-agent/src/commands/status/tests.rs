use super::{
    text::{addresses_text, node_lines, program_table, some_of},
    *,
};
use crate::{
    commands::output::render,
    daemon::{
        report::{LoadBalancerReport, NodeReport, PoolReport},
        shortage::ShortageReport,
    },
};

#[test]
fn line_names_who_gives_addresses() {
    let pools = vec![PoolReport { name: "a".into(), used: 3, total: 16 }];
    let mut report = LoadBalancerReport { leader: Some("b".into()), is_here: false, pools };
    assert_eq!(addresses_text(&report), "given by the agent of node b");
    report.is_here = true;
    assert_eq!(addresses_text(&report), "given by this agent; pool a: 3 of 16 in use");
}

const NOW: &str = "2026-11-21T03:00:00Z";

fn report() -> Report {
    Report {
        announcements: Vec::new(),
        unannounced: Vec::new(),
        bgp: None,
        pid: 17,
        version: "0.1.0".into(),
        node_name: "a".into(),
        started: "2026-11-20T01:00:00Z".parse().unwrap(),
        synchronised: true,
        healthy: true,
        alive: true,
        healthz: None,
        node_eligible: true,
        last_sync: Some("2026-11-21T02:59:57Z".parse().unwrap()),
        services: 2,
        endpoints: 3,
        pending: 0,
        pending_since: None,
        failures: Vec::new(),
        problems: vec!["a.yaml, document 2 (line 9): bad".into(), "b: no effect".into()],
        advice: vec!["b: no effect".into()],
        devices: vec![DeviceReport { index: 4, name: "eth0".into(), kind: "wire".into(), xdp: None }],
        node: node_report(),
        shortages: vec![ShortageReport {
            of: "CONNTRACK".into(),
            since: "2026-11-21T02:58:58Z".parse().unwrap(),
            refused: 7,
            text: "full: raise it".into(),
        }],
        load_balancers: None,
        dns: None,
        health_checks: Vec::new(),
    }
}

fn node_report() -> NodeReport {
    let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    NodeReport {
        addresses: ips(&["10.244.0.1", "192.0.2.1", "2001:db8::1"]),
        nodeport_addresses: ips(&["127.0.0.1", "192.0.2.1"]),
        primary: ips(&["192.0.2.1", "2001:db8::1"]),
        detect_local: "ClusterCIDR".into(),
        internal_networks: vec!["10.244.0.0/16".into()],
        internal_devices: Vec::new(),
        service_ranges: vec!["10.96.0.0/12".into()],
        drops_unknown_vips: true,
        north_south_mode: "hybrid".into(),
        dsr_encapsulation: "gue".into(),
        dsr_peers: vec!["192.0.2.0/24".into()],
        denied_sources: vec!["203.0.113.0/24".into(), "2001:db8:bad::/48".into()],
        masquerade_first_port: 10_000,
        masquerade_last_port: 29_999,
    }
}

fn status(agent: Agent) -> Status {
    let program = ProgramView {
        device: "eth0".into(),
        kind: Some("wire".into()),
        direction: "ingress",
        layer: "tcx",
        program: "tc_ingress".into(),
        program_id: 70,
    };
    let mut packets = [0; Outcome::COUNT];
    packets[Outcome::Forward as usize] = 12;
    let mut outcomes = outcomes(packets);
    outcomes.retain(|outcome| ["forward", "no_backend"].contains(&outcome.outcome));
    Status {
        agent,
        missing: MissingView { maps: vec![], programs: vec![], hooks: vec![], sockets: vec![] },
        kube_proxy: Vec::new(),
        kube_proxy_errors: vec!["cannot tell: `nft` fails".into()],
        degraded: vec![DegradedView { name: "tcx", detail: "filters instead".into() }],
        folder: "/sys/fs/bpf/lb/v1".into(),
        programs: vec![program],
        socket_programs: vec![SocketProgramView { program: "sock_connect4", program_id: 71, cgroup: 1234 }],
        maps: vec![MapView { name: "SERVICES", entries: 3, capacity: 4 }],
        outcomes,
    }
}

fn page_of(status: &Status) -> String {
    page(status, NOW.parse().unwrap(), false)
}

#[test]
fn page_shows_problems_agent_node_programs_maps_and_outcomes() {
    let agent = Agent { running: true, process: None, silent: None, report: Some(report()) };
    let expected = "\
Shortage   CONNTRACK, for 1m02s, 7 times: full: raise it
Problem    a.yaml, document 2 (line 9): bad
Leftovers  cannot tell: `nft` fails

Agent      running, pid 17, version 0.1.0, node a, up 1d02h
Sync       healthy, last change written 3s ago
Services   2 service ports, 3 backends
Node       10.244.0.1, 192.0.2.1, 2001:db8::1
NodePorts  127.0.0.1, 192.0.2.1
Internal   10.244.0.0/16 (detect-local-mode ClusterCIDR)
Masquerade from 192.0.2.1, 2001:db8::1, ports 10000-29999
External   hybrid (north-south-mode), tunnels gue, from peers 192.0.2.0/24
Denied     external clients from 203.0.113.0/24, 2001:db8:bad::/48
Sockets    served by 1 programs on the cgroup with inode 1234
Advice     b: no effect
Degraded   tcx: filters instead
Pins       /sys/fs/bpf/lb/v1

KIND  DIRECTION  LAYER  PROGRAM     ID  DEVICES
wire  ingress    tcx    tc_ingress  70  eth0

MAP       ENTRIES  CAPACITY  FILL
SERVICES  3        4         75%

OUTCOME  VERDICT  PACKETS
forward  pass     12
1 more outcomes with 0 packets: --all
";
    assert_eq!(page_of(&status(agent)), expected);
}

#[test]
fn page_without_problems_says_so_first() {
    let report = Report { problems: Vec::new(), shortages: Vec::new(), ..report() };
    let agent = Agent { running: true, process: None, silent: None, report: Some(report) };
    let text = page_of(&Status { kube_proxy_errors: Vec::new(), ..status(agent) });
    assert!(text.starts_with("Problems   none\n\nAgent      running, pid 17"), "{text}");
    assert!(text.contains("\nDegraded   tcx: filters instead\n"), "a note is no problem: {text}");
}

#[test]
fn page_never_repeats_a_problem() {
    let ill = Report { healthy: false, failures: vec!["refused".into()], ..report() };
    let agents = [
        Agent { running: true, process: None, silent: None, report: Some(ill) },
        Agent { running: true, process: Some("pid 17".into()), silent: Some("mute".into()), report: None },
        Agent { running: false, process: None, silent: None, report: None },
    ];
    for status in agents.map(status) {
        let text = page_of(&status);
        for Problem { topic, text: problem, .. } in problems(&status, NOW.parse().unwrap()) {
            assert_eq!(text.matches(&problem).count(), 1, "{problem} in {text}");
            let lines = text.lines().filter(|line| line.split_whitespace().next() == Some(topic));
            let is_process = |line: &&str| *line == "Agent      pid 17";
            assert_eq!(lines.filter(|line| !is_process(line)).count(), 1, "{topic} in {text}");
        }
    }
}

#[test]
fn zero_counters_and_empty_maps_are_shown_only_with_all() {
    let agent = Agent { running: false, process: None, silent: None, report: None };
    let mut status = status(agent);
    status.outcomes = outcomes([0; Outcome::COUNT]);
    status.maps.push(MapView { name: "LIMITS", entries: 0, capacity: 4 });
    let text = page_of(&status);
    let hidden = format!("\n\n{} outcomes with 0 packets: --all\n", Outcome::COUNT);
    assert!(text.ends_with(&hidden), "{text}");
    assert!(text.contains("75%\n1 more maps without entries: --all\n"), "{text}");
    let text = page(&status, NOW.parse().unwrap(), true);
    assert!(!text.contains("--all") && text.contains("\nLIMITS "), "{text}");
    assert_eq!(text.lines().filter(|line| line.ends_with(" 0")).count(), Outcome::COUNT, "{text}");
}

#[test]
fn devices_with_the_same_program_share_a_line() {
    let program = |device: &str, direction| ProgramView {
        device: device.to_owned(),
        kind: Some("workload".into()),
        direction,
        layer: "tcx",
        program: "tc".into(),
        program_id: 7,
    };
    let names: Vec<String> = (0..9).map(|number| format!("veth{number}")).collect();
    let mut programs: Vec<ProgramView> = names.iter().map(|name| program(name, "ingress")).collect();
    programs.push(program("veth0", "egress"));
    let expected = "\
KIND      DIRECTION  LAYER  PROGRAM  ID  DEVICES
workload  egress     tcx    tc       7   veth0
workload  ingress    tcx    tc       7   veth0, veth1, veth2, veth3, veth4, veth5 and 3 more
";
    assert_eq!(render(&program_table(&programs, false)), expected);
    assert!(render(&program_table(&programs, true)).contains(&names.join(", ")));
}

#[test]
fn problems_are_sorted_and_say_what_to_do() {
    let status = |report: Option<Report>| {
        status(Agent { running: report.is_some(), process: None, silent: None, report })
    };
    let topics = |status: &Status| -> Vec<&'static str> {
        problems(status, NOW.parse().unwrap()).iter().map(|problem| problem.topic).collect()
    };
    let with_agent = status(Some(report()));
    assert_eq!(topics(&with_agent), ["Shortage", "Problem", "Leftovers", "Advice", "Degraded"]);
    let shortage = &problems(&with_agent, NOW.parse().unwrap())[0];
    assert_eq!(shortage.text, "CONNTRACK, for 1m02s, 7 times: full: raise it");
    assert_eq!(topics(&status(None)), ["Agent", "Leftovers", "Degraded"]);
    let mut lost = status(None);
    lost.missing.maps = vec!["EVENTS"];
    lost.socket_programs.clear();
    assert_eq!(topics(&lost), ["Missing", "Agent", "Leftovers", "Sockets", "Degraded"]);
    let ill = Report { healthy: false, failures: vec!["no".into()], ..report() };
    assert_eq!(topics(&status(Some(ill)))[..3], ["Sync", "Failure", "Shortage"]);
}

#[test]
fn page_shows_why_a_healthy_agent_answers_503() {
    let going = Report { node_eligible: false, ..report() };
    let agent = Agent { running: true, process: None, silent: None, report: Some(going) };
    let text = page_of(&status(agent));
    assert!(text.contains("\nSync       healthy, "), "{text}");
    assert!(text.contains("\nHealthz    the node is being deleted, "), "{text}");
    assert!(text.contains("/healthz answers 503\n"), "{text}");
}

#[test]
fn node_lines_show_addresses_and_settings() {
    let none = NodeReport { detect_local: "none".into(), internal_networks: Vec::new(), ..node_report() };
    assert!(node_lines(&none).contains("\nInternal   none (detect-local-mode none)\n"));
    let devices = NodeReport { internal_devices: vec!["cni0".into(), "veth1".into()], ..none };
    let line = "\nInternal   devices cni0, veth1 (detect-local-mode none)\n";
    assert!(node_lines(&devices).contains(line), "{}", node_lines(&devices));
    let admitting = NodeReport { denied_sources: Vec::new(), ..node_report() };
    assert!(!node_lines(&admitting).contains("Denied"));
    assert_eq!(some_of(&[1, 2, 3, 4, 5, 6, 7, 8]), "1, 2, 3, 4, 5, 6 and 2 more");
    assert_eq!(some_of::<u8>(&[]), "none");
}

#[test]
fn page_without_an_agent_shows_the_kernel() {
    let agent = Agent { running: false, process: None, silent: None, report: None };
    let text = page_of(&status(agent));
    let first = "Agent      not running: the data plane works without it, but follows no changes. Start it\n";
    assert!(text.starts_with(first), "{text}");
    assert!(text.contains("\n\nSockets    served by 1 "), "{text}");
    assert!(text.contains("SERVICES  3 "), "{text}");
}

#[test]
fn page_begins_with_what_is_missing_and_what_to_do() {
    for (running, advice) in [(true, "the agent restores that within 30 s"), (false, "start the agent")] {
        let agent = Agent { running, process: None, silent: None, report: None };
        let missing = MissingView {
            maps: vec!["EVENTS"],
            programs: vec!["tc_egress".into()],
            hooks: vec!["eth0 ingress".into(), "eth0 egress".into()],
            sockets: vec!["sock_connect4"],
        };
        let text = page_of(&Status { missing, ..status(agent) });
        let expected = format!(
            "Missing    pins of maps EVENTS; pins of programs tc_egress; programs on eth0 ingress, eth0 egress; programs on \
             sockets: sock_connect4: {advice}"
        );
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn programs_of_a_removed_cgroup_serve_no_sockets() {
    let program = |cgroup| SocketProgramView { program: "connect4", program_id: 1, cgroup };
    assert!(socket_line(&[program(0)]).starts_with("not served"));
    assert_eq!(
        socket_line(&[program(0), program(1234), program(1234)]),
        "served by 2 programs on the cgroup with inode 1234"
    );
}

#[test]
fn json_has_agent_programs_and_outcomes() {
    let agent = Agent {
        running: true,
        process: Some("pid 17 lb-agent".into()),
        silent: None,
        report: Some(report()),
    };
    let json = serde_json::to_value(status(agent)).unwrap();
    assert_eq!(json["agent"]["running"], true);
    assert_eq!(json["agent"]["lastSync"], "2026-11-21T02:59:57Z");
    assert_eq!(json["agent"]["node"]["primary"], serde_json::json!(["192.0.2.1", "2001:db8::1"]));
    assert_eq!(json["agent"]["node"]["internalNetworks"], serde_json::json!(["10.244.0.0/16"]));
    assert_eq!(json["agent"]["node"]["deniedSources"][0], "203.0.113.0/24");
    assert_eq!(json["programs"][0]["layer"], "tcx");
    assert_eq!(
        json["outcomes"][0],
        serde_json::json!({"outcome": "forward", "verdict": "pass", "packets": 12})
    );
}
