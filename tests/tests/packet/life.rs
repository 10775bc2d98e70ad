//! Whole flows: each step replies to the result of the previous step.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{
    Endpoint, FrontendKind, Outcome, Service,
    conntrack::{Flow, Phase, Tick},
};

use super::{
    packets::Packet,
    reject::our_own,
    stage::{FIRST_PORT, Family, PORTS, each, each_on, masquerade_settings},
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

/// A connection to a Service with one backend.
struct Connection {
    family: Family,
}

impl Connection {
    /// A segment from the client to the VIP.
    fn client(&self, seq: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.family.client(), self.family.vip(), seq, payload)
    }

    /// A segment from the backend to the client.
    fn backend(&self, seq: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.family.backend(), self.family.client(), seq, payload)
    }

    /// Asserts that the client's segment arrives at the backend.
    #[track_caller]
    fn forward(&self, bed: &mut Testbed, packet: &Packet, outcome: Outcome, phase: Phase) {
        let translated = packet.clone().to(self.family.backend());
        bed.send(Hook::Ingress, packet).passes(outcome, &translated);
        bed.assert_flow(packet, &translated, phase);
        bed.assert_flows(1);
    }

    /// Asserts that the backend's segment arrives at the client, from the VIP.
    #[track_caller]
    fn reply(&self, bed: &mut Testbed, packet: &Packet, phase: Phase) {
        let translated = packet.clone().from(self.family.vip());
        bed.send(Hook::Egress, packet).passes(Outcome::Reply, &translated);
        let sent = self.client(0, &[]);
        bed.assert_flow(&sent, &sent.clone().to(self.family.backend()), phase);
        bed.assert_flows(1);
    }

    /// Opens the connection: SYN, SYN-ACK, ACK. Sequence numbers begin at 1000 (client) and 5000 (backend).
    #[track_caller]
    fn open(&self, bed: &mut Testbed) {
        bed.service(self.family.vip(), TCP, &[self.family.backend()]);
        self.forward(bed, &self.client(1000, &[]).syn(), Outcome::NewFlow, Phase::Opening);
        self.reply(bed, &self.backend(5000, &[]).syn().ack(1001), Phase::Accepted);
        self.forward(bed, &self.client(1001, &[]).ack(5001), Outcome::Forward, Phase::Established);
    }
}

#[test]
fn tcp_connection_is_tracked_from_syn_to_both_fins() {
    each("TCP, SYN to FIN", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        tcp.forward(
            bed,
            &tcp.client(1001, b"GET / HTTP/1.1\r\n\r\n").ack(5001),
            Outcome::Forward,
            Phase::Established,
        );
        tcp.reply(bed, &tcp.backend(5001, b"HTTP/1.1 204 No Content\r\n\r\n").ack(1019), Phase::Established);
        tcp.reply(bed, &tcp.backend(5028, &[]).fin().ack(1019), Phase::HalfClosed);
        tcp.forward(bed, &tcp.client(1019, b"more").ack(5029), Outcome::Forward, Phase::HalfClosed);
        tcp.forward(bed, &tcp.client(1023, &[]).fin().ack(5029), Outcome::Forward, Phase::TimeWait);
        tcp.reply(bed, &tcp.backend(5029, &[]).ack(1024), Phase::TimeWait);
    });
}

#[test]
fn udp_flow_is_tracked_in_both_directions() {
    each("UDP, question and answer", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        for (outcome, phase) in [(Outcome::NewFlow, Phase::Unreplied), (Outcome::Forward, Phase::Unreplied)] {
            let question = Packet::udp(client, vip, b"question");
            let translated = question.clone().to(backend);
            bed.send(Hook::Ingress, &question).passes(outcome, &translated);
            bed.assert_flow(&question, &translated, phase);
        }
        for payload in [&b"an answer of an odd length"[..], b"odd", b""] {
            let answer = Packet::udp(backend, client, payload);
            bed.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(vip));
        }
        let question = Packet::udp(client, vip, b"");
        bed.assert_flow(&question, &question.clone().to(backend), Phase::Replied);
        bed.assert_flows(1);
    });
}

#[test]
fn refused_connection_is_closed() {
    each("TCP, refused", |bed, family| {
        let tcp = Connection { family };
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &tcp.client(1000, &[]).syn(), Outcome::NewFlow, Phase::Opening);
        tcp.reply(bed, &tcp.backend(0, &[]).rst().ack(1001), Phase::Closed);
    });
}

