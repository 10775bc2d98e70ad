//! Lives of flows: what comes out of one step is what the next one answers.

use std::net::SocketAddr;

use lb_common::{
    Outcome,
    conntrack::{Flow, Phase, Tick},
};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::Packet,
    reject::our_own,
    stage::{Family, each, each_on},
};

/// A connection with the one backend of its service.
struct Connection {
    family: Family,
}

impl Connection {
    /// A segment as the client sends it.
    fn client(&self, seq: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.family.client(), self.family.vip(), seq, payload)
    }

    /// A segment as the backend sends it.
    fn backend(&self, seq: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.family.backend(), self.family.client(), seq, payload)
    }

    /// The client's segment arrives at the backend.
    #[track_caller]
    fn forward(&self, bench: &mut Bench, packet: &Packet, outcome: Outcome, phase: Phase) {
        let translated = packet.clone().to(self.family.backend());
        bench.send(Hook::Ingress, packet).passes(outcome, &translated);
        bench.assert_flow(packet, &translated, phase);
        bench.assert_flows(1);
    }

    /// The backend's segment arrives at the client, and comes from whom the client spoke to.
    #[track_caller]
    fn reply(&self, bench: &mut Bench, packet: &Packet, phase: Phase) {
        let translated = packet.clone().from(self.family.vip());
        bench.send(Hook::Egress, packet).passes(Outcome::Reply, &translated);
        let sent = self.client(0, &[]);
        bench.assert_flow(&sent, &sent.clone().to(self.family.backend()), phase);
        bench.assert_flows(1);
    }

    /// SYN, SYN-ACK, ACK; client and backend begin at 1000 and 5000.
    #[track_caller]
    fn open(&self, bench: &mut Bench) {
        bench.service(self.family.vip(), TCP, &[self.family.backend()]);
        self.forward(bench, &self.client(1000, &[]).syn(), Outcome::NewFlow, Phase::Opening);
        self.reply(bench, &self.backend(5000, &[]).syn().ack(1001), Phase::Accepted);
        self.forward(bench, &self.client(1001, &[]).ack(5001), Outcome::Forward, Phase::Established);
    }
}

#[test]
fn a_tcp_connection_from_syn_to_both_fins() {
    each("TCP, SYN to FIN", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        tcp.forward(
            bench,
            &tcp.client(1001, b"GET / HTTP/1.1\r\n\r\n").ack(5001),
            Outcome::Forward,
            Phase::Established,
        );
        tcp.reply(
            bench,
            &tcp.backend(5001, b"HTTP/1.1 204 No Content\r\n\r\n").ack(1019),
            Phase::Established,
        );
        tcp.reply(bench, &tcp.backend(5028, &[]).fin().ack(1019), Phase::HalfClosed);
        tcp.forward(bench, &tcp.client(1019, b"more").ack(5029), Outcome::Forward, Phase::HalfClosed);
        tcp.forward(bench, &tcp.client(1023, &[]).fin().ack(5029), Outcome::Forward, Phase::TimeWait);
        tcp.reply(bench, &tcp.backend(5029, &[]).ack(1024), Phase::TimeWait);
    });
}

#[test]
fn a_udp_flow() {
    each("UDP, question and answer", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        for (outcome, phase) in [(Outcome::NewFlow, Phase::Unreplied), (Outcome::Forward, Phase::Unreplied)] {
            let question = Packet::udp(client, vip, b"question");
            let translated = question.clone().to(backend);
            bench.send(Hook::Ingress, &question).passes(outcome, &translated);
            bench.assert_flow(&question, &translated, phase);
        }
        for payload in [&b"an answer of an odd length"[..], b"odd", b""] {
            let answer = Packet::udp(backend, client, payload);
            bench.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(vip));
        }
        let question = Packet::udp(client, vip, b"");
        bench.assert_flow(&question, &question.clone().to(backend), Phase::Replied);
        bench.assert_flows(1);
    });
}

