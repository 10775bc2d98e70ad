//! Packets that arrive in a tunnel at the node of their backend. (The tests decapsulate only packets with an Ethernet
//! header. A test run treats the first 14 bytes of any packet as an Ethernet header, so without one the kernel would
//! keep these 14 bytes and remove the bytes after them.)

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{
    Address, FrontendKind, Networks, Outcome, Outcome::*, Service, Settings, backend_flags, conntrack::Phase,
    service_flags,
};

use super::{
    packets::{Packet, VLAN, fragments},
    stage::{Family, each, each_ethernet},
    testbed::{Hook, SCTP, TCP, Testbed, UDP},
    tunnel::{Kind, in_tunnel, service, service_of, settings},
};

/// The other end of the tunnels: an address of another node.
fn peer(family: Family) -> IpAddr {
    match family {
        Family::V4 => [198, 51, 100, 77].into(),
        Family::V6 => "2001:db8:b::77".parse().unwrap(),
    }
}

/// The packet in a tunnel from `source` to the backend, as it arrives.
fn arrives_from(source: IpAddr, kind: Kind, family: Family, packet: &Packet) -> Packet {
    in_tunnel(kind, 50_001, source, family.backend().ip(), packet).swapped_macs()
}

fn arrives(kind: Kind, family: Family, packet: &Packet) -> Packet {
    arrives_from(peer(family), kind, family, packet)
}

fn node(bed: &mut Testbed, family: Family, protocol: u8, flags: u16) {
    bed.settings(&settings(Kind::Ipip));
    bed.end_tunnels();
    // Backends must be sorted.
    let backends = [family.backend(), family.other_backend()];
    service(bed, family.vip(), protocol, &backends, flags);
}

fn each_kind(bed: &mut Testbed, mut test: impl FnMut(&mut Testbed, Kind)) {
    for kind in Kind::BOTH {
        bed.label(&format!("{kind:?}"));
        bed.clear_flows();
        test(bed, kind);
    }
}

#[test]
fn tunnelled_connection_reaches_the_addressed_backend_and_replies_come_from_the_vip() {
    each_ethernet("decapsulated TCP", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            // The test opens many connections, so that a random choice of the backend would be visible.
            for port in 40_000..40_010 {
                let client = SocketAddr::new(client.ip(), port);
                let syn = Packet::tcp(client, vip, 1000, b"").syn();
                bed.send(Hook::Ingress, &arrives(kind, family, &syn))
                    .passes(NewFlow, &syn.clone().to(backend));
                let syn_ack = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
                bed.send(Hook::Egress, &syn_ack).passes(Reply, &syn_ack.clone().from(vip));
                let data = Packet::tcp(client, vip, 1001, b"odd").ack(5001);
                let expected = data.clone().to(backend);
                bed.send(Hook::Ingress, &arrives(kind, family, &data)).passes(Decapsulated, &expected);
                bed.assert_flow(&data, &expected, Phase::Established);
                // A packet outside a tunnel belongs to the same flow.
                bed.send(Hook::Ingress, &data).passes(Forward, &expected);
            }
            bed.assert_flows(10);
        });
    });
}

#[test]
fn tunnelled_udp_and_sctp_reach_the_backend() {
    each_ethernet("decapsulated, others", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, UDP, backend_flags::LOCAL);
        node(bed, family, SCTP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let question = Packet::udp(client, vip, b"?");
            let translated = question.clone().to(backend);
            bed.send(Hook::Ingress, &arrives(kind, family, &question)).passes(NewFlow, &translated);
            bed.send(Hook::Ingress, &arrives(kind, family, &question)).passes(Decapsulated, &translated);
            let init = Packet::sctp(client, vip, 0, 1, &[3; 16]);
            bed.send(Hook::Ingress, &arrives(kind, family, &init)).passes(NewFlow, &init.clone().to(backend));
        });
    });
}