#[test]
fn rst_closes_a_connection_only_within_the_window() {
    each("TCP, RST of the client", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        tcp.forward(bed, &tcp.client(1001, b"eight so").ack(5001), Outcome::Forward, Phase::Established);
        for outside in [1000, 1010, 1001 + (1 << 31)] {
            let reset = tcp.client(outside, &[]).rst();
            tcp.forward(bed, &reset, Outcome::Forward, Phase::Established);
        }
        tcp.forward(bed, &tcp.client(1009, &[]).rst(), Outcome::Forward, Phase::Closed);
    });
    each("TCP, RST of the backend", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        for outside in [5000, 5002] {
            tcp.reply(bed, &tcp.backend(outside, &[]).rst(), Phase::Established);
        }
        tcp.reply(bed, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
    });
}

/// An attacker that does not receive the connection's packets can only guess, so the forged sequence numbers are far
/// from the window. If the programs accepted them, each segment would end an idle connection, make it unproven, or let
/// a following RST end it.
#[test]
fn forged_segments_far_from_the_window_end_no_connection() {
    const FAR: u32 = 1 << 30;
    each("TCP, forged segments", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        tcp.reply(bed, &tcp.backend(5001, b"greeting").ack(1001), Phase::Established);
        for forged in [
            tcp.client(1001 + FAR, b"data").ack(5009),
            tcp.client(1001, &[]).ack(5009 + FAR),
            tcp.client(1001 + FAR, &[]).fin().ack(5009),
            tcp.client(1001, &[]).fin().ack(5009 + FAR),
            tcp.client(1001 + FAR, &[]).syn(),
        ] {
            tcp.forward(bed, &forged, Outcome::Forward, Phase::Established);
            for seq in [1002, FAR, 1001 + FAR, 1002 + FAR, 1005 + FAR] {
                tcp.forward(bed, &tcp.client(seq, &[]).rst(), Outcome::Forward, Phase::Established);
            }
        }
        for forged in [
            tcp.backend(5009 + FAR, b"data").ack(1001),
            tcp.backend(5009 + FAR, &[]).fin().ack(1001),
            tcp.backend(5009, &[]).fin().ack(1001 + FAR),
        ] {
            tcp.reply(bed, &forged, Phase::Established);
            tcp.reply(bed, &tcp.backend(FAR, &[]).rst(), Phase::Established);
        }
        tcp.forward(bed, &tcp.client(1001, &[]).fin().ack(5009), Outcome::Forward, Phase::HalfClosed);
        tcp.reply(bed, &tcp.backend(5009, &[]).rst().ack(1002), Phase::Closed);
    });
}

/// Both ends have crashed, and the client uses the port again. The backend's answer shows that the client's SYN is not
/// forged.
#[test]
fn new_connection_from_the_port_of_an_open_flow_is_accepted() {
    const FAR: u32 = 1 << 30;
    each("TCP, both ends have forgotten", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        tcp.forward(bed, &tcp.client(FAR, &[]).syn(), Outcome::Forward, Phase::Established);
        tcp.reply(bed, &tcp.backend(77, &[]).syn().ack(FAR + 1), Phase::Accepted);
        tcp.forward(bed, &tcp.client(FAR + 1, &[]).ack(78), Outcome::Forward, Phase::Established);
        tcp.forward(bed, &tcp.client(FAR + 1, &[]).rst(), Outcome::Forward, Phase::Closed);
    });
}

/// Ethernet pads short frames. If padding counted as payload, the RST would be outside the window.
#[test]
fn padding_does_not_count_as_payload() {
    each("TCP, padded", |bed, family| {
        let tcp = Connection { family };
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &tcp.client(1000, &[]).syn().padded(), Outcome::NewFlow, Phase::Opening);
        tcp.reply(bed, &tcp.backend(5000, &[]).syn().ack(1001).padded(), Phase::Accepted);
        tcp.forward(bed, &tcp.client(1001, &[]).ack(5001).padded(), Outcome::Forward, Phase::Established);
        let sent = tcp.client(1001, &[]);
        let (from, to) = (sent.tuple(), sent.to(family.backend()).tuple());
        let flows = bed.flows();
        assert_eq!((flows[&from].next_seq, flows[&to.reversed()].next_seq), (1001, 5001), "{family:?}");
        tcp.forward(bed, &tcp.client(1003, &[]).rst(), Outcome::Forward, Phase::Established);
        tcp.forward(bed, &tcp.client(1001, &[]).rst().padded(), Outcome::Forward, Phase::Closed);
    });
}