#[test]
fn a_connection_that_the_backend_refuses() {
    each("TCP, refused", |bench, family| {
        let tcp = Connection { family };
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &tcp.client(1000, &[]).syn(), Outcome::NewFlow, Phase::Opening);
        tcp.reply(bench, &tcp.backend(0, &[]).rst().ack(1001), Phase::Closed);
    });
}

#[test]
fn a_reset_within_the_window_closes_and_one_outside_does_not() {
    each("TCP, RST of the client", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        tcp.forward(bench, &tcp.client(1001, b"eight so").ack(5001), Outcome::Forward, Phase::Established);
        for outside in [1000, 1010, 1001 + (1 << 31)] {
            let reset = tcp.client(outside, &[]).rst();
            tcp.forward(bench, &reset, Outcome::Forward, Phase::Established);
        }
        tcp.forward(bench, &tcp.client(1009, &[]).rst(), Outcome::Forward, Phase::Closed);
    });
    each("TCP, RST of the backend", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        for outside in [5000, 5002] {
            tcp.reply(bench, &tcp.backend(outside, &[]).rst(), Phase::Established);
        }
        tcp.reply(bench, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
    });
}

/// Ethernet pads short frames; were the padding taken for payload, the RST would lie outside of the window.
#[test]
fn padding_is_no_payload() {
    each("TCP, padded", |bench, family| {
        let tcp = Connection { family };
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &tcp.client(1000, &[]).syn().padded(), Outcome::NewFlow, Phase::Opening);
        tcp.reply(bench, &tcp.backend(5000, &[]).syn().ack(1001).padded(), Phase::Accepted);
        tcp.forward(bench, &tcp.client(1001, &[]).ack(5001).padded(), Outcome::Forward, Phase::Established);
        let sent = tcp.client(1001, &[]);
        let (from, to) = (sent.tuple(), sent.to(family.backend()).tuple());
        let flows = bench.flows();
        assert_eq!((flows[&from].next_seq, flows[&to.reversed()].next_seq), (1001, 5001), "{family:?}");
        tcp.forward(bench, &tcp.client(1003, &[]).rst(), Outcome::Forward, Phase::Established);
        tcp.forward(bench, &tcp.client(1001, &[]).rst().padded(), Outcome::Forward, Phase::Closed);
    });
}

#[test]
fn a_retransmitted_syn_goes_where_the_first_one_went() {
    each("TCP, SYN again", |bench, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &syn, Outcome::NewFlow, Phase::Opening);
        // Many backends, of which the first one is still one: a new choice would hardly ever fall on it.
        let others: Vec<_> = (2..30).map(|port| (family.backend().ip(), 8080 + port).into()).collect();
        bench.service(family.vip(), TCP, &[&[family.backend()], &others[..]].concat());
        for _ in 0..4 {
            tcp.forward(bench, &syn, Outcome::Forward, Phase::Opening);
        }
    });
}

/// A SYN at the end of a connection begins another one, with whatever backend the service has now.
#[test]
fn a_syn_after_the_end_is_a_new_connection() {
    type End = fn(&Connection, &mut Bench);
    let ends: [(&str, End); 3] = [
        ("both FIN", |tcp, bench| {
            tcp.forward(bench, &tcp.client(1001, &[]).fin().ack(5001), Outcome::Forward, Phase::HalfClosed);
            tcp.reply(bench, &tcp.backend(5001, &[]).fin().ack(1002), Phase::TimeWait);
        }),
        ("client RST", |tcp, bench| {
            tcp.forward(bench, &tcp.client(1001, &[]).rst(), Outcome::Forward, Phase::Closed);
        }),
        ("backend RST", |tcp, bench| {
            tcp.reply(bench, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
        }),
    ];
    for (name, end) in ends {
        for same_backend in [true, false] {
            each(&format!("TCP, SYN after {name}, same backend: {same_backend}"), |bench, family| {
                let tcp = Connection { family };
                tcp.open(bench);
                end(&tcp, bench);
                let backend = if same_backend { family.backend() } else { family.other_backend() };
                bench.service(family.vip(), TCP, &[backend]);
                let syn = tcp.client(77_000, &[]).syn();
                let translated = syn.clone().to(backend);
                bench.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &translated);
                bench.assert_flow(&syn, &translated, Phase::Opening);
                bench.assert_flows(1);
            });
        }
    }
}