#[test]
fn outer_options_and_padding_are_accepted_and_tags_are_not() {
    each_ethernet("decapsulated, odd outsides", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, UDP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let question = Packet::udp(client, vip, b"?");
            let outer = arrives(kind, family, &question);
            if family == Family::V4 {
                let options = outer.clone().with(|outer| {
                    outer.v4().options = [1, 1, 1, 0][..].try_into().unwrap();
                });
                let run = bed.send(Hook::Ingress, &options);
                run.passes(NewFlow, &question.clone().to(backend));
            }
            let padded = outer.clone().padded();
            let expected = question.clone().to(backend).with(|packet| packet.padding = padded.padding);
            let run = bed.send(Hook::Ingress, &padded);
            let outcome = if family == Family::V4 { Decapsulated } else { NewFlow };
            run.passes(outcome, &expected);
            // A packet with a VLAN tag is for another device, stacked on this one.
            let tagged = outer.with(|outer| outer.tags().push((VLAN, 7)));
            bed.send(Hook::Ingress, &tagged).passes_unchanged();
        });
    });
}

#[test]
fn tunnels_from_other_hosts_than_peers_are_dropped() {
    each("tunnels of others", |bed, family| {
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let outer = arrives_from(family.stranger().ip(), kind, family, &syn);
            bed.send(Hook::Ingress, &outer).drops(TunnelRefused);
            bed.assert_flows(0);
            bed.settings(&Settings { peers: Networks::new([]), ..settings(kind) });
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).drops(TunnelRefused);
            bed.settings(&Settings::zeroed());
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).drops(TunnelRefused);
            bed.settings(&settings(kind));
        });
    });
}

/// The map `PEERS` contains the nodes that the API server names.
#[test]
fn known_node_is_a_peer_without_a_network_in_the_settings() {
    each_ethernet("a node in PEERS", |bed, family| {
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            bed.settings(&Settings { peers: Networks::new([]), ..settings(kind) });
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).drops(TunnelRefused);
            bed.insert("PEERS", Address::from(peer(family)), 1_u32);
            bed.send(Hook::Ingress, &arrives(kind, family, &syn))
                .passes(NewFlow, &syn.clone().to(family.backend()));
            let outer = arrives_from(family.stranger().ip(), kind, family, &syn);
            bed.send(Hook::Ingress, &outer).drops(TunnelRefused);
            bed.clear::<Address, u32>("PEERS");
            bed.settings(&settings(kind));
        });
    });
}

/// Tunnels between other nodes, which this node forwards, and tunnels between pods.
#[test]
fn tunnels_that_do_not_end_here_pass_untouched() {
    each("tunnels that pass", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        node(bed, family, TCP, backend_flags::PEER);
        let untouched = |bed: &mut Testbed, kind: Kind, what: &str, packet: &Packet| {
            bed.label(what);
            let outcome: Outcome = if kind == Kind::Gue { NoService } else { NotTransport };
            bed.send(Hook::Ingress, packet).passes_untouched(outcome);
            bed.send(Hook::Egress, packet).passes_untouched(outcome);
            bed.assert_flows(0);
        };
        each_kind(bed, |bed, kind| {
            untouched(bed, kind, "the backend of another node", &arrives(kind, family, &syn));
            let elsewhere = syn.clone().to(family.stranger());
            untouched(bed, kind, "no service", &arrives(kind, family, &elsewhere));
            let echo = Packet::icmp(client.ip(), vip.ip(), [8, 0], [0; 4], b"ping");
            untouched(bed, kind, "no transport", &arrives(kind, family, &echo));
            let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
            let mixed = Packet::tcp(other.client(), other.vip(), 1000, b"").syn();
            let mixed = in_tunnel(kind, 50_001, peer(family), family.backend().ip(), &mixed);
            untouched(bed, kind, "another family", &mixed.swapped_macs());
            for part in fragments(&arrives(kind, family, &syn), 5, 8).into_iter().take(1) {
                if kind == Kind::Ipip {
                    untouched(bed, kind, "a tunnel in parts", &part);
                }
            }
        });
    });
}