#[test]
fn retransmitted_syn_reaches_the_same_backend() {
    each("TCP, SYN again", |bed, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        // With so many backends, another random choice would hardly ever be the first backend again.
        let others: Vec<_> = (2..30).map(|port| (family.backend().ip(), 8080 + port).into()).collect();
        bed.service(family.vip(), TCP, &[&[family.backend()], &others[..]].concat());
        for _ in 0..4 {
            tcp.forward(bed, &syn, Outcome::Forward, Phase::Opening);
        }
    });
}

/// A SYN after the end of a connection begins another one, with a current backend of the Service.
#[test]
fn syn_after_the_end_begins_a_new_connection() {
    type End = fn(&Connection, &mut Testbed);
    let ends: [(&str, End); 3] = [
        ("both FIN", |tcp, bed| {
            tcp.forward(bed, &tcp.client(1001, &[]).fin().ack(5001), Outcome::Forward, Phase::HalfClosed);
            tcp.reply(bed, &tcp.backend(5001, &[]).fin().ack(1002), Phase::TimeWait);
        }),
        ("client RST", |tcp, bed| {
            tcp.forward(bed, &tcp.client(1001, &[]).rst(), Outcome::Forward, Phase::Closed);
        }),
        ("backend RST", |tcp, bed| {
            tcp.reply(bed, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
        }),
    ];
    for (name, end) in ends {
        for same_backend in [true, false] {
            each(&format!("TCP, SYN after {name}, same backend: {same_backend}"), |bed, family| {
                let tcp = Connection { family };
                tcp.open(bed);
                end(&tcp, bed);
                let backend = if same_backend { family.backend() } else { family.other_backend() };
                bed.service(family.vip(), TCP, &[backend]);
                let syn = tcp.client(77_000, &[]).syn();
                let translated = syn.clone().to(backend);
                bed.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &translated);
                bed.assert_flow(&syn, &translated, Phase::Opening);
                bed.assert_flows(1);
            });
        }
    }
}

#[test]
fn syn_of_a_removed_backend_gets_another_one() {
    each("TCP, SYN, its backend gone", |bed, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        bed.service(family.vip(), TCP, &[family.other_backend()]);
        let translated = syn.clone().to(family.other_backend());
        bed.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &translated);
        bed.assert_flow(&syn, &translated, Phase::Opening);
        bed.assert_flows(1);
    });
}

/// The client's next SYN is rejected, so the client does not wait for its own timeout.
#[test]
fn syn_is_rejected_after_the_last_backend_is_removed() {
    each("TCP, SYN, no backend left", |bed, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        bed.service(family.vip(), TCP, &[]);
        bed.send(Hook::Ingress, &syn).redirects_any(Outcome::RejectTcp);
        // An established connection keeps its backend.
        bed.clear_flows();
        tcp.open(bed);
        bed.service(family.vip(), TCP, &[]);
        let stray = tcp.client(77_000, &[]).syn();
        bed.send(Hook::Ingress, &stray).passes(Outcome::Forward, &stray.clone().to(family.backend()));
    });
}

/// The client has used its port for a connection through the VIP. Now it connects from the same port to the pod's own
/// address.
#[test]
fn direct_connection_is_not_captured_by_an_ended_flow() {
    each("TCP, direct after VIP", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        // While the connection through the VIP exists, the backend may repeat its SYN-ACK.
        tcp.reply(bed, &tcp.backend(5000, &[]).syn().ack(1001), Phase::Established);
        tcp.forward(bed, &tcp.client(1001, &[]).fin().ack(5001), Outcome::Forward, Phase::HalfClosed);
        tcp.reply(bed, &tcp.backend(5001, &[]).fin().ack(1002), Phase::TimeWait);
        let accept = tcp.backend(90_000, &[]).syn().ack(77_001);
        bed.send(Hook::Egress, &accept).passes_untouched(Outcome::NoService);
        bed.assert_flows(0);
        let data = tcp.backend(90_001, b"direct").ack(77_001);
        bed.send(Hook::Egress, &data).passes_untouched(Outcome::NoService);
    });
}

#[test]
fn established_connection_keeps_a_removed_backend() {
    each("TCP, its backend gone", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        for backends in [&[family.other_backend()][..], &[]] {
            bed.service(family.vip(), TCP, backends);
            tcp.forward(bed, &tcp.client(1001, b"go on").ack(5001), Outcome::Forward, Phase::Established);
            tcp.reply(bed, &tcp.backend(5001, b"I do").ack(1006), Phase::Established);
        }
    });
}

