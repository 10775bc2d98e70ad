//! Selection of endpoints: traffic policies, terminating endpoints, topology hints.

use std::{
    slice::from_ref,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use lb_tests::manifests::Service;

use crate::lan::{
    CLUSTER_CIDR, EVERY, EXTERNAL, Expect, FRONTENDS,
    Frontend::{ClusterIp, ExternalIp, LoadBalancer, NodePort},
    Lan, Observation, Protocol, Seen, names, probe,
};

/// The service with these pods not ready.
fn unready(mut service: Service, pods: &[&str]) -> Service {
    for endpoint in &mut service.endpoints {
        endpoint.ready &= !pods.contains(&&*endpoint.pod);
    }
    service
}

/// The service with these pods terminating.
fn terminating(mut service: Service, pods: &[&str]) -> Service {
    for endpoint in &mut service.endpoints {
        if pods.contains(&&*endpoint.pod) {
            *endpoint = endpoint.clone().terminating();
        }
    }
    service
}

fn external_local(mut service: Service) -> Service {
    service.exposure.external_local = true;
    service
}

fn internal_local(mut service: Service) -> Service {
    service.exposure.internal_local = true;
    service
}

#[test]
fn every_address_rejects_when_no_endpoint_is_usable() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let both_local = |service| internal_local(external_local(service));
    lan.apply(&[
        lan.service(1, &[]),
        unready(lan.service(2, &["pod2", "pod3"]), &["pod2", "pod3"]),
        both_local(lan.service(3, &[])),
        both_local(unready(lan.service(4, &["pod2", "pod3"]), &["pod2", "pod3"])),
    ]);
    for number in [1, 2, 3, 4] {
        lan.check(&["client", "pod1"], number, &FRONTENDS, Expect::Refused);
        lan.check(&["client", "pod4"], number, &[NodePort(2)], Expect::Refused);
        // A node sends 50 ICMP errors at once, then 1,000 per second. Each service of this loop makes node 1 send 16.
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn local_policy_drops_on_nodes_without_local_endpoints() {
    let lan = Lan::with(&[]);
    lan.apply(&[
        internal_local(lan.service(1, &["pod3"])),
        external_local(lan.service(2, &["pod3"])),
        internal_local(lan.service(3, &["pod1", "pod2", "pod3"])),
        external_local(lan.service(4, &["pod2"])),
    ]);
    // The internal policy applies only to cluster IPs.
    lan.check(&["client", "pod1"], 1, &[ClusterIp], Expect::Silence);
    lan.check(&["pod4"], 1, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Client));
    lan.check(&["client", "pod1"], 1, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Node(1)));
    assert_eq!(lan.servers("pod1", 3, ClusterIp), names(&["pod1", "pod2"]));
    assert_eq!(lan.servers("pod4", 3, ClusterIp), names(&["pod3"]));
    // The external policy applies to all other addresses.
    lan.check(&["client"], 2, &EXTERNAL, Expect::Silence);
    lan.check(&["client"], 2, &[NodePort(2)], Expect::Answer(&["pod3"], Seen::Client));
    lan.check(&["pod1"], 2, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Client));
    // To node 2, a process of node 1 is an external client.
    lan.check(&["node1"], 2, &[NodePort(2)], Expect::Answer(&["pod3"], Seen::Client));
    lan.check(&["node1"], 4, &[NodePort(2)], Expect::Silence);
    // The load balancer has found the node with endpoints, and sends packets there.
    lan.cluster.route_services_to(2).unwrap();
    lan.check(&["client"], 2, &[LoadBalancer, ExternalIp], Expect::Answer(&["pod3"], Seen::Client));
}

#[test]
fn internal_clients_bypass_the_local_external_policy_where_the_node_detects_them() {
    let mut lan = Lan::with(&CLUSTER_CIDR);
    lan.apply(&[external_local(lan.service(1, &["pod3"]))]);
    // Internal clients get the same answer as if the load balancer had sent the packet to the node with the endpoint.
    lan.check(&["pod1"], 1, &EXTERNAL, Expect::Answer(&["pod3"], Seen::Client));
    lan.check(&["client"], 1, &EXTERNAL, Expect::Silence);
    lan.check(&["pod1", "client"], 1, &[NodePort(2)], Expect::Answer(&["pod3"], Seen::Client));
    // A node that cannot detect internal clients treats pods as external.
    lan.start_agent(1, &[]);
    lan.check(&["pod1"], 1, &EXTERNAL, Expect::Silence);
    lan.check(&["pod1", "client"], 1, &[NodePort(2)], Expect::Answer(&["pod3"], Seen::Client));
    // Packets of another node's pod arrive over the wire, and the pod is still internal.
    lan.start_agent(1, &CLUSTER_CIDR);
    lan.apply(&[external_local(lan.service(1, &["pod1"]))]);
    lan.check(&["pod4"], 1, &[NodePort(1)], Expect::Answer(&["pod1"], Seen::Client));
}