#[test]
fn service_on_the_tunnel_port_is_served() {
    each("a service on 6080", |bed, family| {
        bed.settings(&settings(Kind::Gue));
        bed.end_tunnels();
        let vip = SocketAddr::new(family.vip().ip(), 6080);
        bed.service(vip, UDP, &[family.backend()]);
        let question = Packet::udp(family.client(), vip, b"E is a byte that begins IPv4");
        bed.send(Hook::Ingress, &question).passes(NewFlow, &question.clone().to(family.backend()));
    });
}

#[test]
fn tunnelled_packets_to_node_ports_of_peers_are_served() {
    each_ethernet("decapsulated, node ports", |bed, family| {
        let (client, backend) = (family.client(), family.backend());
        let own = SocketAddr::new(family.node(), 30_080);
        let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
        bed.settings(&settings(Kind::Ipip));
        bed.end_tunnels();
        service_of(bed, own, TCP, &[backend], backend_flags::LOCAL, record);
        each_kind(bed, |bed, kind| {
            let theirs = SocketAddr::new(peer(family), 30_080);
            let syn = Packet::tcp(client, theirs, 1000, b"").syn();
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            let ack = Packet::tcp(client, theirs, 1001, b"x").ack(5001);
            bed.send(Hook::Ingress, &arrives(kind, family, &ack))
                .passes(Decapsulated, &ack.clone().to(backend));
            let answer = Packet::tcp(backend, client, 5001, b"y").ack(1002);
            bed.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(theirs));
            // Destinations that are no node ports: an address of no node, and another port of a node.
            for to in [SocketAddr::new(family.stranger().ip(), 30_080), SocketAddr::new(peer(family), 80)] {
                let syn = Packet::tcp(client, to, 1000, b"").syn();
                bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes_unchanged();
            }
        });
    });
}

#[test]
fn tunnelled_flow_outlives_its_backend_and_a_new_one_needs_it() {
    each_ethernet("decapsulated, backend removed", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        each_kind(bed, |bed, kind| {
            node(bed, family, TCP, backend_flags::LOCAL);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            service(bed, vip, TCP, &[family.other_backend()], backend_flags::LOCAL);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            let run = bed.send(Hook::Ingress, &arrives(kind, family, &data));
            run.passes(Decapsulated, &data.clone().to(backend));
            let other = Packet::tcp(SocketAddr::new(client.ip(), 41_000), vip, 1000, b"").syn();
            bed.send(Hook::Ingress, &arrives(kind, family, &other)).passes_unchanged();
            bed.clear_services();
        });
    });
}

/// This node has no entry for the connection: its flow table is new, or another node had the connection before.
#[test]
fn tunnelled_connection_is_picked_up_mid_flow_unless_by_a_rst() {
    each_ethernet("decapsulated, mid-flow", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let reset = Packet::tcp(client, vip, 1001, b"").rst();
            for reset in [reset.clone(), reset.syn()] {
                bed.send(Hook::Ingress, &arrives(kind, family, &reset)).drops(StrayReset);
            }
            bed.assert_flows(0);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            bed.send(Hook::Ingress, &arrives(kind, family, &data)).passes(NewFlow, &data.clone().to(backend));
        });
    });
}

/// This node has tunnelled the connection to another node before. A packet that arrives in a tunnel never enters
/// another tunnel, so that no packet loops between nodes that choose different backends.
#[test]
fn decapsulated_packet_never_enters_another_tunnel() {
    super::wire::each_on_wires("tunnel to tunnel", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.settings(&settings(Kind::Ipip));
        bed.end_tunnels();
        each_kind(bed, |bed, kind| {
            service(bed, vip, TCP, &[family.other_backend()], backend_flags::PEER);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.arrive_at_tc(&syn).check(super::wire::TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            service(bed, vip, TCP, &[backend], backend_flags::LOCAL);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            bed.send(Hook::Ingress, &arrives(kind, family, &data)).passes(NewFlow, &data.clone().to(backend));
            bed.assert_flows(1);
            assert!(bed.flows().values().all(|flow| !flow.is_tunnelled()));
        });
    });
}