/// A forged or repeated SYN does not move a connection if its backend has left the Service but is still alive.
#[test]
fn syn_does_not_move_a_connection_from_a_removed_backend() {
    each("TCP, SYN of a connection, its backend gone", |bed, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        tcp.reply(bed, &tcp.backend(5000, &[]).syn().ack(1001), Phase::Accepted);
        bed.service(family.vip(), TCP, &[family.other_backend()]);
        tcp.forward(bed, &syn, Outcome::Forward, Phase::Accepted);
        tcp.forward(bed, &tcp.client(1001, &[]).ack(5001), Outcome::Forward, Phase::Established);
        for number in [77_000, 1001, 900_000_000] {
            let stray = tcp.client(number, &[]).syn();
            tcp.forward(bed, &stray, Outcome::Forward, Phase::Established);
            tcp.reply(bed, &tcp.backend(5001, &[]).ack(1001), Phase::Established);
        }
        bed.assert_flows(1);
    });
}

/// After the Service is deleted, its connections continue and a new one finds no Service.
#[test]
fn connection_outlives_its_service() {
    each("TCP, service deleted", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        bed.clear_services();
        tcp.forward(bed, &tcp.client(1001, b"go on").ack(5001), Outcome::Forward, Phase::Established);
        tcp.reply(bed, &tcp.backend(5001, b"I do").ack(1006), Phase::Established);
        tcp.reply(bed, &tcp.backend(5005, &[]).rst().ack(1006), Phase::Closed);
        let syn = tcp.client(77_000, &[]).syn();
        bed.send(Hook::Ingress, &syn).passes_untouched(Outcome::NoService);
    });
}

/// The last backend is removed before the client connects again: the SYN is rejected.
#[test]
fn syn_after_the_end_is_rejected_without_backends() {
    each_on(&[Device::Ethernet, Device::Bare], "TCP, SYN after the end, no backend", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        tcp.reply(bed, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
        bed.service(family.vip(), TCP, &[]);
        let before = bed.flows();
        let mut reset = Packet::tcp(family.vip(), family.client(), 0, b"").rst().ack(77_011);
        reset.tcp_header().window_size = 0;
        let syn = tcp.client(77_000, b"early data").syn();
        bed.send(Hook::Ingress, &syn).redirects(Outcome::RejectTcp, &our_own(reset));
        assert_eq!(bed.flows(), before);
    });
}

/// The client's next packet rebuilds a lost entry.
#[test]
fn lost_forward_entry_is_rebuilt() {
    each("TCP, half of it lost", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        let data = tcp.client(1001, b"still here").ack(5001);
        bed.remove_entry(&data.tuple());
        let translated = data.clone().to(family.backend());
        bed.send(Hook::Ingress, &data).passes(Outcome::NewFlow, &translated);
        bed.assert_flows(1);
        tcp.reply(bed, &tcp.backend(5001, b"so am I").ack(1011), Phase::Established);
    });
}

/// Without the flow's reverse entry no reply would reach the client, so the SYN begins a new flow.
#[test]
fn syn_rebuilds_a_lost_reverse_entry() {
    each("TCP, SYN, reply entry lost", |bed, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bed.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        bed.remove_entry(&syn.clone().to(family.backend()).tuple().reversed());
        tcp.forward(bed, &syn, Outcome::NewFlow, Phase::Opening);
        tcp.reply(bed, &tcp.backend(5000, &[]).syn().ack(1001), Phase::Accepted);
    });
}

/// Each entry records when the last packet of its direction passed. A RST that the receiver ignores does not postpone
/// the flow's expiry.
#[test]
fn only_accepted_packets_postpone_expiry() {
    each("last seen", |bed, family| {
        let tcp = Connection { family };
        tcp.open(bed);
        let sent = tcp.client(1001, &[]);
        let (forward, reply) = (sent.tuple(), sent.clone().to(family.backend()).tuple().reversed());
        let age = |bed: &mut Testbed| {
            for (key, flow) in bed.flows() {
                bed.insert_entry(&key, &Flow { last_seen: Tick(0), ..flow });
            }
        };
        let seen = |bed: &Testbed| [forward, reply].map(|key| bed.flows()[&key].last_seen > Tick(0));
        age(bed);
        tcp.forward(bed, &tcp.client(9, &[]).rst(), Outcome::Forward, Phase::Established);
        assert_eq!(seen(bed), [false, false], "{family:?}: RST outside the window");
        tcp.forward(bed, &sent.ack(5001), Outcome::Forward, Phase::Established);
        assert_eq!(seen(bed), [true, false], "{family:?}: ACK of the client");
        age(bed);
        tcp.reply(bed, &tcp.backend(5001, b"x").ack(1001), Phase::Established);
        assert_eq!(seen(bed), [false, true], "{family:?}: data of the backend");
    });
}

