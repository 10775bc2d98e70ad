//! UDP sockets keep sending while their service changes: flows to removed endpoints, or from before there were
//! endpoints, must not persist.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    slice::from_ref,
    thread,
    time::Duration,
};

use lb_tests::{
    client::{PATIENCE, echo, udp_socket},
    cluster::UDP_PORT,
    manifests::Service,
    patience, server, wait_for,
};

use crate::lan::{
    CLUSTER_CIDR, FRONTENDS,
    Frontend::{ClusterIp, LoadBalancer, NodePort},
    Lan, Protocol,
};

/// Time limit until a flow reaches its new backend.
const PROMPTLY: Duration = Duration::from_secs(2);

/// How long to wait for a reply, which may not come, before the next datagram.
const POLL: Duration = Duration::from_millis(100);

/// Sends a datagram and expects a reply; returns the server of the reply.
fn expect_reply(socket: &UdpSocket) -> io::Result<String> {
    socket.set_read_timeout(Some(PATIENCE * patience()))?;
    let mut answer = echo(socket, b"again");
    if answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData) {
        // The answer was a late reply to an earlier datagram. Other late replies arrive within `POLL`.
        thread::sleep(POLL);
        discard_replies(socket);
        answer = echo(socket, b"again");
    }
    socket.set_read_timeout(Some(POLL))?;
    Ok(answer?.server)
}

/// Long-lived sockets, each with a description.
struct Senders(Vec<(String, UdpSocket)>);

impl Senders {
    /// Opens sockets of the external client and of pods, to every kind of address in both families, through both nodes.
    fn everywhere(lan: &Lan, number: u8) -> Self {
        let mut all = Vec::new();
        for family in [0, 1] {
            let mut add = |source: &str, frontend: crate::lan::Frontend| {
                let to = frontend.of(number, (Protocol::Udp, family));
                all.push(Self::one(lan, source, to));
            };
            FRONTENDS.into_iter().chain([NodePort(2)]).for_each(|frontend| add("client", frontend));
            [ClusterIp, NodePort(1), LoadBalancer].into_iter().for_each(|frontend| add("pod1", frontend));
            add("pod4", ClusterIp);
        }
        Self(all)
    }

    /// Sockets of the external client to a node port of node 1.
    fn node_port(lan: &Lan, number: u8) -> Self {
        let to = |family| NodePort(1).of(number, (Protocol::Udp, family));
        Self([0, 1].map(|family| Self::one(lan, "client", to(family))).into())
    }

    fn one(lan: &Lan, source: &str, to: SocketAddr) -> (String, UdpSocket) {
        let socket = udp_socket(lan.netns(source), to).unwrap();
        socket.set_read_timeout(Some(POLL)).unwrap();
        (format!("{source} → {to}"), socket)
    }

    /// Sends one datagram through each socket and waits for no reply.
    fn send(&self) {
        for (_, socket) in &self.0 {
            let _perhaps_refused = socket.send(b"?");
        }
    }

    /// Keeps sending until every socket gets replies from one of these servers, and asserts that then only these
    /// servers answer.
    #[track_caller]
    fn reach(&self, servers: &[&str]) {
        for (what, socket) in &self.0 {
            let mut last = None;
            let asked = wait_for(PROMPTLY, || {
                discard_replies(socket);
                let answer = echo(socket, b"?").map(|answer| answer.server);
                let right = answer.as_ref().is_ok_and(|server| servers.contains(&server.as_str()));
                last = Some(answer);
                right.then_some(())
            });
            assert!(asked.is_some(), "{what}: expected one of {servers:?}, but {last:?}");
        }
        for (what, socket) in &self.0 {
            discard_replies(socket);
            for _ in 0..3 {
                let server = expect_reply(socket);
                let right = server.as_ref().is_ok_and(|server| servers.contains(&server.as_str()));
                assert!(right, "{what}: moved on from {servers:?} to {server:?}");
            }
        }
    }

    /// Keeps sending until no socket gets a reply.
    #[track_caller]
    fn get_no_replies(&self) {
        for (what, socket) in &self.0 {
            let failed = |result: io::Result<_>| result.is_err().then_some(());
            // The first result may be the refusal of an earlier datagram.
            let silent = || failed(echo(socket, b"?")).and_then(|()| failed(echo(socket, b"?")));
            assert!(wait_for(PROMPTLY, silent).is_some(), "{what} still gets answers");
        }
    }
}

