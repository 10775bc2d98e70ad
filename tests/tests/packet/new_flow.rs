//! The first packet of a flow: the choice of a backend, and the cases without one.

use std::{collections::BTreeSet, net::SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{Address, FrontendKind, Outcome, Service, ServiceKey, conntrack::Phase, service_flags};

use super::{
    packets::Packet,
    stage::{Family, each},
    testbed::{Hook, TCP, Testbed, UDP},
};

const PROTOCOLS: [u8; 2] = [TCP, UDP];

fn first(family: Family, protocol: u8) -> Packet {
    match protocol {
        TCP => Packet::tcp(family.client(), family.vip(), 1000, b"").syn(),
        _ => Packet::udp(family.client(), family.vip(), b"a question"),
    }
}

fn key(family: Family, protocol: u8) -> ServiceKey {
    ServiceKey::new(Address::from(family.vip().ip()), family.vip().port(), protocol)
}

/// Asserts that the packet is dropped, and that a second one is as well.
#[track_caller]
fn dropped(bed: &mut Testbed, packet: &Packet, outcome: Outcome) {
    for _ in 0..2 {
        bed.send(Hook::Ingress, packet).drops(outcome);
        bed.assert_flows(0);
    }
}

#[test]
fn every_backend_is_chosen_and_no_other() {
    each("choice", |bed, family| {
        let backends: Vec<SocketAddr> = (1..=4).map(|n| (family.backend().ip(), 8000 + n).into()).collect();
        bed.service(family.other_vip(), UDP, &[family.other_backend()]);
        bed.service(family.vip(), UDP, &backends);
        let mut chosen = BTreeSet::new();
        // 60 random choices of four backends miss one of them once in 8 million runs.
        for port in 1..=60 {
            let client = SocketAddr::new(family.client().ip(), port);
            let packet = Packet::udp(client, family.vip(), b"x");
            let sent = bed.send(Hook::Ingress, &packet);
            let to = bed.flows()[&packet.tuple()].to;
            let backend = to.destination_socket();
            sent.passes(Outcome::NewFlow, &packet.to(backend));
            chosen.insert(backend);
        }
        assert_eq!(Vec::from_iter(chosen), backends);
        bed.assert_flows(60);
    });
}

/// If the entry of a connection has expired or was lost, a packet without SYN opens a flow as well.
#[test]
fn mid_connection_segment_opens_a_flow() {
    each("no SYN", |bed, family| {
        bed.service(family.vip(), TCP, &[family.backend()]);
        let packet = Packet::tcp(family.client(), family.vip(), 1000, b"data").ack(5001);
        let translated = packet.clone().to(family.backend());
        bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
        bed.assert_flow(&packet, &translated, Phase::Opening);
    });
}

#[test]
fn backend_may_have_address_and_port_of_the_service() {
    each("VIP as backend", |bed, family| {
        for protocol in PROTOCOLS {
            bed.service(family.vip(), protocol, &[family.vip()]);
            let packet = first(family, protocol);
            bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &packet);
            let answer = packet.clone().from(family.vip()).to(family.client());
            bed.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer);
        }
    });
}

#[test]
fn stray_rst_is_dropped() {
    each("stray RST", |bed, family| {
        let to_vip = |seq| Packet::tcp(family.client(), family.vip(), seq, b"").rst();
        for backends in [&[family.backend()][..], &[]] {
            bed.service(family.vip(), TCP, backends);
            dropped(bed, &to_vip(1), Outcome::StrayReset);
            dropped(bed, &to_vip(1).ack(7), Outcome::StrayReset);
            dropped(bed, &to_vip(1).syn(), Outcome::StrayReset);
        }
    });
}

/// The combinations that netfilter calls INVALID. kube-proxy's rules drop such packets.
#[test]
fn segments_with_invalid_flags_are_dropped() {
    each("invalid flags", |bed, family| {
        let request = |seq| Packet::tcp(family.client(), family.vip(), seq, b"");
        let reply = |seq| Packet::tcp(family.backend(), family.client(), seq, b"");
        let invalid = [request(2), request(2).fin(), request(2).syn().fin(), request(2).syn().fin().ack(9)];
        bed.service(family.vip(), TCP, &[family.backend()]);
        for segment in &invalid {
            dropped(bed, segment, Outcome::InvalidFlags);
        }
        let syn = request(1).syn();
        bed.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &syn.clone().to(family.backend()));
        for segment in &invalid {
            bed.send(Hook::Ingress, segment).drops(Outcome::InvalidFlags);
        }
        for segment in [reply(5), reply(5).fin(), reply(5).syn().fin()] {
            bed.send(Hook::Egress, &segment).drops(Outcome::InvalidFlags);
        }
    });
}

