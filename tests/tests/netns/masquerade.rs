//! The client address that backends receive, and source ports of masqueraded connections.

use std::{collections::HashSet, io, net::SocketAddr, thread, time::Duration};

use lb_tests::{
    client::{Connection, ask_http, ask_udp, echo, udp_socket},
    cluster::{ClientLink, PodLink, Wiring},
    wait_for,
};
use nix::sys::signal::Signal;

use crate::lan::{
    CLUSTER_CIDR, EXTERNAL, Expect,
    Frontend::{ClusterIp, LoadBalancer, NodePort},
    Lan, Protocol, Seen, node_addresses,
};

const CLIENTS: [&str; 3] = ["client", "pod1", "pod4"];

/// Asserts that the backend sees the address of node 1 for the [`CLIENTS`] that are in `source`, and the client's own
/// address for the others. pod4's node has no agent, so pod4's packets come over the wire like the external client's.
#[track_caller]
fn assert_masqueraded(lan: &Lan, number: u8, pod: &str, frontends: &[crate::lan::Frontend], source: &[&str]) {
    let (behind, open): (Vec<&str>, Vec<&str>) = CLIENTS.iter().partition(|client| source.contains(*client));
    lan.check(&behind, number, frontends, Expect::Answer(&[pod], Seen::Node(1)));
    lan.check(&open, number, frontends, Expect::Answer(&[pod], Seen::Client));
}

#[test]
fn masquerade_follows_cluster_cidr_masquerade_all_and_traffic_policies() {
    let mut lan =
        Lan::without_agents(Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false });
    let all = ["--masquerade-all"];
    let both = [CLUSTER_CIDR.as_slice(), &all].concat();
    let mut local = lan.service(3, &["pod2"]);
    local.exposure.external_local = true;
    let mut both_local = lan.service(4, &["pod2"]);
    (both_local.exposure.external_local, both_local.exposure.internal_local) = (true, true);
    for service in [lan.service(1, &["pod2"]), lan.service(2, &["pod3"]), local, both_local] {
        lan.cluster.manifests.put(&service).unwrap();
    }
    for (arguments, cluster_ip) in
        [(&[][..], &[][..]), (&CLUSTER_CIDR, &["client"]), (&all, &CLIENTS), (&both, &CLIENTS)]
    {
        lan.start_agent(1, arguments);
        lan.settle();
        // At cluster IPs, traffic policies do not change which clients are masqueraded.
        for number in [1, 3, 4] {
            assert_masqueraded(&lan, number, "pod2", &[ClusterIp], cluster_ip);
        }
        // (Clients that are not masqueraded are left out: the replies of a remote backend to them bypass node 1, unless
        // the client is a local pod.)
        lan.check(cluster_ip, 2, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Node(1)));
        // At other addresses, every client is masqueraded under the policy `Cluster`, and none under `Local`.
        assert_masqueraded(&lan, 1, "pod2", &EXTERNAL, &CLIENTS);
        assert_masqueraded(&lan, 2, "pod3", &EXTERNAL, &CLIENTS);
        for number in [3, 4] {
            assert_masqueraded(&lan, number, "pod2", &EXTERNAL, &[]);
        }
    }
}