#[test]
fn a_syn_to_a_backend_that_is_gone_gets_another_one() {
    each("TCP, SYN, its backend gone", |bench, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &syn, Outcome::NewFlow, Phase::Opening);
        bench.service(family.vip(), TCP, &[family.other_backend()]);
        let translated = syn.clone().to(family.other_backend());
        bench.send(Hook::Ingress, &syn).passes(Outcome::NewFlow, &translated);
        bench.assert_flow(&syn, &translated, Phase::Opening);
        bench.assert_flows(1);
    });
}

/// Its client hangs no longer than until it sends the next SYN.
#[test]
fn a_syn_to_the_last_backend_that_is_gone_is_rejected() {
    each("TCP, SYN, no backend left", |bench, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &syn, Outcome::NewFlow, Phase::Opening);
        bench.service(family.vip(), TCP, &[]);
        bench.send(Hook::Ingress, &syn).turns_around(Outcome::RejectTcp);
        // An established connection is none of those.
        bench.forget_flows();
        tcp.open(bench);
        bench.service(family.vip(), TCP, &[]);
        let stray = tcp.client(77_000, &[]).syn();
        bench.send(Hook::Ingress, &stray).passes(Outcome::Forward, &stray.clone().to(family.backend()));
    });
}

/// The client's port was used through the VIP before; now it speaks to the pod itself.
#[test]
fn a_direct_connection_after_the_end_of_one_through_the_vip_is_not_captured() {
    each("TCP, direct after VIP", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        // While that connection lives, its SYN-ACK may come twice.
        tcp.reply(bench, &tcp.backend(5000, &[]).syn().ack(1001), Phase::Established);
        tcp.forward(bench, &tcp.client(1001, &[]).fin().ack(5001), Outcome::Forward, Phase::HalfClosed);
        tcp.reply(bench, &tcp.backend(5001, &[]).fin().ack(1002), Phase::TimeWait);
        let accept = tcp.backend(90_000, &[]).syn().ack(77_001);
        bench.send(Hook::Egress, &accept).passes_untouched(Outcome::NoService);
        bench.assert_flows(0);
        let data = tcp.backend(90_001, b"direct").ack(77_001);
        bench.send(Hook::Egress, &data).passes_untouched(Outcome::NoService);
    });
}

#[test]
fn an_established_connection_stays_with_a_backend_that_left_the_service() {
    each("TCP, its backend gone", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        for backends in [&[family.other_backend()][..], &[]] {
            bench.service(family.vip(), TCP, backends);
            tcp.forward(bench, &tcp.client(1001, b"go on").ack(5001), Outcome::Forward, Phase::Established);
            tcp.reply(bench, &tcp.backend(5001, b"I do").ack(1006), Phase::Established);
        }
    });
}

/// The service is deleted: what flows goes on flowing, and the next connection finds nothing.
#[test]
fn a_connection_outlives_its_service() {
    each("TCP, service deleted", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        bench.forget_services();
        tcp.forward(bench, &tcp.client(1001, b"go on").ack(5001), Outcome::Forward, Phase::Established);
        tcp.reply(bench, &tcp.backend(5001, b"I do").ack(1006), Phase::Established);
        tcp.reply(bench, &tcp.backend(5005, &[]).rst().ack(1006), Phase::Closed);
        let syn = tcp.client(77_000, &[]).syn();
        bench.send(Hook::Ingress, &syn).passes_untouched(Outcome::NoService);
    });
}

/// The last backend is gone when the client comes again: it is told so.
#[test]
fn a_syn_after_the_end_to_a_service_without_backends_is_rejected() {
    each_on(&[Device::Ethernet, Device::Bare], "TCP, SYN after the end, no backend", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        tcp.reply(bench, &tcp.backend(5001, &[]).rst().ack(1001), Phase::Closed);
        bench.service(family.vip(), TCP, &[]);
        let before = bench.flows();
        let mut reset = Packet::tcp(family.vip(), family.client(), 0, b"").rst().ack(77_011);
        reset.tcp_header().window_size = 0;
        let syn = tcp.client(77_000, b"early data").syn();
        bench.send(Hook::Ingress, &syn).bounces(Outcome::RejectTcp, &our_own(reset));
        assert_eq!(bench.flows(), before);
    });
}

