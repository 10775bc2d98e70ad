//! Tests of packets to virtual addresses that no Service port takes: pings, unlisted ports, unassigned addresses.

use std::net::{IpAddr, SocketAddr};

use lb_tests::{
    client::{PATIENCE, udp_socket},
    cluster::HTTP_PORT,
    icmp::ping,
    netns::Netns,
    server,
    socket::{next_error, queue_errors},
    wait_for,
};
use nix::errno::Errno;

use crate::{
    bed::{HTTP, RANGES, UDP, vips},
    lan::{
        EVERY, Frontend::ClusterIp, Lan, Observation, Protocol, external, node_addresses, probe,
        probe_briefly,
    },
};

/// A port number that no Service has.
const UNLISTED: u16 = 33_434;

#[test]
fn unlisted_ports_are_rejected_and_unassigned_cluster_ips_are_dropped() {
    let lan = Lan::with(&RANGES);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &[])]);
    for (protocol, family) in EVERY {
        for source in ["client", "pod1", "pod4"] {
            for number in [1, 2] {
                let unlisted = SocketAddr::new(vips(number)[family], UNLISTED);
                let verdict = probe(lan.netns(source), unlisted, protocol);
                assert_eq!(verdict, Observation::Refused, "{source} → {unlisted}");
            }
        }
    }
    let left_node1 = packets_to_the_router(&lan);
    std::thread::scope(|scope| {
        for (protocol, family) in EVERY {
            let (lan, to) = (&lan, SocketAddr::new(vips(99)[family], 80));
            for source in ["client", "pod1", "pod4"] {
                scope.spawn(move || {
                    assert_eq!(
                        probe_briefly(lan.netns(source), to, protocol),
                        Observation::Silent,
                        "{source} → {to}"
                    );
                });
            }
        }
    });
    // Node 1 must drop these packets: sent back to the router, they would loop until their TTL expires.
    let sent = packets_to_the_router(&lan) - left_node1;
    assert!(sent < 10, "node 1 has sent {sent} packets");
}

/// The netfilter rules of another proxy, which translate the cluster IPs with this number to these addresses of a pod.
fn rules_of_another_proxy(number: u8, [v4, v6]: [IpAddr; 2]) -> String {
    let [vip4, vip6] = vips(number);
    let rules = format!(
        "ip daddr {vip4} tcp dport {HTTP} dnat ip to {v4}:{HTTP_PORT}\n\
         ip6 daddr {vip6} tcp dport {HTTP} dnat ip6 to [{v6}]:{HTTP_PORT}\n"
    );
    format!(
        "table inet other {{\n\
         chain prerouting {{ type nat hook prerouting priority -100;\n{rules}}}\n\
         chain output {{ type nat hook output priority -100;\n{rules}}}\n}}\n"
    )
}

#[test]
fn cluster_ip_of_another_proxy_is_left_to_it() {
    let lan = Lan::with(&RANGES);
    let [v4, v6] = vips(2);
    let manifest = format!(
        "apiVersion: v1\nkind: Service\n\
         metadata: {{name: foreign, labels: {{service.kubernetes.io/service-proxy-name: other}}}}\n\
         spec: {{clusterIPs: ['{v4}', '{v6}'], ports: [{{port: {HTTP}}}]}}\n"
    );
    lan.cluster.manifests.write("foreign", &manifest).unwrap();
    lan.settle();
    let node = &lan.cluster.node1;
    let pod = lan.cluster.pod("pod2").unwrap().addresses;
    node.feed("nft", &["-f", "-"], &rules_of_another_proxy(2, pod)).unwrap();
    for family in [0, 1] {
        let to = ClusterIp.of(2, (Protocol::Tcp, family));
        for source in ["pod1", "node1"] {
            let answers = || {
                let seen = probe(lan.netns(source), to, Protocol::Tcp);
                matches!(&seen, Observation::Answered(answer) if answer.server == "pod2").then_some(())
            };
            wait_for(PATIENCE, answers).unwrap_or_else(|| panic!("{source} → {to}: no answer of pod2"));
        }
        let unassigned = ClusterIp.of(99, (Protocol::Tcp, family));
        // The agent begins to drop such packets once it has written the addresses of all Services.
        let is_dropped = || {
            let seen = probe_briefly(lan.netns("pod1"), unassigned, Protocol::Tcp);
            (seen == Observation::Silent).then_some(())
        };
        wait_for(PATIENCE, is_dropped).expect("packets to an address that nobody has are dropped");
    }
}

/// Number of packets that node 1 has sent on the wire to the router.
fn packets_to_the_router(lan: &Lan) -> u64 {
    let devices = lan.cluster.node1.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
    let line = devices.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    line.split_whitespace().nth(9).unwrap().parse().unwrap()
}

#[test]
fn virtual_addresses_answer_pings() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &[])]);
    for source in ["client", "pod1", "pod4"] {
        for number in [1, 2] {
            // Tests cluster IPs and load balancer addresses.
            for addresses in [vips(number), external(number)] {
                for address in addresses {
                    for bytes in [0, 56, 1_400] {
                        let answered = ping(lan.netns(source), address, bytes).unwrap();
                        assert_eq!(answered, address, "{bytes} bytes from {source}");
                    }
                }
            }
        }
    }
    lan.remove(2);
    for address in vips(2) {
        assert!(ping(lan.netns("pod1"), address, 56).is_err(), "{address} is no longer assigned");
    }
}