/// Discards replies to earlier datagrams.
fn discard_replies(socket: &UdpSocket) {
    socket.set_nonblocking(true).unwrap();
    while socket.recv(&mut [0; 128]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
}

fn unready(mut service: Service) -> Service {
    service.endpoints.iter_mut().for_each(|endpoint| endpoint.ready = false);
    service
}

#[test]
fn udp_flows_follow_a_replaced_endpoint() {
    let lan = Lan::with(&CLUSTER_CIDR);
    lan.apply(&[lan.service(1, &["pod2"])]);
    let senders = Senders::everywhere(&lan, 1);
    for pod in ["pod2", "pod3", "pod4", "pod2"] {
        lan.apply(&[lan.service(1, &[pod])]);
        senders.reach(&[pod]);
    }
    // Flows keep a backend that stays in the service.
    lan.apply(&[lan.service(1, &["pod2", "pod3"])]);
    senders.reach(&["pod2"]);
}

#[test]
fn udp_flows_follow_endpoint_readiness() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let service = lan.service(1, &["pod2"]);
    lan.apply(&[unready(service.clone())]);
    let senders = Senders::everywhere(&lan, 1);
    senders.get_no_replies();
    lan.apply(from_ref(&service));
    senders.reach(&["pod2"]);
    // Without another endpoint the flows keep their backend (as with kube-proxy).
    lan.apply(&[unready(service)]);
    senders.reach(&["pod2"]);
    let mut other = lan.service(1, &["pod2", "pod3"]);
    other.endpoints[0].ready = false;
    lan.apply(&[other]);
    senders.reach(&["pod3"]);
}

#[test]
fn udp_flows_reach_the_first_endpoint() {
    let lan = Lan::with(&CLUSTER_CIDR);
    // The senders send before the service exists, and then before it has endpoints.
    let senders = Senders::everywhere(&lan, 1);
    senders.send();
    lan.apply(&[lan.service(1, &[])]);
    senders.send();
    senders.get_no_replies();
    lan.apply(&[lan.service(1, &["pod3"])]);
    senders.reach(&["pod3"]);
}

#[test]
fn udp_flows_follow_the_target_port() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let _other = server::udp_echo(lan.netns("pod3"), "other-port", UDP_PORT + 1).unwrap();
    let service = lan.service(1, &["pod3"]);
    let mut moved = service.clone();
    moved.ports[1].target_port = UDP_PORT + 1;
    lan.apply(from_ref(&service));
    let senders = Senders::everywhere(&lan, 1);
    for _ in 0..2 {
        senders.reach(&["pod3"]);
        lan.apply(&[moved.clone()]);
        senders.reach(&["other-port"]);
        lan.apply(from_ref(&service));
    }
}

