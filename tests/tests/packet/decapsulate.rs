//! Packets that come in a tunnel to the node of their backend. (Only with an Ethernet header: a test run takes the first 14
//! octets of any packet for one, and the kernel would move what is behind them.)

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::{
    FrontendKind, Networks, Outcome, Outcome::*, Service, Settings, backend_flags, conntrack::Phase,
    service_flags,
};

use super::{
    bench::{Bench, Hook, SCTP, TCP, UDP},
    packets::{Packet, VLAN, fragments},
    stage::{Family, each, each_ethernet},
    tunnel::{Kind, in_tunnel, service, service_of, settings},
};

/// Another node, from which tunnels come.
fn peer(family: Family) -> IpAddr {
    match family {
        Family::V4 => [198, 51, 100, 77].into(),
        Family::V6 => "2001:db8:b::77".parse().unwrap(),
    }
}

/// The packet as it arrives in a tunnel to the backend, from `source`.
fn arrives_from(source: IpAddr, kind: Kind, family: Family, packet: &Packet) -> Packet {
    in_tunnel(kind, 50_001, source, family.backend().ip(), packet).bounced()
}

fn arrives(kind: Kind, family: Family, packet: &Packet) -> Packet {
    arrives_from(peer(family), kind, family, packet)
}

fn node(bench: &mut Bench, family: Family, protocol: u8, flags: u16) {
    bench.settings(&settings(Kind::Ipip));
    // Sorted; the one that is meant is the last.
    let backends = [family.backend(), family.other_backend()];
    service(bench, family.vip(), protocol, &backends, flags);
}

fn each_kind(bench: &mut Bench, mut test: impl FnMut(&mut Bench, Kind)) {
    for kind in Kind::BOTH {
        bench.label(&format!("{kind:?}"));
        bench.forget_flows();
        test(bench, kind);
    }
}

#[test]
fn a_connection_reaches_the_very_backend_and_answers_bear_the_virtual_address() {
    each_ethernet("decapsulated TCP", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, TCP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            // More than one, so that chance would show.
            for port in 40_000..40_010 {
                let client = SocketAddr::new(client.ip(), port);
                let syn = Packet::tcp(client, vip, 1000, b"").syn();
                bench
                    .send(Hook::Ingress, &arrives(kind, family, &syn))
                    .passes(NewFlow, &syn.clone().to(backend));
                let syn_ack = Packet::tcp(backend, client, 5000, b"").syn().ack(1001);
                bench.send(Hook::Egress, &syn_ack).passes(Reply, &syn_ack.clone().from(vip));
                let data = Packet::tcp(client, vip, 1001, b"odd").ack(5001);
                let expected = data.clone().to(backend);
                bench.send(Hook::Ingress, &arrives(kind, family, &data)).passes(Decapsulated, &expected);
                bench.assert_flow(&data, &expected, Phase::Established);
                // What comes without a tunnel is of the same flow.
                bench.send(Hook::Ingress, &data).passes(Forward, &expected);
            }
            bench.assert_flows(10);
        });
    });
}

#[test]
fn datagrams_and_sctp() {
    each_ethernet("decapsulated, others", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, UDP, backend_flags::LOCAL);
        node(bench, family, SCTP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let question = Packet::udp(client, vip, b"?");
            let translated = question.clone().to(backend);
            bench.send(Hook::Ingress, &arrives(kind, family, &question)).passes(NewFlow, &translated);
            bench.send(Hook::Ingress, &arrives(kind, family, &question)).passes(Decapsulated, &translated);
            let init = Packet::sctp(client, vip, 0, 1, &[3; 16]);
            bench
                .send(Hook::Ingress, &arrives(kind, family, &init))
                .passes(NewFlow, &init.clone().to(backend));
        });
    });
}

#[test]
fn tags_options_and_padding_of_the_outside() {
    each_ethernet("decapsulated, odd outsides", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, UDP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let question = Packet::udp(client, vip, b"?");
            let outer = arrives(kind, family, &question);
            if family == Family::V4 {
                let options = outer.clone().with(|outer| {
                    outer.v4().options = [1, 1, 1, 0][..].try_into().unwrap();
                });
                let run = bench.send(Hook::Ingress, &options);
                run.passes(NewFlow, &question.clone().to(backend));
            }
            let padded = outer.clone().padded();
            let expected = question.clone().to(backend).with(|packet| packet.padding = padded.padding);
            let run = bench.send(Hook::Ingress, &padded);
            let outcome = if family == Family::V4 { Decapsulated } else { NewFlow };
            run.passes(outcome, &expected);
            // Whose device is another one, on top of this one.
            let tagged = outer.with(|outer| outer.tags().push((VLAN, 7)));
            bench.send(Hook::Ingress, &tagged).passes_unchanged();
        });
    });
}