/// No socket hook translates pings of processes of the node. If the agent knows the range of cluster IPs, its catch
/// device answers pings to these cluster IPs.
#[test]
fn cluster_ips_answer_pings_of_processes_of_the_node() {
    let lan = Lan::with(&RANGES);
    lan.apply(&[lan.service(1, &["pod2"])]);
    for address in vips(1) {
        let answered = || ping(lan.netns("node1"), address, 56).ok();
        assert_eq!(wait_for(PATIENCE, answered), Some(address));
    }
}

/// An external IP may be another node's address. While that node is down, no other node may answer pings to that
/// address.
#[test]
fn pings_to_the_address_of_another_node_reach_that_node() {
    let lan = Lan::with(&[]);
    let mut service = lan.service(1, &["pod2"]);
    service.exposure.external_ips = node_addresses(2).to_vec();
    lan.apply(&[service]);
    for address in node_addresses(2) {
        assert_eq!(ping(lan.netns("pod1"), address, 56).unwrap(), address);
    }
    lan.cluster.node2.ip("link set eth0 down\n").unwrap();
    for address in node_addresses(2) {
        assert!(ping(lan.netns("pod1"), address, 56).is_err(), "{address} answers although its node is down");
    }
}

/// Sends a datagram with this hop limit; returns the ICMP error that comes back, and its source.
fn trace(netns: &Netns, to: SocketAddr, hops: u32) -> (Errno, Option<IpAddr>) {
    let socket = udp_socket(netns, to).unwrap();
    queue_errors(&socket).unwrap();
    lb_tests::socket::set_hops(&socket, hops).unwrap();
    socket.send(b"?").unwrap();
    let error = wait_for(PATIENCE, || next_error(&socket).unwrap()).unwrap();
    assert_eq!(error.destination, to);
    (error.errno, error.offender)
}

#[test]
fn traceroute_ends_at_the_virtual_address() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let client = &lan.cluster.client;
    for (family, router) in ["198.51.100.1", "fd00:198:51:100::1"].into_iter().enumerate() {
        let router = Some(router.parse().unwrap());
        let address = vips(1)[family];
        let unlisted = SocketAddr::new(address, UNLISTED);
        assert_eq!(trace(client, unlisted, 1), (Errno::EHOSTUNREACH, router));
        for hops in [2, 64] {
            assert_eq!(trace(client, unlisted, hops), (Errno::ECONNREFUSED, Some(address)), "{hops} hops");
        }
        // For a port of the Service, errors of hops behind the virtual address seem to come from that address.
        for (frontend, hops) in [(ClusterIp, 2), (crate::lan::Frontend::NodePort(1), 3)] {
            let to = frontend.of(1, (Protocol::Udp, family));
            let (errno, offender) = trace(client, to, hops);
            assert_eq!((errno, offender), (Errno::EHOSTUNREACH, Some(to.ip())), "{hops} hops to {to}");
        }
    }
}

/// NodeLocal DNSCache listens on the cluster IP of kube-dns, which it assigns to its device `nodelocaldns`. With
/// kube-proxy it also needs NOTRACK rules. With the agent it does not: if a device of the node has a cluster IP as its
/// address, packets to that cluster IP reach the node's own sockets.
#[test]
fn cluster_ip_that_the_node_has_reaches_its_own_listener() {
    for arguments in [&[][..], &RANGES, &["--forwarding", "direct"]] {
        let lan = Lan::with(arguments);
        lan.apply(&[lan.service(1, &["pod2"])]);
        let node = lan.cluster.node1.clone();
        let name = "node-cache";
        let all_reach = |server: &str| {
            let reaches = |source: &Netns, (protocol, family)| {
                let to = ClusterIp.of(1, (protocol, family));
                matches!(probe_briefly(source, to, protocol), Observation::Answered(answer) if answer.server == server)
            };
            let sources = [lan.netns("pod1"), lan.netns("client"), &node];
            let all = || sources.iter().all(|source| EVERY.iter().all(|how| reaches(source, *how)));
            wait_for(PATIENCE, || all().then_some(())).is_some()
        };
        assert!(all_reach("pod2"), "{arguments:?}: before");
        let [v4, v6] = vips(1);
        node.ip(&format!("address add {v4}/32 dev lo\naddress add {v6}/128 dev lo nodad\n")).unwrap();
        let mut servers = vec![server::http(&node, name, HTTP).unwrap()];
        servers
            .extend(vips(1).map(|vip| server::udp_echo_at(&node, name, SocketAddr::new(vip, UDP)).unwrap()));
        assert!(
            all_reach(name),
            "{arguments:?}: packets to the node's own address do not reach its listener"
        );
        node.ip(&format!("address del {v4}/32 dev lo\naddress del {v6}/128 dev lo\n")).unwrap();
        assert!(all_reach("pod2"), "{arguments:?}: after the cache has gone");
    }
}