#[test]
fn terminating_endpoints_serve_when_no_endpoint_is_ready() {
    let lan = Lan::with(&[]);
    let pods = ["pod1", "pod2", "pod3"];
    lan.apply(&[
        // While other endpoints are ready, terminating ones get no new connections.
        terminating(lan.service(1, &pods), &["pod1", "pod3"]),
        terminating(lan.service(2, &pods), &pods),
        // Each policy has its own fallback: on node 1 the policy `Local` falls back to the terminating pod1, although
        // pod3 is ready on another node.
        external_local(internal_local(terminating(lan.service(3, &["pod1", "pod3"]), &["pod1"]))),
        // An endpoint that no longer serves is not used.
        external_local(unready(lan.service(4, &["pod1", "pod3"]), &["pod1"])),
    ]);
    for frontend in [ClusterIp, NodePort(1), LoadBalancer, NodePort(2)] {
        assert_eq!(lan.servers("pod4", 1, frontend), names(&["pod2"]));
        assert_eq!(lan.servers("pod4", 2, frontend), names(&pods));
    }
    lan.check(&["pod2"], 3, &[ClusterIp, NodePort(1)], Expect::Answer(&["pod1"], Seen::Client));
    lan.check(&["client"], 3, &EXTERNAL, Expect::Answer(&["pod1"], Seen::Client));
    lan.check(&["pod4"], 3, &[ClusterIp], Expect::Answer(&["pod3"], Seen::Client));
    lan.check(&["client"], 4, &EXTERNAL, Expect::Silence);
    // With `publishNotReadyAddresses` EndpointSlices list unready and terminating pods as ready.
    let mut published = terminating(lan.service(5, &["pod1", "pod2"]), &["pod1"]);
    published.endpoints[0].ready = true;
    lan.apply(&[published]);
    assert_eq!(lan.servers("pod4", 5, ClusterIp), names(&["pod1", "pod2"]));
}

/// The service with a topology hint for `nodes[i]` at its endpoint `i`; further endpoints get no hint.
fn with_hints(mut service: Service, nodes: &[&str]) -> Service {
    for (endpoint, node) in service.endpoints.iter_mut().zip(nodes) {
        endpoint.for_nodes = vec![(*node).to_owned()];
    }
    service
}

#[test]
fn topology_hints_apply_only_if_every_endpoint_has_one() {
    let lan = Lan::with(&[]);
    let pods = ["pod1", "pod2", "pod3"];
    let service = with_hints(lan.service(1, &pods), &["node1", "node1", "node2"]);
    let partly = with_hints(lan.service(2, &["pod1", "pod3"]), &["node1"]);
    let elsewhere = with_hints(lan.service(3, &["pod1", "pod3"]), &["node9", "node9"]);
    let local = external_local(with_hints(lan.service(4, &pods), &["node2", "node1", "node2"]));
    lan.apply(&[service.clone(), partly, elsewhere, local]);
    for frontend in [ClusterIp, LoadBalancer, NodePort(1)] {
        assert_eq!(lan.servers("pod2", 1, frontend), names(&["pod1", "pod2"]), "{frontend:?}");
    }
    assert_eq!(lan.servers("pod4", 1, ClusterIp), names(&["pod3"]));
    assert_eq!(lan.servers("client", 1, NodePort(2)), names(&["pod3"]));
    assert_eq!(lan.servers("pod2", 2, ClusterIp), names(&["pod1", "pod3"]), "one has no hint");
    assert_eq!(lan.servers("pod2", 3, ClusterIp), names(&["pod1", "pod3"]), "none is for this node");
    assert_eq!(lan.servers("client", 4, NodePort(1)), names(&["pod1", "pod2"]), "Local knows no hints");
    // The only endpoint with a hint for node 2 becomes unready: the other endpoints of the cluster serve.
    lan.apply(&[unready(service, &["pod3"])]);
    assert_eq!(lan.servers("pod4", 1, ClusterIp), names(&["pod1", "pod2"]));
}

