//! `ClientIP` session affinity.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use bytemuck::Zeroable as _;
use lb_common::{Outcome, Service};

use super::{
    bench::{Bench, Hook, UDP},
    packets::Packet,
    stage::{Family, each},
};

const TIMEOUT: u32 = 600;

fn with_affinity(id: u32) -> Service {
    Service { id, affinity_seconds: TIMEOUT, ..Service::zeroed() }
}

fn backends(family: Family, ports: std::ops::RangeInclusive<u16>) -> Vec<SocketAddr> {
    ports.map(|port| SocketAddr::new(family.backend().ip(), port)).collect()
}

/// The backend of a new flow.
fn connect(bench: &mut Bench, client: IpAddr, port: u16, vip: SocketAddr) -> SocketAddr {
    let packet = Packet::udp(SocketAddr::new(client, port), vip, b"x");
    let sent = bench.send(Hook::Ingress, &packet);
    let to = bench.flows()[&packet.tuple()].to;
    let backend = SocketAddr::new(to.destination.into(), to.destination_port);
    sent.passes(Outcome::NewFlow, &packet.to(backend));
    backend
}

/// The backends of 24 new flows: all of 8 backends the same by chance once in 10^20 runs.
fn connect_often(bench: &mut Bench, client: IpAddr, first: u16, vip: SocketAddr) -> BTreeSet<SocketAddr> {
    (first..first + 24).map(|port| connect(bench, client, port, vip)).collect()
}

#[test]
fn connections_of_one_client_go_to_one_backend() {
    each("affinity", |bench, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bench.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        assert_eq!(connect_often(bench, client, 1000, vip).len(), 1);
        // It is the client's: others have theirs, the same client has another for another service port.
        bench.service_with(family.other_vip(), UDP, &backends(family, 9001..=9008), with_affinity(2));
        assert_eq!(connect_often(bench, client, 2000, family.other_vip()).len(), 1);
        assert_eq!(connect_often(bench, family.stranger().ip(), 3000, vip).len(), 1);
        assert_eq!(connect_often(bench, client, 4000, vip), connect_often(bench, client, 5000, vip));
    });
}

#[test]
fn without_affinity_they_spread() {
    each("no affinity", |bench, family| {
        bench.service(family.vip(), UDP, &backends(family, 8001..=8008));
        assert!(connect_often(bench, family.client().ip(), 1000, family.vip()).len() > 1);
    });
}

#[test]
fn a_client_whose_backend_is_gone_gets_another_and_keeps_it() {
    each("affinity, backend gone", |bench, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bench.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        let first = connect_often(bench, client, 1000, vip);
        let others: Vec<_> =
            backends(family, 8001..=8008).into_iter().filter(|backend| !first.contains(backend)).collect();
        bench.service_with(vip, UDP, &others, with_affinity(1));
        let second = connect_often(bench, client, 2000, vip);
        assert_eq!(second.len(), 1);
        // That the first one is back changes nothing.
        bench.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        assert_eq!(connect_often(bench, client, 3000, vip), second);
    });
}

#[test]
fn it_lasts_until_the_timeout_after_the_last_connection() {
    each("affinity, timeout", |bench, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bench.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        let first = connect(bench, client, 999, vip);
        for port in 1000..1010 {
            bench.age_affinity(TIMEOUT * 9 / 10);
            assert_eq!(connect(bench, client, port, vip), first, "each connection renews it");
        }
        let mut later = BTreeSet::new();
        for port in 2000..2024 {
            bench.age_affinity(TIMEOUT * 11 / 10);
            later.insert(connect(bench, client, port, vip));
        }
        assert!(later.len() > 1);
    });
}
