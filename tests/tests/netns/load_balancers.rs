//! Load balancer and external IPs: which addresses are served, and to which clients.

use std::net::SocketAddr;

use lb_tests::{
    client::{Connection, ask_http},
    cluster::{ClientLink, PodLink, Wiring},
    manifests::{Exposure, Type},
    server,
};

use crate::{
    bed::RANGES,
    lan::{
        CLUSTER_CIDR, Expect, FRONTENDS,
        Frontend::{ClusterIp, ExternalIp, LoadBalancer, NodePort},
        Lan, Protocol, Seen, external, node_addresses,
    },
};

const FROM_NODE1: Expect<'_> = Expect::Answer(&["pod3"], Seen::Node(1));

#[test]
fn service_is_served_only_at_the_addresses_of_its_type() {
    let lan = Lan::with(&[]);
    // A Service without node ports and external IPs: it has only cluster IPs and load balancer addresses.
    let mut bare = lan.service(1, &["pod3"]);
    bare.ports.iter_mut().for_each(|port| port.node_port = None);
    bare.exposure.without_node_ports = true;
    bare.exposure.external_ips.clear();
    // External IPs do not depend on the type of the Service.
    let mut external_only = lan.service(2, &["pod3"]);
    external_only.ports.iter_mut().for_each(|port| port.node_port = None);
    external_only.exposure = Exposure { external_ips: external(102).to_vec(), ..Exposure::default() };
    // A Service with `ipMode: Proxy`: packets to its load balancer address go to the load balancer, even those from
    // pods.
    let mut proxied = lan.service(3, &["pod3"]);
    proxied.exposure.proxied = true;
    lan.apply(&[bare, external_only, proxied]);

    lan.check(&["client", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
    lan.check(&["client"], 1, &[NodePort(1), NodePort(2)], Expect::Refused);
    lan.check(&["client", "pod1"], 2, &[ExternalIp], FROM_NODE1);
    lan.check(&["client", "pod1"], 3, &[NodePort(1), ExternalIp], FROM_NODE1);
    let proxy = lan.netns("client2").clone();
    for (family, address) in external(3).into_iter().enumerate() {
        let length = if family == 0 { 32 } else { 128 };
        proxy.ip(&format!("address add {address}/{length} dev lo\n")).unwrap();
        let via = lb_tests::cluster::OTHER_CLIENT[family];
        let route = format!("route add {address}/{length} via {via}\n");
        lan.cluster.router.as_ref().unwrap().ip(&route).unwrap();
    }
    let _proxy = server::http(&proxy, "proxy", 80).unwrap();
    for source in ["client", "pod1"] {
        for family in [0, 1] {
            let answer = ask_http(lan.netns(source), LoadBalancer.of(3, (Protocol::Tcp, family))).unwrap();
            assert_eq!((answer.server.as_str(), answer.seen), ("proxy", answer.local), "{source}");
        }
    }
}

#[test]
fn source_ranges_filter_only_clients_of_load_balancer_addresses() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let ranged = |ranges: &[&str]| {
        let mut service = lan.service(1, &["pod3"]);
        service.exposure.source_ranges = ranges.iter().map(ToString::to_string).collect();
        service
    };
    // White space around a range is ignored.
    lan.apply(&[ranged(&[" 198.51.100.0/24 ", "fd00:198:51:100::/64"])]);
    lan.check(&["client"], 1, &[LoadBalancer], FROM_NODE1);
    // Packets of other clients, including pods, are dropped silently.
    lan.check(&["client2", "pod1"], 1, &[LoadBalancer], Expect::Silence);
    // The ranges apply to no other kind of address.
    lan.check(&["client2"], 1, &[NodePort(1), ExternalIp], FROM_NODE1);
    lan.check(&["pod1"], 1, &[NodePort(1), ExternalIp], FROM_NODE1);
    lan.check(&["pod1"], 1, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Client));

    // The ranges change: to other networks, then to all clients.
    lan.apply(&[ranged(&["203.0.113.2/32", "fd00:203:0:113::2/128", "10.244.1.0/24", "fd00:10:244:1::/64"])]);
    lan.check(&["client2", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
    lan.check(&["client"], 1, &[LoadBalancer], Expect::Silence);
    lan.apply(&[ranged(&["0.0.0.0/0", "::/0"])]);
    lan.check(&["client", "client2", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
    // The ranges are checked before the endpoints.
    let mut without_endpoints = ranged(&["198.51.100.0/24", "fd00:198:51:100::/64"]);
    without_endpoints.endpoints.clear();
    lan.apply(&[without_endpoints]);
    lan.check(&["client"], 1, &[LoadBalancer], Expect::Refused);
    lan.check(&["client2"], 1, &[LoadBalancer], Expect::Silence);
    lan.apply(&[ranged(&[])]);
    lan.check(&["client", "client2", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
}

/// The pool has one address of each family: the two load balancer addresses to which `lan.check` sends requests for
/// service 1.
#[test]
fn load_balancer_gets_its_address_from_a_pool_and_keeps_it_over_a_restart() {
    let mut lan = Lan::with(&[]);
    let without_address = |number| {
        let mut service = lan.service(number, &["pod3"]);
        service.exposure.load_balancer_ips.clear();
        service
    };
    let services = [without_address(1), without_address(2)];
    let [v4, v6] = external(1);
    let pool = format!(
        "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {{name: lan, namespace: metallb-system}}\n\
         spec: {{addresses: [{v4}/32, '{v6}-{v6}']}}\n"
    );
    lan.apply(&services[..1]);
    lan.cluster.manifests.write("pool", &pool).unwrap();
    lan.settle();
    lan.check(&["client", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
    lan.apply(&services[1..]);
    let status = lan.agents[0].as_ref().unwrap().ask(&["status"]).unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("service2") && status.contains("no free address (IPv4 and IPv6)"), "{status}");

    // Service 1 keeps its address over a restart, although service 2 still waits for an address.
    lan.agents[0].take().unwrap().kill().unwrap();
    lan.cluster.manifests.put(&lan.service(0, &["pod3"])).unwrap();
    lan.start_agent(1, &[]);
    lan.settle();
    lan.check(&["client", "pod1"], 1, &[LoadBalancer], FROM_NODE1);
}

#[test]
fn service_type_and_node_port_follow_edits() {
    let lan = Lan::with(&RANGES);
    let service = |kind: Type| {
        let mut service = lan.service(1, &["pod3"]);
        service.exposure = Exposure { kind, ..Exposure::default() };
        match kind {
            Type::LoadBalancer => service.exposure.load_balancer_ips = external(1).to_vec(),
            Type::ClusterIP => service.ports.iter_mut().for_each(|port| port.node_port = None),
            Type::NodePort | Type::ExternalName => {}
        }
        service
    };
    let from_node1 = |frontends: &[_]| lan.check(&["client", "pod1"], 1, frontends, FROM_NODE1);
    let cluster_ip = || lan.check(&["pod1"], 1, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Client));
    for round in 0..2 {
        lan.apply(&[service(Type::ClusterIP)]);
        cluster_ip();
        lan.check(&["client"], 1, &[NodePort(1)], Expect::Refused);
        lan.apply(&[service(Type::NodePort)]);
        cluster_ip();
        from_node1(&[NodePort(1)]);
        lan.apply(&[service(Type::LoadBalancer)]);
        cluster_ip();
        from_node1(&[NodePort(1), LoadBalancer]);
        if round == 0 {
            lan.apply(&[service(Type::ExternalName)]);
            lan.check(&["pod1"], 1, &[ClusterIp], Expect::Silence);
            lan.check(&["client"], 1, &[NodePort(1)], Expect::Refused);
        }
    }
    let mut moved = service(Type::LoadBalancer);
    moved.ports.iter_mut().for_each(|port| port.node_port = Some(crate::lan::node_port(2)));
    lan.apply(&[moved]);
    from_node1(&[LoadBalancer]);
    lan.check(&["client"], 1, &[NodePort(1)], Expect::Refused);
    lan.check(&["client"], 2, &[NodePort(1)], FROM_NODE1);
    lan.remove(1);
    lan.check(&["client"], 2, &[NodePort(1)], Expect::Refused);
    lan.check(&["pod1", "client"], 1, &FRONTENDS[..1], Expect::Silence);
}

/// Some load balancer implementations have no addresses of their own: they give Services the addresses of nodes. The
/// source of a connection of the node, or of one that netfilter masquerades, may then be the address and port of a
/// Service.
#[test]
fn node_connections_from_a_service_port_are_left_untouched() {
    const PORT: u16 = 40_443;
    let lan = Lan::with(&[]);
    let mut service = lan.service(1, &["pod2"]);
    service.ports[0].port = PORT;
    service.exposure.load_balancer_ips = [node_addresses(1), node_addresses(2)].concat();
    lan.apply(&[service]);
    for address in node_addresses(1) {
        let frontend = SocketAddr::new(address, PORT);
        assert_eq!(ask_http(lan.netns("client"), frontend).unwrap().server, "pod2");
        let elsewhere = lan.cluster.pod("pod3").unwrap().http(address);
        let mut connection = Connection::open_from_port(&lan.cluster.node1, PORT, elsewhere).unwrap();
        assert_eq!(connection.ask().unwrap().server, "pod3");
    }
}

/// netfilter could not deny these clients: it processes their packets only after the translation.
#[test]
fn denied_sources_reach_no_kind_of_address() {
    let denied = ["--deny-source", "198.51.100.0/24,fd00:198:51:100::/64"];
    for mode in [&[][..], &["--forwarding", "direct"]] {
        let lan = Lan::with(&[&CLUSTER_CIDR[..], &denied, mode].concat());
        lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
        for number in [1, 2] {
            lan.check(&["client"], number, &FRONTENDS, Expect::Silence);
            let served = Expect::Answer(if number == 1 { &["pod2"] } else { &["pod3"] }, Seen::Node(1));
            lan.check(&["client2"], number, &FRONTENDS, served);
        }
    }
}

/// Without `--cluster-cidr`, or another way to recognise internal clients, pods count as external.
#[test]
fn denied_pods_are_served_only_if_recognised_as_internal() {
    for detection in [&CLUSTER_CIDR[..], &[]] {
        let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };
        let mut lan = Lan::without_agents(wiring);
        let [v4, v6] = lan.cluster.pod("pod2").unwrap().addresses;
        let denied = format!("{v4}/32,{v6}/128");
        lan.start_agent(1, &[detection, &["--deny-source", &denied]].concat());
        lan.apply(&[lan.service(1, &["pod3"])]);
        let served = Expect::Answer(&["pod3"], Seen::Client);
        let expected = if detection.is_empty() { Expect::Silence } else { served };
        lan.check(&["pod2"], 1, &[ClusterIp], expected);
        lan.check(&["pod1"], 1, &[ClusterIp], served);
    }
}