#[test]
fn only_peers_are_heard() {
    each("tunnels of others", |bench, family| {
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        node(bench, family, TCP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let outer = arrives_from(family.stranger().ip(), kind, family, &syn);
            bench.send(Hook::Ingress, &outer).drops(TunnelRefused);
            bench.assert_flows(0);
            bench.settings(&Settings { peers: Networks::new([]), ..settings(kind) });
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).drops(TunnelRefused);
            bench.settings(&Settings::zeroed());
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).drops(TunnelRefused);
            bench.settings(&settings(kind));
        });
    });
}

/// Those of others, which this node only leads on, and what pods send each other.
#[test]
fn tunnels_that_do_not_end_here_pass() {
    each("tunnels that pass", |bench, family| {
        let (client, vip) = (family.client(), family.vip());
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        node(bench, family, TCP, backend_flags::PEER);
        let untouched = |bench: &mut Bench, kind: Kind, what: &str, packet: &Packet| {
            bench.label(what);
            let outcome: Outcome = if kind == Kind::Gue { NoService } else { NotTransport };
            bench.send(Hook::Ingress, packet).passes_untouched(outcome);
            bench.send(Hook::Egress, packet).passes_untouched(outcome);
            bench.assert_flows(0);
        };
        each_kind(bench, |bench, kind| {
            untouched(bench, kind, "the backend of another node", &arrives(kind, family, &syn));
            let elsewhere = syn.clone().to(family.stranger());
            untouched(bench, kind, "no service", &arrives(kind, family, &elsewhere));
            let echo = Packet::icmp(client.ip(), vip.ip(), [8, 0], [0; 4], b"ping");
            untouched(bench, kind, "no transport", &arrives(kind, family, &echo));
            let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
            let mixed = Packet::tcp(other.client(), other.vip(), 1000, b"").syn();
            let mixed = in_tunnel(kind, 50_001, peer(family), family.backend().ip(), &mixed);
            untouched(bench, kind, "another family", &mixed.bounced());
            for part in fragments(&arrives(kind, family, &syn), 5, 8).into_iter().take(1) {
                if kind == Kind::Ipip {
                    untouched(bench, kind, "a tunnel in parts", &part);
                }
            }
        });
    });
}

#[test]
fn a_service_on_the_port_of_tunnels_is_served() {
    each("a service on 6080", |bench, family| {
        bench.settings(&settings(Kind::Gue));
        let vip = SocketAddr::new(family.vip().ip(), 6080);
        bench.service(vip, UDP, &[family.backend()]);
        let question = Packet::udp(family.client(), vip, b"E is an octet that begins IPv4");
        bench.send(Hook::Ingress, &question).passes(NewFlow, &question.clone().to(family.backend()));
    });
}

#[test]
fn node_ports_of_peers_are_ours() {
    each_ethernet("decapsulated, node ports", |bench, family| {
        let (client, backend) = (family.client(), family.backend());
        let own = SocketAddr::new(family.node(), 30_080);
        let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
        bench.settings(&settings(Kind::Ipip));
        service_of(bench, own, TCP, &[backend], backend_flags::LOCAL, record);
        each_kind(bench, |bench, kind| {
            let theirs = SocketAddr::new(peer(family), 30_080);
            let syn = Packet::tcp(client, theirs, 1000, b"").syn();
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            let ack = Packet::tcp(client, theirs, 1001, b"x").ack(5001);
            bench
                .send(Hook::Ingress, &arrives(kind, family, &ack))
                .passes(Decapsulated, &ack.clone().to(backend));
            let answer = Packet::tcp(backend, client, 5001, b"y").ack(1002);
            bench.send(Hook::Egress, &answer).passes(Reply, &answer.clone().from(theirs));
            // That of a stranger is none, and other ports of a node are not.
            for to in [SocketAddr::new(family.stranger().ip(), 30_080), SocketAddr::new(peer(family), 80)] {
                let syn = Packet::tcp(client, to, 1000, b"").syn();
                bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes_unchanged();
            }
        });
    });
}

#[test]
fn a_flow_that_goes_on_needs_no_service_and_a_new_one_does() {
    each_ethernet("decapsulated, backend removed", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        each_kind(bench, |bench, kind| {
            node(bench, family, TCP, backend_flags::LOCAL);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            service(bench, vip, TCP, &[family.other_backend()], backend_flags::LOCAL);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            let run = bench.send(Hook::Ingress, &arrives(kind, family, &data));
            run.passes(Decapsulated, &data.clone().to(backend));
            let other = Packet::tcp(SocketAddr::new(client.ip(), 41_000), vip, 1000, b"").syn();
            bench.send(Hook::Ingress, &arrives(kind, family, &other)).passes_unchanged();
            bench.forget_services();
        });
    });
}

/// A connection of which this node knows nothing, because its agent was cleaned up or another node took it over.
#[test]
fn a_connection_is_picked_up_in_its_middle_and_a_stray_reset_is_not() {
    each_ethernet("decapsulated, mid-flow", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, TCP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let reset = Packet::tcp(client, vip, 1001, b"").rst();
            bench.send(Hook::Ingress, &arrives(kind, family, &reset)).drops(StrayReset);
            bench.assert_flows(0);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            bench
                .send(Hook::Ingress, &arrives(kind, family, &data))
                .passes(NewFlow, &data.clone().to(backend));
        });
    });
}