/// An entry of one direction that was lost is made again when the client speaks.
#[test]
fn a_lost_forward_entry_is_rebuilt() {
    each("TCP, half of it lost", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        let data = tcp.client(1001, b"still here").ack(5001);
        bench.conntrack().remove(&data.tuple()).unwrap();
        let translated = data.clone().to(family.backend());
        bench.send(Hook::Ingress, &data).passes(Outcome::NewFlow, &translated);
        bench.assert_flows(1);
        tcp.reply(bench, &tcp.backend(5001, b"so am I").ack(1011), Phase::Established);
    });
}

/// A SYN finds an entry whose other half is gone: nothing could answer it, so the flow begins anew.
#[test]
fn a_syn_rebuilds_a_lost_reply_entry() {
    each("TCP, SYN, reply entry lost", |bench, family| {
        let tcp = Connection { family };
        let syn = tcp.client(1000, &[]).syn();
        bench.service(family.vip(), TCP, &[family.backend()]);
        tcp.forward(bench, &syn, Outcome::NewFlow, Phase::Opening);
        bench.conntrack().remove(&syn.clone().to(family.backend()).tuple().reversed()).unwrap();
        tcp.forward(bench, &syn, Outcome::NewFlow, Phase::Opening);
        tcp.reply(bench, &tcp.backend(5000, &[]).syn().ack(1001), Phase::Accepted);
    });
}

/// Each direction notes its own packets; a RST that nobody will believe keeps nothing alive.
#[test]
fn only_packets_of_the_flow_keep_it_alive() {
    each("last seen", |bench, family| {
        let tcp = Connection { family };
        tcp.open(bench);
        let sent = tcp.client(1001, &[]);
        let (forward, reply) = (sent.tuple(), sent.clone().to(family.backend()).tuple().reversed());
        let age = |bench: &mut Bench| {
            for (key, flow) in bench.flows() {
                bench.conntrack().insert(key, Flow { last_seen: Tick(0), ..flow }, 0).unwrap();
            }
        };
        let seen = |bench: &Bench| [forward, reply].map(|key| bench.flows()[&key].last_seen > Tick(0));
        age(bench);
        tcp.forward(bench, &tcp.client(9, &[]).rst(), Outcome::Forward, Phase::Established);
        assert_eq!(seen(bench), [false, false], "{family:?}: RST outside of the window");
        tcp.forward(bench, &sent.ack(5001), Outcome::Forward, Phase::Established);
        assert_eq!(seen(bench), [true, false], "{family:?}: ACK of the client");
        age(bench);
        tcp.reply(bench, &tcp.backend(5001, b"x").ack(1001), Phase::Established);
        assert_eq!(seen(bench), [false, true], "{family:?}: data of the backend");
    });
}

/// Two VIPs with the same backend: the replies of two connections from the same client port could not be told apart.
#[test]
fn a_taken_source_port_is_replaced() {
    for protocol in [TCP, UDP] {
        each(&format!("port collision, protocol {protocol}"), |bench, family| {
            let (client, backend) = (family.client(), family.backend());
            let packet = |from, to| match protocol {
                TCP => Packet::tcp(from, to, 1000, b"").syn(),
                _ => Packet::udp(from, to, b"x"),
            };
            for vip in [family.vip(), family.other_vip()] {
                bench.service(vip, protocol, &[backend]);
            }
            let first = packet(client, family.vip());
            bench.send(Hook::Ingress, &first).passes(Outcome::NewFlow, &first.clone().to(backend));

            let second = packet(client, family.other_vip());
            let before = bench.flows();
            // The port is random, so it is read from the entry; the packet must agree with it.
            let sent = bench.send(Hook::Ingress, &second);
            let to = bench.flows()[&second.tuple()].to;
            let replaced = SocketAddr::new(client.ip(), to.source_port);
            sent.passes(Outcome::NewFlow, &second.clone().from(replaced).to(backend));
            assert!(to.source_port >= 1024 && to.source_port != client.port(), "{to:?}");
            bench.assert_flows(2);
            for (key, flow) in before {
                assert_eq!(bench.flows()[&key].to, flow.to, "the first flow is as it was");
            }

            let answer = packet(backend, replaced);
            let translated = answer.clone().from(family.other_vip()).to(client);
            bench.send(Hook::Egress, &answer).passes(Outcome::Reply, &translated);
            let answer = packet(backend, client);
            bench.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(family.vip()));
        });
    }
}

