//! Tests of `--forwarding direct`: packets of Services bypass the stack. (Other tests can also run in this mode:
//! `LB_AGENT_FORWARDING=direct cargo test -p lb-tests --test netns`.)

use std::{io, net::SocketAddr, thread, time::Duration};

use lb_tests::{
    client::{Connection, PATIENCE, echo, udp_socket},
    cluster::{CLIENT, veth},
    wait_for,
};

use crate::lan::{
    Expect,
    Frontend::{ClusterIp, LoadBalancer, NodePort},
    Lan, Observation, Protocol, Seen, probe,
};

const DIRECT: [&str; 2] = ["--forwarding", "direct"];

/// Number of packets that node 1 has counted under these outcomes.
fn counted(lan: &Lan, names: &[&str]) -> u64 {
    let agent = lan.agents[0].as_ref().unwrap();
    names.iter().map(|name| agent.counted(name).unwrap()).sum()
}

/// Transfers so much data in both directions that nearly all packets belong to the established connection.
fn transfer(lan: &Lan, source: &str, to: SocketAddr) -> io::Result<String> {
    let mut connection = Connection::open(lan.netns(source), to)?;
    connection.download(8 << 20)?;
    connection.upload(8 << 20).map(|answer| answer.server)
}

#[test]
fn direct_forwarding_bypasses_the_stack_in_both_directions() {
    let lan = Lan::with(&DIRECT);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    // Outcomes of packets that pass through the stack. `masqueraded` does not contain `reply`: the programs translate
    // the replies of a masqueraded connection of a local pod a second time at egress, and then count `reply`, even if
    // the replies bypass the stack.
    let (plain, masqueraded) = (&["forward", "reply"][..], &["forward"][..]);
    for (source, number, frontend, through_stack) in [
        ("pod1", 1, ClusterIp, plain),
        ("pod1", 2, ClusterIp, plain),
        ("client", 1, LoadBalancer, masqueraded),
        ("client", 1, NodePort(1), masqueraded),
        ("client", 2, LoadBalancer, plain),
    ] {
        for family in [0, 1] {
            let counts = || [&["direct", "routed"], through_stack].map(|names| counted(&lan, names));
            let before = counts();
            let to = frontend.of(number, (Protocol::Tcp, family));
            transfer(&lan, source, to).unwrap();
            let after = counts();
            let [direct, stack] = [0, 1].map(|way| after[way] - before[way]);
            assert!(
                direct > 100 && direct > 10 * stack,
                "{source} to {to} of service {number}: {direct} packets bypassed the stack, {stack} passed it"
            );
        }
    }
}

/// A masqueraded connection is translated twice, the second time at egress towards the pod.
#[test]
fn direct_forwarding_masquerades_external_clients_of_local_pods() {
    let lan = Lan::with(&DIRECT);
    lan.apply(&[lan.service(1, &["pod1", "pod2"]), lan.service(2, &["pod3"])]);
    for (number, pods) in [(1, &["pod1", "pod2"][..]), (2, &["pod3"])] {
        let expected = Expect::Answer(pods, Seen::Node(1));
        lan.check(&["client", "client2"], number, &[NodePort(1), LoadBalancer], expected);
    }
}

/// Shows a documented limit of `--forwarding direct`.
#[test]
fn direct_forwarding_bypasses_netfilter_forward_rules() {
    const RULES: &str =
        "add table ip t; add chain ip t f { type filter hook forward priority 0; policy drop; }";
    for (arguments, passes) in [(&[][..], false), (&DIRECT[..], true)] {
        let lan = Lan::with(arguments);
        lan.apply(&[lan.service(1, &["pod2"])]);
        let to = ClusterIp.of(1, (Protocol::Tcp, 0));
        // Makes the nodes resolve their neighbours: until then, packets may go through the stack.
        transfer(&lan, "pod1", to).unwrap();
        let node = &lan.cluster.node1;
        assert!(node.command("nft").arg(RULES).status().unwrap().success());
        let verdict = probe(lan.netns("pod1"), to, Protocol::Tcp);
        assert_eq!(matches!(verdict, Observation::Answered(_)), passes, "{arguments:?}: {verdict:?}");
    }
}