#[test]
fn tunnelled_syn_from_the_same_port_replaces_an_ended_connection() {
    each_ethernet("decapsulated, again", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            let translated = syn.clone().to(backend);
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &translated);
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(Decapsulated, &translated);
            let fin = Packet::tcp(client, vip, 1001, b"").fin().ack(5001);
            bed.send(Hook::Ingress, &arrives(kind, family, &fin))
                .passes(Decapsulated, &fin.clone().to(backend));
            let fin = Packet::tcp(backend, client, 5001, b"").fin().ack(1002);
            bed.send(Hook::Egress, &fin).passes(Reply, &fin.clone().from(vip));
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &translated);
            bed.assert_flow(&syn, &translated, Phase::Opening);
        });
    });
}

#[test]
fn tunnelled_fragments_reach_the_backend() {
    each_ethernet("decapsulated fragments", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, UDP, backend_flags::LOCAL);
        let whole = Packet::udp(client, vip, &[9; 301]);
        for (number, kind) in (70..).zip(Kind::BOTH) {
            bed.clear_flows();
            let parts = fragments(&whole, number, 128);
            let translated = fragments(&whole.clone().to(backend), number, 128);
            bed.send(Hook::Ingress, &arrives(kind, family, &parts[1])).passes_unchanged();
            for (index, outcome) in [(0, NewFlow), (2, Decapsulated), (1, Decapsulated)] {
                let run = bed.send(Hook::Ingress, &arrives(kind, family, &parts[index]));
                run.passes(outcome, &translated[index]);
            }
        }
    });
}

#[test]
fn icmp_errors_about_direct_replies_reach_the_backend() {
    each_ethernet("decapsulated errors", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bed, family, TCP, backend_flags::LOCAL);
        each_kind(bed, |bed, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes_any(NewFlow);
            let sent = Packet::tcp(backend, client, 5000, &[1; 1000]).ack(1001);
            let length = if family == Family::V4 { 28 } else { 48 };
            let (original, seen) = super::icmp::quote(&sent, &sent.clone().from(vip), length);
            let code = if family == Family::V4 { [3, 4] } else { [2, 0] };
            let error = Packet::icmp(family.router(), vip.ip(), code, [0, 0, 5, 0x78], &seen);
            let expected = Packet::icmp(family.router(), backend.ip(), code, [0, 0, 5, 0x78], &original);
            bed.send(Hook::Ingress, &arrives(kind, family, &error)).passes(IcmpError, &expected);
            let stranger = arrives_from(family.stranger().ip(), kind, family, &error);
            bed.send(Hook::Ingress, &stranger).drops(TunnelRefused);
            // This node has no flow to which the error belongs.
            bed.clear_flows();
            bed.send(Hook::Ingress, &arrives(kind, family, &error)).passes_unchanged();
        });
    });
}

/// A node that masquerades clients itself (SNAT mode) also accepts tunnels from peers.
#[test]
fn tunnels_are_decapsulated_in_snat_mode() {
    each_ethernet("decapsulated, SNAT here", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.settings(&settings(Kind::Ipip));
        bed.end_tunnels();
        let (backends_base, backends_count) = bed.slice(&[backend], backend_flags::LOCAL);
        let key = lb_common::ServiceKey::new(vip.ip().into(), vip.port(), TCP);
        let flags = service_flags::MASQUERADE;
        let record = Service { id: 1, backends_base, backends_count, flags, ..Service::zeroed() };
        bed.record(&key, &record.sealed(&key));
        each_kind(bed, |bed, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bed.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            bed.assert_flows(1);
        });
    });
}
