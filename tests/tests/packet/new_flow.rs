//! The first packet of a flow: what is chosen, and what makes it impossible.

use std::{collections::BTreeSet, net::SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{Address, FrontendKind, Outcome, Service, ServiceKey, conntrack::Phase, service_flags};

use super::{
    bench::{Bench, Hook, TCP, UDP},
    packets::Packet,
    stage::{Family, each},
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

/// The packet is dropped, and so is the next one.
#[track_caller]
fn dropped(bench: &mut Bench, packet: &Packet, outcome: Outcome) {
    for _ in 0..2 {
        bench.send(Hook::Ingress, packet).drops(outcome);
        bench.assert_flows(0);
    }
}

#[test]
fn every_backend_is_chosen_and_nothing_else() {
    each("choice", |bench, family| {
        let backends: Vec<SocketAddr> = (1..=4).map(|n| (family.backend().ip(), 8000 + n).into()).collect();
        bench.service(family.other_vip(), UDP, &[family.other_backend()]);
        bench.service(family.vip(), UDP, &backends);
        let mut chosen = BTreeSet::new();
        // A backend is missed by 60 choices out of four once in 30 million runs.
        for port in 1..=60 {
            let client = SocketAddr::new(family.client().ip(), port);
            let packet = Packet::udp(client, family.vip(), b"x");
            let sent = bench.send(Hook::Ingress, &packet);
            let to = bench.flows()[&packet.tuple()].to;
            let backend = SocketAddr::new(to.destination.into(), to.destination_port);
            sent.passes(Outcome::NewFlow, &packet.to(backend));
            chosen.insert(backend);
        }
        assert_eq!(Vec::from_iter(chosen), backends);
        bench.assert_flows(60);
    });
}

/// The agent was restarted, or the entry has expired: what is not a SYN opens a flow just the same.
#[test]
fn a_segment_in_the_middle_of_a_connection_opens_a_flow() {
    each("no SYN", |bench, family| {
        bench.service(family.vip(), TCP, &[family.backend()]);
        let packet = Packet::tcp(family.client(), family.vip(), 1000, b"data").ack(5001);
        let translated = packet.clone().to(family.backend());
        bench.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
        bench.assert_flow(&packet, &translated, Phase::Opening);
    });
}

#[test]
fn a_backend_may_have_the_port_and_address_of_the_service() {
    each("VIP as backend", |bench, family| {
        for protocol in PROTOCOLS {
            bench.service(family.vip(), protocol, &[family.vip()]);
            let packet = first(family, protocol);
            bench.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &packet);
            let answer = packet.clone().from(family.vip()).to(family.client());
            bench.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer);
        }
    });
}

#[test]
fn stray_reset() {
    each("stray RST", |bench, family| {
        let to_vip = |seq| Packet::tcp(family.client(), family.vip(), seq, b"").rst();
        for backends in [&[family.backend()][..], &[]] {
            bench.service(family.vip(), TCP, backends);
            dropped(bench, &to_vip(1), Outcome::StrayReset);
            dropped(bench, &to_vip(1).ack(7), Outcome::StrayReset);
            dropped(bench, &to_vip(1).syn(), Outcome::StrayReset);
        }
    });
}

#[test]
fn torn_service() {
    each("torn record", |bench, family| {
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
                ("all of it, for another key", whole.sealed(&ServiceKey::new(key.address, 1, protocol))),
            ];
            for (name, record) in torn {
                bench.label(name);
                bench.record(&key, &record);
                dropped(bench, &first(family, protocol), Outcome::TornService);
            }
        }
    });
}

#[test]
fn a_service_that_points_nowhere() {
    each("no backend", |bench, family| {
        for protocol in PROTOCOLS {
            let key = key(family, protocol);
            for backends_base in [64, u32::MAX - 1] {
                let record = Service { id: 1, backends_base, backends_count: 1, ..Service::zeroed() };
                bench.record(&key, &record.sealed(&key));
                dropped(bench, &first(family, protocol), Outcome::NoBackend);
            }
        }
    });
}

/// A newer agent may know schedulers that this program does not.
#[test]
fn an_unknown_scheduler_still_finds_a_backend() {
    each("unknown scheduler", |bench, family| {
        for protocol in PROTOCOLS {
            bench.service(family.vip(), protocol, &[family.backend()]);
            let key = key(family, protocol);
            let backends_base = u32::from(protocol == UDP);
            let record =
                Service { id: 1, backends_base, backends_count: 1, scheduler: 200, ..Service::zeroed() };
            bench.record(&key, &record.sealed(&key));
            let packet = first(family, protocol);
            let translated = packet.clone().to(family.backend());
            bench.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
        }
    });
}

/// Connections of the node, and those that netfilter masquerades, have ports among the node ports: what comes back to them
/// is theirs. Whoever accepts a connection was asked for it past us, wherever that is.
#[test]
fn what_comes_back_to_connections_of_others_is_theirs() {
    each("answers to others", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        for (kind, flags) in [
            (FrontendKind::NodePort, 0),
            (FrontendKind::LoadBalancer, service_flags::SYN_ONLY),
            (FrontendKind::LoadBalancer, 0),
        ] {
            let record = Service { id: 1, kind: kind as u8, flags, ..Service::zeroed() };
            bench.service_with(vip, TCP, &[backend], record);
            let accepts = Packet::tcp(client, vip, 5000, b"").syn().ack(1001);
            bench.send(Hook::Ingress, &accepts).passes_untouched(Outcome::NoService);
            let segment = Packet::tcp(client, vip, 5001, b"data").ack(1001);
            let reset = Packet::tcp(client, vip, 5001, b"").rst();
            if record.requires_syn() {
                bench.send(Hook::Ingress, &segment).passes_untouched(Outcome::NoService);
                bench.send(Hook::Ingress, &reset).passes_untouched(Outcome::NoService);
                bench.assert_flows(0);
            } else {
                bench.send(Hook::Ingress, &reset).drops(Outcome::StrayReset);
                bench.send(Hook::Ingress, &segment).passes(Outcome::NewFlow, &segment.clone().to(backend));
            }
            bench.forget_flows();
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &syn.clone().to(backend));
            bench.forget_flows();
        }
        // Without backends nothing is sent to a stranger's connection either.
        let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
        bench.service_with(vip, TCP, &[], record);
        let accepts = Packet::tcp(client, vip, 5000, b"").syn().ack(1001);
        bench.send(Hook::Ingress, &accepts).passes_untouched(Outcome::NoService);
    });
}