#[test]
fn half_written_service_is_not_used() {
    each("torn record", |bed, family| {
        for protocol in PROTOCOLS {
            let key = key(family, protocol);
            let whole = Service { id: 1, backends_count: 1, ..Service::zeroed() }.sealed(&key);
            let torn = [
                ("seal", Service { seal: !whole.seal, ..whole }),
                ("count", Service { backends_count: 2, ..whole }),
                ("base", Service { backends_base: 3, ..whole }),
                ("id", Service { id: 2, ..whole }),
                ("affinity", Service { affinity_seconds: 60, ..whole }),
                ("scheduler", Service { scheduler: 1, ..whole }),
                ("kind", Service { kind: 1, ..whole }),
                ("flags", Service { flags: 1, ..whole }),
                ("whole, but for another key", whole.sealed(&ServiceKey::new(key.address, 1, protocol))),
            ];
            for (name, record) in torn {
                bed.label(name);
                bed.record(&key, &record);
                dropped(bed, &first(family, protocol), Outcome::TornService);
            }
        }
    });
}

#[test]
fn service_without_valid_backends_drops_packets() {
    each("no backend", |bed, family| {
        for protocol in PROTOCOLS {
            let key = key(family, protocol);
            for backends_base in [64, u32::MAX - 1] {
                let record = Service { id: 1, backends_base, backends_count: 1, ..Service::zeroed() };
                bed.record(&key, &record.sealed(&key));
                dropped(bed, &first(family, protocol), Outcome::NoBackend);
            }
        }
    });
}

/// A newer agent may have schedulers that this program lacks.
#[test]
fn unknown_scheduler_falls_back_to_a_random_backend() {
    each("unknown scheduler", |bed, family| {
        for protocol in PROTOCOLS {
            bed.service(family.vip(), protocol, &[family.backend()]);
            let key = key(family, protocol);
            let backends_base = u32::from(protocol == UDP);
            let record =
                Service { id: 1, backends_base, backends_count: 1, scheduler: 200, ..Service::zeroed() };
            bed.record(&key, &record.sealed(&key));
            let packet = first(family, protocol);
            let translated = packet.clone().to(family.backend());
            bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
        }
    });
}

/// Connections of the node, and those that netfilter masquerades, may use a node port's number as source port: replies
/// to them must pass. A SYN-ACK of no tracked flow answers a connection that bypassed the programs: it passes at every
/// address of a Service, also at one that is not an address of the node.
#[test]
fn replies_to_untracked_connections_pass_untouched() {
    each("answers to others", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for (kind, flags) in [
            (FrontendKind::NodePort, 0),
            (FrontendKind::LoadBalancer, service_flags::SYN_ONLY),
            (FrontendKind::LoadBalancer, 0),
        ] {
            let record = Service { id: 1, kind: kind as u8, flags, ..Service::zeroed() };
            bed.service_with(vip, TCP, &[backend], record);
            let accepts = Packet::tcp(client, vip, 5000, b"").syn().ack(1001);
            bed.send(Hook::Ingress, &accepts).passes_untouched(Outcome::NoService);
            let segment = Packet::tcp(client, vip, 5001, b"data").ack(1001);
            let reset = Packet::tcp(client, vip, 5001, b"").rst();
            if record.requires_syn() {
                bed.send(Hook::Ingress, &segment).passes_untouched(Outcome::NoService);
                bed.send(Hook::Ingress, &reset).passes_untouched(Outcome::NoService);
                bed.assert_flows(0);
            } else {
                bed.send(Hook::Ingress, &reset).drops(Outcome::StrayReset);
                bed.send(Hook::Ingress, &segment).passes(Outcome::NewFlow, &segment.clone().to(backend));
            }
            bed.clear_flows();
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &syn.clone().to(backend));
            bed.clear_flows();
        }
        // A SYN-ACK to a node port also passes if the Service has no backends.
        let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
        bed.service_with(vip, TCP, &[], record);
        let accepts = Packet::tcp(client, vip, 5000, b"").syn().ack(1001);
        bed.send(Hook::Ingress, &accepts).passes_untouched(Outcome::NoService);
    });
}
