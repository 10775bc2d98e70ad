//! `ClientIP` session affinity.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use bytemuck::Zeroable as _;
use lb_common::{Outcome, Service};

use super::{
    packets::Packet,
    stage::{Family, each},
    testbed::{Hook, Testbed, UDP},
};

const TIMEOUT: u32 = 600;

fn with_affinity(id: u32) -> Service {
    Service { id, affinity_seconds: TIMEOUT, ..Service::zeroed() }
}

fn backends(family: Family, ports: std::ops::RangeInclusive<u16>) -> Vec<SocketAddr> {
    ports.map(|port| SocketAddr::new(family.backend().ip(), port)).collect()
}

/// Opens a flow, and returns its backend.
fn connect(bed: &mut Testbed, client: IpAddr, port: u16, vip: SocketAddr) -> SocketAddr {
    let packet = Packet::udp(SocketAddr::new(client, port), vip, b"x");
    let sent = bed.send(Hook::Ingress, &packet);
    let to = bed.flows()[&packet.tuple()].to;
    let backend = to.destination_socket();
    sent.passes(Outcome::NewFlow, &packet.to(backend));
    backend
}

/// Opens 24 new flows and returns their backends. The probability that 24 random choices among 8 are all the same is
/// less than one in 10^20.
fn connect_often(bed: &mut Testbed, client: IpAddr, first: u16, vip: SocketAddr) -> BTreeSet<SocketAddr> {
    (first..first + 24).map(|port| connect(bed, client, port, vip)).collect()
}

#[test]
fn affinity_sends_a_client_to_one_backend() {
    each("affinity", |bed, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bed.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        assert_eq!(connect_often(bed, client, 1000, vip).len(), 1);
        // Affinity is per client and per Service port.
        bed.service_with(family.other_vip(), UDP, &backends(family, 9001..=9008), with_affinity(2));
        assert_eq!(connect_often(bed, client, 2000, family.other_vip()).len(), 1);
        assert_eq!(connect_often(bed, family.stranger().ip(), 3000, vip).len(), 1);
        assert_eq!(connect_often(bed, client, 4000, vip), connect_often(bed, client, 5000, vip));
    });
}

#[test]
fn flows_spread_without_affinity() {
    each("no affinity", |bed, family| {
        bed.service(family.vip(), UDP, &backends(family, 8001..=8008));
        assert!(connect_often(bed, family.client().ip(), 1000, family.vip()).len() > 1);
    });
}

#[test]
fn client_of_a_removed_backend_gets_another_and_keeps_it() {
    each("affinity, backend gone", |bed, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bed.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        let first = connect_often(bed, client, 1000, vip);
        let others: Vec<_> =
            backends(family, 8001..=8008).into_iter().filter(|backend| !first.contains(backend)).collect();
        bed.service_with(vip, UDP, &others, with_affinity(1));
        let second = connect_often(bed, client, 2000, vip);
        assert_eq!(second.len(), 1);
        // The client stays pinned to the second backend after the first one has returned.
        bed.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        assert_eq!(connect_often(bed, client, 3000, vip), second);
    });
}

#[test]
fn affinity_expires_a_timeout_after_the_last_connection() {
    each("affinity, timeout", |bed, family| {
        let (client, vip) = (family.client().ip(), family.vip());
        bed.service_with(vip, UDP, &backends(family, 8001..=8008), with_affinity(1));
        let first = connect(bed, client, 999, vip);
        for port in 1000..1010 {
            bed.age_affinity(TIMEOUT * 9 / 10);
            assert_eq!(connect(bed, client, port, vip), first, "each connection renews the affinity");
        }
        let mut later = BTreeSet::new();
        for port in 2000..2024 {
            bed.age_affinity(TIMEOUT * 11 / 10);
            later.insert(connect(bed, client, port, vip));
        }
        assert!(later.len() > 1);
    });
}