/// Two VIPs share a backend: replies of two connections from the same client port would be indistinguishable.
#[test]
fn taken_source_port_is_replaced() {
    for protocol in [TCP, UDP] {
        each(&format!("port collision, protocol {protocol}"), |bed, family| {
            let (client, backend) = (family.client(), family.backend());
            let packet = |from, to| match protocol {
                TCP => Packet::tcp(from, to, 1000, b"").syn(),
                _ => Packet::udp(from, to, b"x"),
            };
            for vip in [family.vip(), family.other_vip()] {
                bed.service(vip, protocol, &[backend]);
            }
            let first = packet(client, family.vip());
            bed.send(Hook::Ingress, &first).passes(Outcome::NewFlow, &first.clone().to(backend));

            let second = packet(client, family.other_vip());
            let before = bed.flows();
            // The port is random: the test reads it from the entry, and the packet must have the same port.
            let sent = bed.send(Hook::Ingress, &second);
            let to = bed.flows()[&second.tuple()].to;
            let replaced = SocketAddr::new(client.ip(), to.source_port);
            sent.passes(Outcome::NewFlow, &second.clone().from(replaced).to(backend));
            assert!(to.source_port >= 1024 && to.source_port != client.port(), "{to:?}");
            bed.assert_flows(2);
            for (key, flow) in before {
                assert_eq!(bed.flows()[&key].to, flow.to, "the first flow is unchanged");
            }

            let answer = packet(backend, replaced);
            let translated = answer.clone().from(family.other_vip()).to(client);
            bed.send(Hook::Egress, &answer).passes(Outcome::Reply, &translated);
            let answer = packet(backend, client);
            bed.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(family.vip()));
        });
    }
}

#[test]
fn hairpin_at_a_node_port_takes_no_port_that_sockets_of_the_node_have() {
    for protocol in [TCP, UDP] {
        each(&format!("hairpin at a node port, protocol {protocol}"), |bed, family| {
            let (vip, backend) = (family.vip(), family.backend());
            bed.settings(&masquerade_settings(PORTS));
            let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
            bed.service_with(vip, protocol, &[backend], record);
            let client = SocketAddr::new(backend.ip(), 40_000);
            let sent = match protocol {
                TCP => Packet::tcp(client, vip, 1000, b"").syn(),
                _ => Packet::udp(client, vip, b"question"),
            };
            let first = bed.send(Hook::Ingress, &sent);
            let port = bed.flows()[&sent.tuple()].to.source_port;
            assert!((FIRST_PORT..FIRST_PORT + PORTS).contains(&port), "{port}");
            let seen = sent.clone().from((vip.ip(), port).into()).to(backend);
            first.redirects(Outcome::Hairpin, &seen.swapped_macs());
            let answer = match protocol {
                TCP => Packet::tcp(backend, (vip.ip(), port).into(), 5000, b"").syn().ack(1001),
                _ => Packet::udp(backend, (vip.ip(), port).into(), b"answer"),
            };
            let back = answer.clone().from(vip).to(client).swapped_macs();
            bed.send(Hook::Ingress, &answer).redirects(Outcome::Hairpin, &back);
        });
    }
}