/// The service with its endpoint `i` in the zone `zones[i]`, and with the annotation that makes nodes prefer the
/// endpoints in their own zone.
fn without_cross_zone(mut service: Service, zones: &[&str]) -> Service {
    let name = "service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled";
    service.annotations.push((name, "false".to_owned()));
    for (endpoint, zone) in service.endpoints.iter_mut().zip(zones) {
        endpoint.zone = (*zone).to_owned();
    }
    service
}

#[test]
fn clients_get_endpoints_of_the_zone_that_the_flag_names() {
    let lan = Lan::with(&["--zone", "z1"]);
    let (pods, zones) = (["pod1", "pod2", "pod3"], ["z2", "z1", "z2"]);
    let mut hinted = lan.service(1, &pods);
    for (endpoint, zone) in hinted.endpoints.iter_mut().zip(zones) {
        endpoint.for_zones = vec![zone.to_owned()];
    }
    let preferring = without_cross_zone(lan.service(2, &pods), &zones);
    let mut crossing = without_cross_zone(lan.service(3, &pods), &zones);
    crossing.annotations.clear();
    lan.apply(&[hinted, preferring.clone(), crossing]);
    for source in ["pod1", "pod4"] {
        assert_eq!(lan.servers(source, 1, ClusterIp), names(&["pod2"]), "{source}, by hints");
        assert_eq!(lan.servers(source, 2, ClusterIp), names(&["pod2"]), "{source}, by the annotation");
        assert_eq!(lan.servers(source, 3, ClusterIp), names(&pods), "{source}, without either");
    }
    assert_eq!(lan.servers("client", 2, LoadBalancer), names(&["pod2"]));
    // No endpoint in the agent's zone is ready, so the endpoints in the other zone serve.
    lan.apply(&[unready(preferring, &["pod2"])]);
    assert_eq!(lan.servers("pod4", 2, ClusterIp), names(&["pod1", "pod3"]));
}

/// Sends requests to node ports of service 1 without a pause during `change`, and repeats the change until there were
/// enough requests. Every request must be answered, by a backend that receives it from the client's own address or the
/// node's.
fn under_traffic(lan: &Lan, change: impl Fn()) {
    const ENOUGH: u32 = 100;
    let (stop, asked) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let (stop, asked) = (&stop, &asked);
        let ask = |how: (Protocol, usize)| {
            let verdict = probe(lan.netns("client"), NodePort(1).of(1, how), how.0);
            let Observation::Answered(answer) = verdict else { panic!("{how:?}: {verdict:?}") };
            let node = lan.source(1, &answer.server, answer.seen.ip());
            assert!(answer.seen == answer.local || answer.seen.ip() == node, "{answer:?}");
            asked.fetch_add(1, Ordering::Relaxed);
        };
        let clients = EVERY.map(|how| {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    ask(how);
                }
            })
        });
        let is_over = |client: &thread::ScopedJoinHandle<'_, ()>| client.is_finished();
        loop {
            change();
            if asked.load(Ordering::Relaxed) > ENOUGH || clients.iter().any(is_over) {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    assert!(asked.load(Ordering::Relaxed) > ENOUGH, "{asked:?} questions show nothing");
}

#[test]
fn no_request_fails_during_a_policy_change() {
    let lan = Lan::with(&[]);
    let service = lan.service(1, &["pod1", "pod2"]);
    lan.apply(from_ref(&service));
    under_traffic(&lan, || {
        for _ in 0..15 {
            for service in [external_local(service.clone()), service.clone()] {
                lan.cluster.manifests.put(&service).unwrap();
                thread::sleep(Duration::from_millis(40));
            }
        }
    });
}

#[test]
fn no_request_fails_during_a_rolling_update() {
    let lan = Lan::with(&[]);
    for local in [false, true] {
        let service = |pods: &[&str]| {
            let mut service = lan.service(1, pods);
            service.exposure.external_local = local;
            service
        };
        lan.apply(&[service(&["pod1"])]);
        under_traffic(&lan, || {
            for (old, new) in [("pod1", "pod2"), ("pod2", "pod1")].repeat(5) {
                for step in [
                    unready(service(&[old, new]), &[new]),
                    service(&[old, new]),
                    terminating(service(&[old, new]), &[old]),
                    service(&[new]),
                ] {
                    lan.cluster.manifests.put(&step).unwrap();
                    // A busy agent might apply several steps at once. A backend would then disappear without
                    // terminating first, and packets to it would be lost, as with kube-proxy.
                    lan.settle();
                }
            }
        });
    }
}