#[test]
fn udp_flows_follow_a_recreated_service() {
    let lan = Lan::with(&CLUSTER_CIDR);
    lan.apply(&[lan.service(1, &["pod2"])]);
    let senders = Senders::everywhere(&lan, 1);
    senders.reach(&["pod2"]);
    lan.remove(1);
    // Flows outlive their service (as with kube-proxy), but do not survive its recreation.
    senders.reach(&["pod2"]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    senders.reach(&["pod3"]);
    // The service is removed and created again, with a period without endpoints in between.
    lan.remove(1);
    lan.apply(&[lan.service(1, &[])]);
    senders.send();
    lan.apply(&[lan.service(1, &["pod4"])]);
    senders.reach(&["pod4"]);
}

#[test]
fn udp_flows_follow_a_replaced_endpoint_under_local_policies() {
    let lan = Lan::with(&[]);
    let service = |pods: &[&str]| {
        let mut service = lan.service(1, pods);
        (service.exposure.external_local, service.exposure.internal_local) = (true, true);
        service
    };
    lan.apply(&[service(&["pod1", "pod3"])]);
    let outside = Senders::node_port(&lan, 1);
    let inside =
        Senders([0, 1].map(|f| Senders::one(&lan, "pod2", ClusterIp.of(1, (Protocol::Udp, f)))).into());
    for senders in [&outside, &inside] {
        senders.reach(&["pod1"]);
    }
    for pod in ["pod2", "pod1"] {
        lan.apply(&[service(&[pod, "pod3"])]);
        outside.reach(&[pod]);
    }
    inside.reach(&["pod1"]);
    // When the policies change, the flows move to a backend that the new policy allows.
    lan.apply(&[service(&["pod3"])]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    outside.reach(&["pod3"]);
    inside.reach(&["pod3"]);
}

#[test]
fn udp_flows_of_internal_clients_follow_a_replaced_endpoint_under_a_local_policy() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let service = |pods: &[&str]| {
        let mut service = lan.service(1, pods);
        service.exposure.external_local = true;
        service
    };
    lan.apply(&[service(&["pod3"])]);
    let to = |frontend: crate::lan::Frontend, family| frontend.of(1, (Protocol::Udp, family));
    let inside = Senders(
        [(NodePort(1), 0), (NodePort(1), 1), (LoadBalancer, 0), (LoadBalancer, 1)]
            .map(|(frontend, family)| Senders::one(&lan, "pod1", to(frontend, family)))
            .into(),
    );
    inside.reach(&["pod3"]);
    // Without local endpoints the flows go to a remote one, and stay there when local ones appear.
    lan.apply(&[service(&["pod4"])]);
    inside.reach(&["pod4"]);
    lan.apply(&[service(&["pod2", "pod4"])]);
    inside.reach(&["pod4"]);
}

impl Senders {
    /// Keeps sending for at least 250 ms; all replies must come from this server.
    #[track_caller]
    fn stay_with(&self, server: &str) {
        for _ in 0..5 {
            for (what, socket) in &self.0 {
                discard_replies(socket);
                let answer = expect_reply(socket);
                assert!(answer.as_ref().is_ok_and(|answer| answer == server), "{what}: {answer:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A service with pod2 and pod3, and senders whose flows go to pod2.
fn two_pods(lan: &Lan) -> (Service, Senders) {
    lan.apply(&[lan.service(1, &["pod2"])]);
    let senders = Senders::everywhere(lan, 1);
    senders.reach(&["pod2"]);
    (lan.service(1, &["pod2", "pod3"]), senders)
}

fn terminating(mut service: Service, pod: usize) -> Service {
    service.endpoints[pod] = service.endpoints[pod].clone().terminating();
    service
}

#[test]
fn udp_flows_stay_with_a_serving_terminating_endpoint() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let (service, senders) = two_pods(&lan);
    lan.apply(&[terminating(service, 0)]);
    senders.stay_with("pod2");
    Senders::everywhere(&lan, 1).reach(&["pod3"]);
    // No frontend refers to the endpoint any more; the agent must still detect its removal.
    lan.apply(&[lan.service(1, &["pod3"])]);
    senders.reach(&["pod3"]);
}

#[test]
fn udp_flows_stay_with_a_terminating_endpoint_across_an_agent_restart() {
    let mut lan = Lan::with(&CLUSTER_CIDR);
    let (service, senders) = two_pods(&lan);
    lan.apply(&[terminating(service, 0)]);
    lan.start_agent(1, &CLUSTER_CIDR);
    lan.start_agent(2, &CLUSTER_CIDR);
    lan.settle();
    senders.stay_with("pod2");
}

#[test]
fn udp_flows_stay_with_an_endpoint_hinted_to_another_node() {
    let lan = Lan::with(&CLUSTER_CIDR);
    let (mut service, senders) = two_pods(&lan);
    service.endpoints[0].for_nodes = vec!["elsewhere".to_owned()];
    service.endpoints[1].for_nodes = vec!["node1".to_owned(), "node2".to_owned()];
    lan.apply(&[service]);
    senders.stay_with("pod2");
    Senders::everywhere(&lan, 1).reach(&["pod3"]);
}

#[test]
fn udp_flows_stay_with_a_remote_endpoint_when_a_local_policy_is_set() {
    let lan = Lan::with(&[]);
    lan.apply(&[lan.service(1, &["pod3"])]);
    let senders = Senders::node_port(&lan, 1);
    senders.reach(&["pod3"]);
    let mut service = lan.service(1, &["pod1", "pod3"]);
    service.exposure.external_local = true;
    lan.apply(&[service]);
    senders.stay_with("pod3");
    Senders::node_port(&lan, 1).reach(&["pod1"]);
}

/// The agent deletes stale flows after a grace period. It must keep flows to an endpoint that was added during that
/// period. (After a deletion, the backend would receive packets from another masquerade port.)
#[test]
fn udp_flows_survive_rapid_endpoint_replacement() {
    let lan = Lan::with(&[]);
    let change = |pod| lan.cluster.manifests.put(&lan.service(1, &[pod])).unwrap();
    lan.apply(&[lan.service(1, &["pod1"])]);
    let to = NodePort(1).of(1, (Protocol::Udp, 0));
    let ask = || {
        let socket = udp_socket(lan.netns("client"), to).unwrap();
        let answer = echo(&socket, b"?").ok()?;
        Some((socket, answer))
    };
    for _ in 0..20 {
        for pod in ["pod3", "pod1"] {
            change(pod);
            wait_for(PROMPTLY, || ask().filter(|(_, answer)| answer.server == pod)).unwrap();
        }
        // Some of these flows may begin while the flows to pod3 await deletion.
        let flows: Vec<_> = (0..40).map(|_| ask().expect("an answer")).collect();
        thread::sleep(Duration::from_millis(100));
        for (socket, answer) in &flows {
            let again = echo(socket, b"?").unwrap();
            assert_eq!((&again.server, again.seen), (&answer.server, answer.seen));
        }
    }
}
