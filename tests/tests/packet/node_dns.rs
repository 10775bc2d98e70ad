//! Node-local DNS: packets of pods to the cluster IP of the DNS Service, and answers of the agent's server.

use std::net::{SocketAddr, TcpListener, UdpSocket};

use lb_common::{
    Address, DeviceInfo, DnsIntercept,
    Outcome::{DnsAnswer, DnsQuery, Forward, NewFlow, NoService},
    ServiceKey, device_flags,
    filter::Mark,
};
use lb_datapath::monotonic_nanoseconds;

use super::{
    packets::Packet,
    stage::{Family, each, each_on},
    testbed::{Device, Hook, SCTP, TCP, Testbed, UDP},
};

/// The port of the server.
pub(crate) const SERVER_PORT: u16 = 9053;
/// A lease that outlives each test, in ns.
const LONG: u64 = 600_000_000_000;

/// Sockets of a DNS server, at all addresses of this thread's network namespace.
pub(crate) struct Sockets {
    _udp: UdpSocket,
    _tcp: TcpListener,
}

impl Sockets {
    pub(crate) fn open() -> Self {
        let any = ("::", SERVER_PORT);
        Self { _udp: UdpSocket::bind(any).unwrap(), _tcp: TcpListener::bind(any).unwrap() }
    }
}

impl Testbed {
    /// Makes the programs redirect queries for `vip` to a server on the node, for `lease` ns; with 0, the lease has
    /// expired already. Also marks the loopback device, where test runs arrive, as a device of a pod.
    pub(crate) fn intercept(&mut self, vip: Address, server: Address, lease: u64) {
        let until = if lease == 0 { 2 } else { monotonic_nanoseconds() + lease };
        for protocol in [UDP, TCP] {
            let query = ServiceKey::new(vip, 53, protocol);
            self.add_intercept(query, DnsIntercept::to_server(server, SERVER_PORT, until));
            let answer = ServiceKey::new(server, SERVER_PORT, protocol);
            self.add_intercept(answer, DnsIntercept::to_client(vip));
        }
        let device = DeviceInfo { flags: device_flags::WORKLOAD, ..DeviceInfo::UNKNOWN };
        self.insert("DEVICES", 1_u32, device);
    }

    fn add_intercept(&mut self, key: ServiceKey, value: DnsIntercept) {
        Mark::of_intercept(&key).iter().for_each(|mark| mark.set(self.filter()));
        self.insert("DNS_INTERCEPT", key, value);
    }
}

/// The DNS Service, at the cluster IP.
fn service(family: Family) -> SocketAddr {
    SocketAddr::new(family.vip().ip(), 53)
}

/// The agent's server, at the node's address.
fn server(family: Family) -> SocketAddr {
    SocketAddr::new(family.node(), SERVER_PORT)
}

/// Writes the DNS Service and the interception.
fn set_up(bed: &mut Testbed, family: Family, lease: u64) {
    for protocol in [UDP, TCP, SCTP] {
        bed.service(service(family), protocol, &[family.backend()]);
    }
    bed.intercept(service(family).ip().into(), family.node().into(), lease);
}

fn query(family: Family) -> Packet {
    Packet::udp(family.client(), service(family), b"who is web?")
}

fn syn(family: Family, port: u16) -> Packet {
    Packet::tcp(SocketAddr::new(family.client().ip(), port), service(family), 1000, b"").syn()
}

#[test]
fn query_goes_to_the_server_and_the_answer_comes_from_the_cluster_ip() {
    each("a server that answers", |bed, family| {
        let _sockets = Sockets::open();
        set_up(bed, family, LONG);
        bed.send(Hook::Ingress, &query(family)).passes(DnsQuery, &query(family).to(server(family)));
        bed.send(Hook::Ingress, &syn(family, 1000)).passes(DnsQuery, &syn(family, 1000).to(server(family)));
        let ack = Packet::tcp(family.client(), service(family), 1001, b"who is web?").ack(5001);
        bed.send(Hook::Ingress, &ack).passes(Forward, &ack.clone().to(server(family)));
        let answer = Packet::udp(server(family), family.client(), b"10.96.0.10");
        bed.send(Hook::Egress, &answer).passes(DnsAnswer, &answer.clone().from(service(family)));
        let segment = Packet::tcp(server(family), family.client(), 5000, b"").syn().ack(1001);
        bed.send(Hook::Egress, &segment).passes(DnsAnswer, &segment.clone().from(service(family)));
        assert!(bed.flows().is_empty(), "neither needs a flow");
    });
}

#[test]
fn endpoints_of_the_service_answer_when_the_server_does_not() {
    each("no socket", |bed, family| {
        set_up(bed, family, LONG);
        bed.send(Hook::Ingress, &query(family)).passes(NewFlow, &query(family).to(family.backend()));
        bed.send(Hook::Ingress, &syn(family, 1000)).passes(NewFlow, &syn(family, 1000).to(family.backend()));
    });
    each("a lease that is over", |bed, family| {
        let _sockets = Sockets::open();
        set_up(bed, family, 0);
        bed.send(Hook::Ingress, &query(family)).passes(NewFlow, &query(family).to(family.backend()));
        bed.send(Hook::Ingress, &syn(family, 1000)).passes(NewFlow, &syn(family, 1000).to(family.backend()));
    });
}

#[test]
fn only_dns_of_pods_goes_to_the_server() {
    each("packets that are no queries of a pod", |bed, family| {
        let _sockets = Sockets::open();
        set_up(bed, family, LONG);
        let metrics = SocketAddr::new(service(family).ip(), 9153);
        bed.service(metrics, TCP, &[family.backend()]);
        let to_metrics = Packet::tcp(family.client(), metrics, 1000, b"").syn();
        bed.send(Hook::Ingress, &to_metrics).passes(NewFlow, &to_metrics.clone().to(family.backend()));
        let sctp = Packet::sctp(family.client(), service(family), 0, 1, &[0; 16]);
        bed.send(Hook::Ingress, &sctp).passes(NewFlow, &sctp.clone().to(family.backend()));
        let of_other_port = Packet::udp(SocketAddr::new(family.node(), 53), family.client(), b"10.96.0.10");
        bed.send(Hook::Egress, &of_other_port).passes_untouched(NoService);
        bed.clear::<u32, DeviceInfo>("DEVICES");
        bed.send(Hook::Ingress, &query(family)).passes(NewFlow, &query(family).to(family.backend()));
        let answer = Packet::udp(server(family), family.stranger(), b"10.96.0.10");
        bed.send(Hook::Egress, &answer).passes_untouched(NoService);
    });
}

#[test]
fn connection_that_begins_again_leaves_its_endpoint_for_the_server() {
    each_on(&[Device::Ethernet], "a client port that is used again", |bed, family| {
        let _sockets = Sockets::open();
        set_up(bed, family, 0);
        let first = syn(family, 1000);
        bed.send(Hook::Ingress, &first).passes(NewFlow, &first.clone().to(family.backend()));
        let reset = Packet::tcp(family.backend(), SocketAddr::new(family.client().ip(), 1000), 0, b"")
            .rst()
            .ack(1001);
        bed.send(Hook::Egress, &reset).passes_any(lb_common::Outcome::Reply);
        assert_eq!(bed.flows().len(), 2);
        bed.intercept(service(family).ip().into(), family.node().into(), LONG);
        let again = first.with(|packet| packet.tcp_header().sequence_number = 900_000);
        bed.send(Hook::Ingress, &again).passes(DnsQuery, &again.clone().to(server(family)));
        assert!(bed.flows().is_empty(), "the earlier connection is forgotten: {:?}", bed.flows());
    });
}