/// This node has sent the connection elsewhere before: what arrives in a tunnel now never goes into another one, so that
/// nodes that disagree send no packet round in circles.
#[test]
fn what_has_left_a_tunnel_never_enters_another() {
    super::wire::each_on_wires("tunnel to tunnel", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.settings(&settings(Kind::Ipip));
        each_kind(bench, |bench, kind| {
            service(bench, vip, TCP, &[family.other_backend()], backend_flags::PEER);
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.arrive_at_tc(&syn).check(super::wire::TC_ACT_REDIRECT, &[(NewTunnelledFlow, 1)]);
            service(bench, vip, TCP, &[backend], backend_flags::LOCAL);
            let data = Packet::tcp(client, vip, 1001, b"x").ack(5001);
            bench
                .send(Hook::Ingress, &arrives(kind, family, &data))
                .passes(NewFlow, &data.clone().to(backend));
            bench.assert_flows(1);
            assert!(bench.flows().values().all(|flow| !flow.is_tunnelled()));
        });
    });
}

#[test]
fn a_new_connection_from_the_same_port_replaces_the_one_that_is_over() {
    each_ethernet("decapsulated, again", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, TCP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            let translated = syn.clone().to(backend);
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &translated);
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(Decapsulated, &translated);
            let fin = Packet::tcp(client, vip, 1001, b"").fin().ack(5001);
            bench
                .send(Hook::Ingress, &arrives(kind, family, &fin))
                .passes(Decapsulated, &fin.clone().to(backend));
            let fin = Packet::tcp(backend, client, 5001, b"").fin().ack(1002);
            bench.send(Hook::Egress, &fin).passes(Reply, &fin.clone().from(vip));
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &translated);
            bench.assert_flow(&syn, &translated, Phase::Opening);
        });
    });
}

#[test]
fn fragments_that_come_in_tunnels() {
    each_ethernet("decapsulated fragments", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, UDP, backend_flags::LOCAL);
        let whole = Packet::udp(client, vip, &[9; 301]);
        for (number, kind) in (70..).zip(Kind::BOTH) {
            bench.forget_flows();
            let parts = fragments(&whole, number, 128);
            let translated = fragments(&whole.clone().to(backend), number, 128);
            bench.send(Hook::Ingress, &arrives(kind, family, &parts[1])).passes_unchanged();
            for (index, outcome) in [(0, NewFlow), (2, Decapsulated), (1, Decapsulated)] {
                let run = bench.send(Hook::Ingress, &arrives(kind, family, &parts[index]));
                run.passes(outcome, &translated[index]);
            }
        }
    });
}

#[test]
fn errors_about_answers_find_the_backend() {
    each_ethernet("decapsulated errors", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        node(bench, family, TCP, backend_flags::LOCAL);
        each_kind(bench, |bench, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).goes_on(NewFlow);
            let sent = Packet::tcp(backend, client, 5000, &[1; 1000]).ack(1001);
            let length = if family == Family::V4 { 28 } else { 48 };
            let (original, seen) = super::icmp::quote(&sent, &sent.clone().from(vip), length);
            let code = if family == Family::V4 { [3, 4] } else { [2, 0] };
            let error = Packet::icmp(family.router(), vip.ip(), code, [0, 0, 5, 0x78], &seen);
            let expected = Packet::icmp(family.router(), backend.ip(), code, [0, 0, 5, 0x78], &original);
            bench.send(Hook::Ingress, &arrives(kind, family, &error)).passes(IcmpError, &expected);
            let stranger = arrives_from(family.stranger().ip(), kind, family, &error);
            bench.send(Hook::Ingress, &stranger).drops(TunnelRefused);
            // That of another flow.
            bench.forget_flows();
            bench.send(Hook::Ingress, &arrives(kind, family, &error)).passes_unchanged();
        });
    });
}

/// A node whose own mode is another one takes what a peer sends.
#[test]
fn the_mode_of_the_node_that_sends_counts() {
    each_ethernet("decapsulated, SNAT here", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.settings(&settings(Kind::Ipip));
        let (backends_base, backends_count) = bench.slice(&[backend], backend_flags::LOCAL);
        let key = lb_common::ServiceKey::new(vip.ip().into(), vip.port(), TCP);
        let flags = service_flags::MASQUERADE;
        let record = Service { id: 1, backends_base, backends_count, flags, ..Service::zeroed() };
        bench.record(&key, &record.sealed(&key));
        each_kind(bench, |bench, kind| {
            let syn = Packet::tcp(client, vip, 1000, b"").syn();
            bench.send(Hook::Ingress, &arrives(kind, family, &syn)).passes(NewFlow, &syn.clone().to(backend));
            bench.assert_flows(1);
        });
    });
}