/// By default packets of Services pass through PREROUTING and FORWARD with the client's address, so administrators can
/// block clients there, whatever the NIC.
#[test]
fn netfilter_rules_block_external_clients_by_default() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
    let node = &lan.cluster.node1;
    let nft = |rules: &str| assert!(node.command("nft").arg(rules).status().unwrap().success(), "{rules}");
    let is_answered = |client, number, family| {
        let to = LoadBalancer.of(number, (Protocol::Tcp, family));
        matches!(probe(lan.netns(client), to, Protocol::Tcp), Observation::Answered(_))
    };
    let [v4, v6] = CLIENT;
    for hook in ["prerouting priority raw", "forward priority filter"] {
        nft(&format!(
            "add table inet t; add chain inet t c {{ type filter hook {hook}; }}; \
             add rule inet t c ip saddr {v4} drop; add rule inet t c ip6 saddr {v6} drop"
        ));
        for (number, family) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
            let answered = ["client", "client2"].map(|client| is_answered(client, number, family));
            assert_eq!(answered, [false, true], "{hook}, service {number}, family {family}");
        }
        nft("delete table inet t");
    }
    assert!(is_answered("client", 1, 0) && is_answered("client", 2, 1));
}

/// The AWS VPC CNI, and administrators of multi-homed nodes, add routing rules by pod (`ip rule from POD`).
#[test]
fn direct_forwarding_follows_policy_routing_by_pod() {
    let lan = Lan::with(&DIRECT);
    lan.apply(&[lan.service(2, &["pod3"])]);
    for family in [0, 1] {
        let to = ClusterIp.of(2, (Protocol::Tcp, family));
        // Makes the node resolve its neighbours, and the programs cache next hops.
        for pod in ["pod1", "pod2"] {
            transfer(&lan, pod, to).unwrap();
        }
        let pod = lan.cluster.pod("pod1").unwrap().addresses[family];
        let version = if family == 0 { "-4" } else { "-6" };
        let node = &lan.cluster.node1;
        for command in
            ["route add unreachable default table 100".to_owned(), format!("rule add from {pod} lookup 100")]
        {
            let mut ip = node.command("ip");
            assert!(ip.arg(version).args(command.split(' ')).status().unwrap().success(), "ip {command}");
        }
        // Waits until cached next hops are outdated: the programs use a cached next hop for a tick (1.07 s).
        thread::sleep(Duration::from_millis(1_200));
        assert!(transfer(&lan, "pod2", to).is_ok(), "the other pod");
        for _ in 0..5 {
            let verdict = probe(lan.netns("pod1"), to, Protocol::Tcp);
            assert!(
                !matches!(verdict, Observation::Answered(_)),
                "{pod} reaches {to} although its routing table has no route: {verdict:?}"
            );
        }
    }
}

/// The gateway of a reply depends on the pod (`ip rule from POD`), and the main routing table sends packets to the
/// client through another device. About one packet per second goes through the kernel's neighbour table. This packet
/// must also go to the pod's gateway.
#[test]
fn direct_forwarding_sends_every_packet_to_the_gateway_of_the_pod_s_table() {
    let lan = Lan::with(&DIRECT);
    let mut service = lan.service(1, &["pod2"]);
    service.exposure.external_local = true;
    lan.apply(&[service]);
    let (node, router) = (&lan.cluster.node1, lan.cluster.router.as_ref().unwrap());
    veth((node, "eth9"), (router, "eth9")).unwrap();
    let second_wire = |host: u8| {
        format!(
            "address add 192.168.9.{host}/30 dev eth9\naddress add fd00:192:168:9::{host}/64 dev eth9 nodad\n\
             link set eth9 up\n"
        )
    };
    router.ip(&second_wire(2)).unwrap();
    node.ip(&second_wire(1)).unwrap();
    for (family, gateway) in ["192.168.9.2", "fd00:192:168:9::2"].into_iter().enumerate() {
        let pod = lan.cluster.pod("pod2").unwrap().addresses[family];
        let version = if family == 0 { "-4" } else { "-6" };
        for command in [
            format!("route add default via {gateway} dev eth9 table 100"),
            format!("rule add from {pod} lookup 100"),
        ] {
            let mut ip = node.command("ip");
            assert!(ip.arg(version).args(command.split(' ')).status().unwrap().success(), "ip {command}");
        }
        let socket = udp_socket(&lan.cluster.client, LoadBalancer.of(1, (Protocol::Udp, family))).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // The kernel resolves the gateway for the first packet.
        wait_for(PATIENCE, || echo(&socket, b"?").ok()).expect("a reply by the second wire");
        let before = counted(&lan, &["direct"]);
        let lost: Vec<usize> = (0..60)
            .filter(|_| {
                thread::sleep(Duration::from_millis(50));
                echo(&socket, b"?").is_err()
            })
            .collect();
        assert_eq!(lost, [0; 0], "{gateway}");
        assert!(counted(&lan, &["direct"]) - before >= 60, "the packets bypassed the stack");
    }
}