#[test]
fn source_port_exhaustion_is_counted_and_recovers() {
    let lan = Lan::with(&["--masquerade-ports", "20000-20003"]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let agent = lan.agents[0].as_ref().unwrap();
    for family in [0, 1] {
        let to = NodePort(1).of(1, (Protocol::Tcp, family));
        let open = || Connection::open(lan.netns("client"), to);
        let mut connections: Vec<_> = (0..4).map(|_| open().unwrap()).collect();
        for connection in &mut connections {
            let seen = connection.ask().unwrap().seen.port();
            assert!((20_000..=20_003).contains(&seen), "{seen}");
        }
        let before = agent.counted("no_source_port").unwrap();
        let fifth = crate::lan::probe_briefly(lan.netns("client"), to, Protocol::Tcp);
        assert_eq!(fifth, crate::lan::Observation::Silent);
        assert!(agent.counted("no_source_port").unwrap() > before);
        // Open connections continue; UDP and the other family have separate ports.
        let udp = NodePort(1).of(1, (Protocol::Udp, family));
        assert_eq!(ask_udp(lan.netns("client"), udp, 8).unwrap().server, "pod3");
        connections.iter_mut().for_each(|connection| assert_eq!(connection.ask().unwrap().server, "pod3"));
        // A closed connection frees its port at once.
        connections.pop();
        assert_eq!(ask_http(lan.netns("client"), to).unwrap().server, "pod3");
    }
}

#[test]
fn source_ports_of_finished_connections_are_reused() {
    // The client opens all connections to one backend, one after the other.
    let lan = Lan::with(&["--masquerade-ports", "20000-20199"]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    for family in [0, 1] {
        let to = NodePort(1).of(1, (Protocol::Tcp, family));
        for n in 0..1_500 {
            let answer = ask_http(lan.netns("client"), to);
            assert!(answer.is_ok(), "connection {n} to {to}: {answer:?}");
        }
    }
}

#[test]
fn concurrent_clients_get_distinct_source_ports() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let to = |family| NodePort(1).of(1, (Protocol::Tcp, family));
    let ask = |source: &str, family| -> io::Result<Vec<SocketAddr>> {
        let mut open = (0..100)
            .map(|_| Connection::open(lan.netns(source), to(family)))
            .collect::<io::Result<Vec<_>>>()?;
        open.iter_mut().map(|connection| Ok(connection.ask()?.seen)).collect()
    };
    let seen: Vec<SocketAddr> = thread::scope(|scope| {
        let all =
            ["client", "client2", "pod1", "pod4"].into_iter().flat_map(|source| [(source, 0), (source, 1)]);
        let ask = &ask;
        let threads: Vec<_> = all.map(|(source, family)| scope.spawn(move || ask(source, family))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert_eq!(seen.len(), 800);
    // The 100 connections of a client in one family are open at the same time. To the backend, all clients have node
    // 1's address.
    let distinct: HashSet<SocketAddr> = seen.iter().copied().collect();
    assert_eq!(distinct.len(), 800, "two connections have the same source: {seen:?}");
    assert!(seen.iter().all(|seen| (10_000..=29_999).contains(&seen.port())), "{seen:?}");
}

/// The client keeps sending, so the flow never expires.
#[test]
fn udp_flow_changes_to_another_masquerade_address_when_its_own_is_removed() {
    for xdp in ["off", "generic"] {
        let lan = Lan::with(&["--xdp", xdp]);
        lan.apply(&[lan.service(1, &["pod3"])]);
        lose_masquerade_address(&lan, || ());
    }
}

/// The agent is stopped while the node has the additional address. The agent reads the node's addresses only after the
/// removal, so it finds the same list as before.
#[test]
fn udp_flow_changes_to_another_masquerade_address_although_no_list_has_shown_its_own() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let agent = lan.agents[0].as_ref().unwrap();
    agent.signal(Signal::SIGSTOP).unwrap();
    lose_masquerade_address(&lan, || agent.signal(Signal::SIGCONT).unwrap());
}

/// Gives node 1 an additional address of each family, opens UDP flows that are masqueraded with these addresses, and
/// removes the addresses again. Then calls `removed`, and asserts that the backend receives later datagrams of these
/// flows from another address of the node.
fn lose_masquerade_address(lan: &Lan, removed: impl FnOnce()) {
    let node = lan.cluster.node(1);
    let route = |source4: &str, source6: &str| {
        node.ip(&format!(
            "route replace 10.244.2.0/24 via 172.18.0.2 {source4}\n\
             route replace fd00:10:244:2::/64 via fd00:172:18::2 {source6}\n"
        ))
    };
    node.ip("address add 172.18.0.77/24 dev eth0\naddress add fd00:172:18::77/64 dev eth0 nodad\n").unwrap();
    route("src 172.18.0.77", "src fd00:172:18::77").unwrap();
    let flows = [0, 1].map(|family| {
        let to = LoadBalancer.of(1, (Protocol::Udp, family));
        let socket = udp_socket(lan.netns("client"), to).unwrap();
        let seen = echo(&socket, b"first").unwrap().seen.ip();
        assert!(["172.18.0.77", "fd00:172:18::77"].contains(&seen.to_string().as_str()), "{seen}");
        (socket, node_addresses(1)[family])
    });
    node.ip("address del 172.18.0.77/24 dev eth0\naddress del fd00:172:18::77/64 dev eth0\n").unwrap();
    route("", "").unwrap();
    removed();
    // Simulates the passage of time: the backend's node asks for the link-layer address again.
    lan.cluster.node(2).ip("neigh flush dev eth0\n").unwrap();
    for (socket, address) in flows {
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let seen = || echo(&socket, b"again").ok().filter(|answer| answer.seen.ip() == address);
        let answer = wait_for(Duration::from_secs(3), seen);
        assert!(answer.is_some(), "no answer that has seen {address}");
    }
}
