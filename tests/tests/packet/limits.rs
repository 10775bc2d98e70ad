//! Limits on new connections.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{
    ConnectionLimits, ConnectionRate,
    Outcome::{self, ConnectionLimited, Forward, NewFlow},
    Service, ServiceClient, service_flags,
};

use super::{
    packets::Packet,
    stage::{Family, each},
    testbed::{Hook, TCP, Testbed, UDP},
};

const ID: u32 = 1;
/// No token returns while a test runs.
const ONE: ConnectionRate = ConnectionRate { connections: 1, seconds: 60 };
const TWO: ConnectionRate = ConnectionRate { connections: 2, seconds: 60 };

/// Writes a Service with these limits, for TCP and UDP.
fn limited(bed: &mut Testbed, family: Family, service: ConnectionRate, client: ConnectionRate) {
    let record = Service { id: ID, flags: service_flags::LIMITED, ..Service::zeroed() };
    for protocol in [TCP, UDP] {
        bed.service_with(family.vip(), protocol, &[family.backend()], record);
    }
    bed.insert("LIMITS", ID, ConnectionLimits { service, client });
}

fn syn(family: Family, client: IpAddr, port: u16) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1000, b"").from(SocketAddr::new(client, port)).syn()
}

fn begins(bed: &mut Testbed, family: Family, packet: &Packet) {
    bed.send(Hook::Ingress, packet).passes(NewFlow, &packet.clone().to(family.backend()));
}

fn is_dropped(bed: &mut Testbed, packet: &Packet) {
    bed.send(Hook::Ingress, packet).drops(ConnectionLimited);
}

#[test]
fn client_beyond_its_limit_is_dropped_and_others_are_not() {
    each("limit of each client", |bed, family| {
        limited(bed, family, ConnectionRate::NONE, TWO);
        let (client, stranger) = (family.client().ip(), family.stranger().ip());
        let first = syn(family, client, 1000);
        begins(bed, family, &first);
        begins(bed, family, &syn(family, client, 1001));
        for port in [1002, 1003] {
            is_dropped(bed, &syn(family, client, port));
        }
        let datagram = Packet::udp(SocketAddr::new(client, 1004), family.vip(), b"x");
        is_dropped(bed, &datagram);
        // Packets of a flow that has begun take no token.
        bed.send(Hook::Ingress, &first).passes(Forward, &first.clone().to(family.backend()));
        if family == Family::V4 {
            begins(bed, family, &syn(family, stranger, 1000));
        } else {
            // The stranger has an address of the client's /64 network.
            is_dropped(bed, &syn(family, stranger, 1000));
            begins(bed, family, &syn(family, "2001:db8:c:1::9".parse().unwrap(), 1000));
        }
    });
}

#[test]
fn limit_of_the_service_counts_all_clients() {
    each("limit of the service", |bed, family| {
        limited(bed, family, TWO, ConnectionRate::NONE);
        begins(bed, family, &syn(family, family.client().ip(), 1000));
        begins(bed, family, &syn(family, family.stranger().ip(), 1000));
        is_dropped(bed, &syn(family, family.client().ip(), 1001));
        is_dropped(bed, &syn(family, family.stranger().ip(), 1001));
    });
}

#[test]
fn refused_client_takes_no_token_of_the_service() {
    each("both limits", |bed, family| {
        let other =
            if family == Family::V4 { family.stranger().ip() } else { "2001:db8:c:1::9".parse().unwrap() };
        limited(bed, family, TWO, ONE);
        begins(bed, family, &syn(family, family.client().ip(), 1000));
        for port in 1001..1010 {
            is_dropped(bed, &syn(family, family.client().ip(), port));
        }
        begins(bed, family, &syn(family, other, 1000));
    });
}

#[test]
fn segments_within_a_connection_take_no_token() {
    each("a connection that another node has begun", |bed, family| {
        limited(bed, family, ConnectionRate::NONE, ONE);
        begins(bed, family, &syn(family, family.client().ip(), 1000));
        for port in 1001..1004 {
            let segment =
                Packet::tcp(SocketAddr::new(family.client().ip(), port), family.vip(), 1000, b"x").ack(1);
            begins(bed, family, &segment);
        }
    });
}

#[test]
fn service_without_an_entry_in_the_map_has_no_limit() {
    each("a flag without limits", |bed, family| {
        let record = Service { id: ID, flags: service_flags::LIMITED, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[family.backend()], record);
        for port in 1000..1005 {
            begins(bed, family, &syn(family, family.client().ip(), port));
        }
    });
}

#[test]
fn tokens_return_with_time() {
    each("a bucket that is filling", |bed, family| {
        limited(bed, family, ConnectionRate::NONE, TWO);
        let client = family.client().ip();
        let network = match client {
            IpAddr::V4(_) => client,
            IpAddr::V6(_) => "2001:db8:c::".parse().unwrap(),
        };
        let key = ServiceClient { client: network.into(), service: ID };
        let full_in = |seconds: u64| lb_datapath::monotonic_nanoseconds() + seconds * 1_000_000_000;
        bed.insert("LIMIT_BUCKETS", key, full_in(35));
        is_dropped(bed, &syn(family, client, 1000));
        bed.insert("LIMIT_BUCKETS", key, full_in(25));
        begins(bed, family, &syn(family, client, 1000));
        let (full_at, expected): (u64, u64) = (bed.read("LIMIT_BUCKETS", key).unwrap(), full_in(55));
        assert!(full_at.abs_diff(expected) < 20_000_000_000, "{full_at} is not about {expected}");
        is_dropped(bed, &syn(family, client, 1001));
    });
}

#[test]
fn raised_limit_applies_at_once() {
    const MANY: ConnectionRate = ConnectionRate { connections: 1000, seconds: 1 };
    each("a limit that is raised", |bed, family| {
        limited(bed, family, TWO, ONE);
        let client = family.client().ip();
        begins(bed, family, &syn(family, client, 1000));
        is_dropped(bed, &syn(family, client, 1001));
        bed.insert("LIMITS", ID, ConnectionLimits { service: MANY, client: MANY });
        begins(bed, family, &syn(family, client, 1001));
    });
}

#[test]
fn limited_connections_of_an_internal_client_are_limited_too() {
    each("an internal client", |bed, family| {
        limited(bed, family, ConnectionRate::NONE, ONE);
        bed.make_clients_internal();
        begins(bed, family, &syn(family, family.client().ip(), 1000));
        let outcome: Outcome = ConnectionLimited;
        bed.send(Hook::Ingress, &syn(family, family.client().ip(), 1001)).drops(outcome);
    });
}