/// A pod that reaches itself through its VIP: both directions turn around at its device.
#[test]
fn hairpin() {
    for protocol in [TCP, UDP] {
        each(&format!("hairpin, protocol {protocol}"), |bench, family| {
            let pod = family.backend();
            let client = SocketAddr::new(pod.ip(), 40_000);
            let packet = |from, to, seq| match protocol {
                TCP => Packet::tcp(from, to, seq, b"").syn(),
                _ => Packet::udp(from, to, b"to myself"),
            };
            bench.service(family.vip(), protocol, &[pod]);
            let vip = SocketAddr::new(family.vip().ip(), client.port());

            let sent = packet(client, family.vip(), 1000);
            let translated = sent.clone().from(vip).to(pod);
            bench.send(Hook::Ingress, &sent).bounces(Outcome::Hairpin, &translated.clone().bounced());
            let opening = if protocol == TCP { Phase::Opening } else { Phase::Unreplied };
            bench.assert_flow(&sent, &translated, opening);

            let answer = match protocol {
                TCP => packet(pod, vip, 5000).ack(1001),
                _ => packet(pod, vip, 0),
            };
            let back = answer.clone().from(family.vip()).to(client);
            bench.send(Hook::Ingress, &answer).bounces(Outcome::Hairpin, &back.bounced());
            let answered = if protocol == TCP { Phase::Accepted } else { Phase::Replied };
            bench.assert_flow(&sent, &translated, answered);
            bench.assert_flows(1);

            let again = match protocol {
                TCP => Packet::tcp(client, family.vip(), 1001, b"hello, me").ack(5001),
                _ => packet(client, family.vip(), 0),
            };
            let translated = again.clone().from(vip).to(pod);
            bench.send(Hook::Ingress, &again).bounces(Outcome::Hairpin, &translated.bounced());
        });
    }
}

/// Only a SYN that nobody answers leads to another backend, and that not before the retransmissions that were asked for.
#[test]
fn who_is_not_answered_tries_another_backend() {
    const RETRIES: usize = 2;
    let mut bench = Bench::with_syn_retries(2);
    for family in Family::BOTH {
        assert!(bench.start(&format!("SYN without an answer, {family:?}"), Device::Ethernet));
        let backends = [family.backend(), family.other_backend()];
        bench.service(family.vip(), TCP, &backends);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        let mut asked = Vec::new();
        for _ in 0..2 * (1 + RETRIES) {
            let _sent = bench.send(Hook::Ingress, &syn);
            let to = bench.flows()[&syn.tuple()].to;
            asked.push(SocketAddr::new(to.destination.into(), to.destination_port));
        }
        let (first, second) = asked.split_at(1 + RETRIES);
        assert!(first.iter().all(|backend| *backend == asked[0]), "{asked:?}");
        assert!(second.iter().all(|backend| *backend != asked[0]), "{asked:?}");
        // It answers at last.
        let last = asked[asked.len() - 1];
        let answer = Packet::tcp(last, family.client(), 5000, b"").syn().ack(1001);
        bench.send(Hook::Egress, &answer).passes(Outcome::Reply, &answer.clone().from(family.vip()));
        for _ in 0..2 + RETRIES {
            bench.send(Hook::Ingress, &syn).passes(Outcome::Forward, &syn.clone().to(last));
        }
    }
}