/// A pod that reaches itself again and again needs no more ports than it has open connections.
#[test]
fn hairpin_at_a_node_port_reuses_the_port_of_an_ended_connection() {
    each("hairpin at a node port with one port", |bed, family| {
        let (vip, backend) = (family.vip(), family.backend());
        bed.settings(&masquerade_settings(1));
        let record = Service { id: 1, kind: FrontendKind::NodePort as u8, ..Service::zeroed() };
        bed.service_with(vip, TCP, &[backend], record);
        let masqueraded = SocketAddr::new(vip.ip(), FIRST_PORT);
        let [first, second] = [40_000, 40_001]
            .map(|port| Packet::tcp(SocketAddr::new(backend.ip(), port), vip, 1000, b"").syn());
        let seen = |syn: &Packet| syn.clone().from(masqueraded).to(backend).swapped_macs();
        bed.send(Hook::Ingress, &first).redirects(Outcome::Hairpin, &seen(&first));
        bed.send(Hook::Ingress, &second).drops(Outcome::NoSourcePort);

        let refusal = Packet::tcp(backend, masqueraded, 0, b"").rst().ack(1001);
        let back = refusal.clone().from(vip).to(SocketAddr::new(backend.ip(), 40_000)).swapped_macs();
        bed.send(Hook::Ingress, &refusal).redirects(Outcome::Hairpin, &back);
        bed.send(Hook::Ingress, &second).redirects(Outcome::Hairpin, &seen(&second));
        bed.assert_flows(1);
    });
}

/// A pod reaches itself through its VIP: the programs redirect both directions to its device.
#[test]
fn hairpin_flow_is_redirected_in_both_directions() {
    for protocol in [TCP, UDP] {
        each(&format!("hairpin, protocol {protocol}"), |bed, family| {
            let pod = family.backend();
            let client = SocketAddr::new(pod.ip(), 40_000);
            let packet = |from, to, seq| match protocol {
                TCP => Packet::tcp(from, to, seq, b"").syn(),
                _ => Packet::udp(from, to, b"to myself"),
            };
            bed.service(family.vip(), protocol, &[pod]);
            let vip = SocketAddr::new(family.vip().ip(), client.port());

            let sent = packet(client, family.vip(), 1000);
            let translated = sent.clone().from(vip).to(pod);
            bed.send(Hook::Ingress, &sent).redirects(Outcome::Hairpin, &translated.clone().swapped_macs());
            let opening = if protocol == TCP { Phase::Opening } else { Phase::Unreplied };
            bed.assert_flow(&sent, &translated, opening);

            let answer = match protocol {
                TCP => packet(pod, vip, 5000).ack(1001),
                _ => packet(pod, vip, 0),
            };
            let back = answer.clone().from(family.vip()).to(client);
            bed.send(Hook::Ingress, &answer).redirects(Outcome::Hairpin, &back.swapped_macs());
            let answered = if protocol == TCP { Phase::Accepted } else { Phase::Replied };
            bed.assert_flow(&sent, &translated, answered);
            bed.assert_flows(1);

            let again = match protocol {
                TCP => Packet::tcp(client, family.vip(), 1001, b"hello, me").ack(5001),
                _ => packet(client, family.vip(), 0),
            };
            let translated = again.clone().from(vip).to(pod);
            bed.send(Hook::Ingress, &again).redirects(Outcome::Hairpin, &translated.swapped_macs());
        });
    }
}

/// Only an unanswered SYN is moved to another backend, and only after the configured number of retransmissions.
#[test]
fn unanswered_syn_tries_another_backend() {
    const RETRIES: usize = 2;
    let mut bed = Testbed::with_syn_retries(2);
    for family in Family::BOTH {
        assert!(bed.start(&format!("SYN without an answer, {family:?}"), Device::Ethernet));
        let backends = [family.backend(), family.other_backend()];
        bed.service(family.vip(), TCP, &backends);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        let mut asked = Vec::new();
        for _ in 0..2 * (1 + RETRIES) {
            let _sent = bed.send(Hook::Ingress, &syn);
            let to = bed.flows()[&syn.tuple()].to;
            asked.push(to.destination_socket());
        }
        let (first, second) = asked.split_at(1 + RETRIES);
        assert!(first.iter().all(|backend| *backend == asked[0]), "{asked:?}");
        assert!(second.iter().all(|backend| *backend != asked[0]), "{asked:?}");
        // The agent gets a hint about each backend that did not answer.
        let silent = |backend: SocketAddr| {
            bed.read::<Endpoint, u32>("UNANSWERED", Endpoint::new(backend.ip().into(), backend.port()))
        };
        assert_eq!(
            asked.iter().map(|backend| silent(*backend).is_some()).collect::<Vec<_>>(),
            [true, true, true, false, false, false]
        );
        // The last backend answers.
        let last = asked[asked.len() - 1];
        let answer = Packet::tcp(last, family.client(), 5000, b"").syn().ack(1001);
        bed.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(family.vip()));
        for _ in 0..2 + RETRIES {
            bed.send(Hook::Ingress, &syn).passes(Outcome::Forward, &syn.clone().to(last));
        }
    }
}
