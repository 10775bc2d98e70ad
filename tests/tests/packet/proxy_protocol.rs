//! Connections whose backend gets a PROXY protocol header: what happens to each segment, lost ones included.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{
    Outcome::{Forward, Hairpin, Masquerade, NewFlow, RejectTcp, Reply},
    Service,
    conntrack::{Flow, Phase, seen},
    service_flags,
};

use super::{
    icmp,
    packets::{Packet, fragments},
    stage::{FIRST_PORT, Family, PORTS, RESIZED, each, each_kernel, each_on, masquerade_settings},
    testbed::{Device, Hook, TCP, Testbed},
};

/// The client's first sequence number, that of its SYN. The next ones wrap around within the header.
const ISN: u32 = 0xffff_fff0;
/// The sequence number of the client's first byte.
const BASE: u32 = ISN.wrapping_add(1);

/// A connection to a Service with the PROXY protocol.
#[derive(Clone, Copy)]
struct Connection {
    family: Family,
    backend: SocketAddr,
    /// The length of the header.
    length: u32,
}

impl Connection {
    fn new(bed: &mut Testbed, family: Family) -> Self {
        Self::to(bed, family, family.backend())
    }

    fn to(bed: &mut Testbed, family: Family, backend: SocketAddr) -> Self {
        let flags = service_flags::PROXY_PROTOCOL | service_flags::RESET_UNKNOWN;
        bed.service_with(family.vip(), TCP, &[backend], Service { id: 1, flags, ..Service::zeroed() });
        Self { family, backend, length: if family == Family::V4 { 28 } else { 52 } }
    }

    /// A segment of the client with `payload`, which begins `offset` bytes after the first byte of the client's stream.
    fn client(&self, offset: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.family.client(), self.family.vip(), BASE.wrapping_add(offset), payload).ack(5001)
    }

    fn syn(&self) -> Packet {
        Packet::tcp(self.family.client(), self.family.vip(), ISN, &[]).syn()
    }

    /// A segment of the backend that acknowledges the header and `acked` bytes of the client.
    fn backend(&self, seq: u32, acked: u32, payload: &[u8]) -> Packet {
        let ack = BASE.wrapping_add(self.length).wrapping_add(acked);
        Packet::tcp(self.backend, self.family.client(), seq, payload).ack(ack)
    }

    /// The bytes of the header, as the crate `ppp` builds them.
    fn header(&self) -> Vec<u8> {
        use ppp::v2::{Addresses, Builder, Command, Protocol, Version};
        let addresses = Addresses::from((self.family.client(), self.family.vip()));
        Builder::with_addresses(Version::Two | Command::Proxy, Protocol::Stream, addresses).build().unwrap()
    }

    /// The packet that the backend gets when `segment` carries the header in place of its payload.
    fn with_header(&self, segment: &Packet) -> Packet {
        let mut packet = segment.clone().to(self.backend);
        packet.payload = self.header();
        packet.padding = 0;
        packet.with(|packet| {
            let tcp = packet.tcp_header();
            (tcp.psh, tcp.fin, tcp.urg, tcp.urgent_pointer) = (true, false, false, 0);
        })
    }

    /// The client's segment as the backend gets it: with the sequence number shifted by the length of the header.
    fn shifted(&self, segment: &Packet) -> Packet {
        let length = self.length;
        segment.clone().to(self.backend).with(|packet| {
            let tcp = packet.tcp_header();
            tcp.sequence_number = tcp.sequence_number.wrapping_add(length);
        })
    }

    /// A segment with which the backend acknowledges the header, as the client gets it.
    fn reduced(&self, segment: &Packet) -> Packet {
        let length = self.length;
        segment.clone().from(self.family.vip()).with(|packet| {
            let tcp = packet.tcp_header();
            tcp.acknowledgment_number = tcp.acknowledgment_number.wrapping_sub(length);
        })
    }

    /// A segment that the backend sends before it has the whole header, as the client gets it.
    fn clamped(&self, segment: &Packet) -> Packet {
        segment.clone().from(self.family.vip()).ack(BASE)
    }

    /// A segment that the backend sends when it has only the first `had` bytes of the header.
    fn lacking(&self, seq: u32, had: u32, payload: &[u8]) -> Packet {
        Packet::tcp(self.backend, self.family.client(), seq, payload).ack(BASE.wrapping_add(had))
    }

    #[track_caller]
    fn forwards(&self, bed: &mut Testbed, segment: &Packet, expected: &Packet) {
        bed.send(Hook::Ingress, segment).passes(Forward, expected);
    }

    #[track_caller]
    fn replies(&self, bed: &mut Testbed, segment: &Packet, expected: &Packet) {
        bed.send(Hook::Egress, segment).passes(Reply, expected);
    }

    #[track_caller]
    fn assert_phase(&self, bed: &Testbed, phase: Phase) {
        let flows = bed.flows();
        let forward = &flows[&self.syn().tuple()];
        assert_eq!(Phase::of(forward, &flows[&forward.to.reversed()]), phase, "{flows:#?}");
        assert!(flows.values().all(Flow::has_proxy_header));
    }

    /// Sends SYN and SYN-ACK.
    #[track_caller]
    fn begin(&self, bed: &mut Testbed) {
        bed.send(Hook::Ingress, &self.syn()).passes(NewFlow, &self.syn().to(self.backend));
        let answer = self.lacking(5000, 0, &[]).syn();
        let narrow = u16::try_from(self.length).unwrap();
        let expected = self.clamped(&answer).with(|packet| packet.tcp_header().window_size -= narrow);
        self.replies(bed, &answer, &expected);
    }

    /// Sends SYN, SYN-ACK, and the ACK that carries the header.
    #[track_caller]
    fn open(&self, bed: &mut Testbed) {
        self.begin(bed);
        let ack = self.client(0, &[]);
        self.forwards(bed, &ack, &self.with_header(&ack));
    }

    /// Leads the connection to the state in which the backend has acknowledged the header. Sets flags instead of
    /// sending the header, which would resize a frame.
    #[track_caller]
    fn open_acknowledged(&self, bed: &mut Testbed) {
        self.begin(bed);
        let mut flows = bed.flows();
        for flow in flows.values_mut() {
            flow.seen |= seen::PROXY_HEADER | seen::SYNCHRONISED | seen::ACK;
        }
        bed.restore_flows(&flows);
    }
}

/// Options of a segment: timestamps, and selective acknowledgements of these ranges.
fn sack(blocks: &[(u32, u32)]) -> Vec<u8> {
    let size = u8::try_from(2 + 8 * blocks.len()).unwrap();
    let edges = blocks.iter().flat_map(|(start, end)| [start.to_be_bytes(), end.to_be_bytes()]);
    let timestamps = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 1, 1];
    [&timestamps[..], &[5, size], &edges.collect::<Vec<_>>().concat()].concat()
}

fn with_options(packet: &Packet, options: &[u8]) -> Packet {
    packet.clone().with(|packet| packet.tcp_header().set_options_raw(options).unwrap())
}

#[test]
fn header_goes_with_the_ack_of_the_handshake_and_later_numbers_are_shifted() {
    each_kernel("PROXY protocol, connection", &RESIZED, |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open(bed);
        let request = tcp.client(0, b"GET / HTTP/1.1\r\n\r\n");
        tcp.forwards(bed, &request, &tcp.shifted(&request));
        let answer = tcp.backend(5001, 18, b"HTTP/1.1 204 No Content\r\n\r\n");
        tcp.replies(bed, &answer, &tcp.reduced(&answer));
        tcp.assert_phase(bed, Phase::Established);
        for segment in [
            tcp.client(18, b"").with(|packet| packet.tcp_header().acknowledgment_number = 5028),
            tcp.client(17, b""),
            tcp.client(18, b"urgent").with(|packet| {
                let header = packet.tcp_header();
                (header.urg, header.urgent_pointer) = (true, 3);
            }),
            tcp.client(24, b"").fin(),
        ] {
            tcp.forwards(bed, &segment, &tcp.shifted(&segment));
        }
        for segment in [tcp.backend(5028, 24, b"more"), tcp.backend(5032, 25, b"").fin()] {
            tcp.replies(bed, &segment, &tcp.reduced(&segment));
        }
        tcp.assert_phase(bed, Phase::TimeWait);
        bed.assert_flows(1);
    });
}

/// Ethernet pads the ACK of the handshake to 60 bytes; the padding must not become a part of the header.
#[test]
fn header_overwrites_the_padding_of_the_frame() {
    each_on(&[Device::Ethernet], "PROXY protocol, padding", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.begin(bed);
        let ack = tcp.client(0, &[]).with(|packet| packet.padding = 6);
        tcp.forwards(bed, &ack, &tcp.with_header(&ack));
    });
}

#[test]
fn header_keeps_the_options_of_the_segment() {
    each_on(&RESIZED, "PROXY protocol, options", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.begin(bed);
        let ack = with_options(&tcp.client(0, &[]), &[1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8]);
        tcp.forwards(bed, &ack, &tcp.with_header(&ack));
    });
}

/// If the server sends first, each ACK of the client carries the header until the backend has acknowledged it.
#[test]
fn lost_header_is_sent_again_with_each_empty_segment() {
    each_on(&RESIZED, "PROXY protocol, lost header", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open(bed);
        let repeated = tcp.lacking(5000, 0, &[]).syn();
        let narrow = u16::try_from(tcp.length).unwrap();
        let expected = tcp.clamped(&repeated).with(|packet| packet.tcp_header().window_size -= narrow);
        tcp.replies(bed, &repeated, &expected);
        let ack = tcp.client(0, &[]);
        tcp.forwards(bed, &ack, &tcp.with_header(&ack));
        let banner = tcp.lacking(5001, 0, b"220 ready\r\n");
        tcp.replies(bed, &banner, &tcp.clamped(&banner));
        let ack = tcp.client(0, &[]).ack(5012);
        tcp.forwards(bed, &ack, &tcp.with_header(&ack));
        let part = tcp.lacking(5012, tcp.length - 1, b"more");
        tcp.replies(bed, &part, &tcp.clamped(&part));
        let whole = tcp.backend(5012, 0, &[]);
        tcp.replies(bed, &whole, &tcp.reduced(&whole));
        let ack = tcp.client(0, &[]).ack(5016);
        tcp.forwards(bed, &ack, &tcp.shifted(&ack));
    });
}

/// The ACK of the handshake is lost before the node, or the client sends it with its first bytes. So the node receives
/// no empty segment that could carry the header. The programs put the header in place of the first bytes, and the first
/// bytes follow in a copy of their segment. The test itself sends the copy.
#[test]
fn first_bytes_give_way_to_the_header() {
    for finishes in [false, true] {
        each_on(&RESIZED, "PROXY protocol, first bytes", |bed, family| {
            let tcp = Connection::new(bed, family);
            tcp.begin(bed);
            let request = tcp.client(0, &[0xa5; 700]);
            let request = if finishes { request.fin() } else { request };
            tcp.forwards(bed, &request, &tcp.with_header(&request));
            tcp.forwards(bed, &request, &tcp.shifted(&request));
            let later = tcp.client(700, b"later");
            tcp.forwards(bed, &later, &tcp.shifted(&later));
        });
    }
}

#[test]
fn repeated_first_bytes_send_the_header_again() {
    each_on(&RESIZED, "PROXY protocol, repeated bytes", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open(bed);
        let (first, second) = (tcp.client(0, b"first"), tcp.client(5, b"second"));
        tcp.forwards(bed, &first, &tcp.shifted(&first));
        tcp.forwards(bed, &second, &tcp.shifted(&second));
        // The backend lacks the header, but has the bytes behind it.
        let base = BASE.wrapping_add(tcp.length);
        let options = sack(&[(base, base.wrapping_add(11))]);
        let duplicate = with_options(&tcp.lacking(5001, 0, &[]), &options);
        let without = [&options[..14], &[1; 10]].concat();
        tcp.replies(bed, &duplicate, &with_options(&tcp.clamped(&duplicate), &without));
        tcp.forwards(bed, &first, &tcp.with_header(&first));
        tcp.forwards(bed, &first, &tcp.shifted(&first));
        let whole = tcp.backend(5001, 11, &[]);
        tcp.replies(bed, &whole, &tcp.reduced(&whole));
        tcp.forwards(bed, &first, &tcp.shifted(&first));
    });
}

#[test]
fn selective_acknowledgements_are_shifted() {
    each("PROXY protocol, SACK", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let base = BASE.wrapping_add(tcp.length);
        let of = |by: u32| {
            let at = |offset: u32| base.wrapping_add(offset).wrapping_sub(by);
            sack(&[(at(100), at(200)), (at(300), at(400)), (at(500), at(600))])
        };
        let segment = with_options(&tcp.backend(5001, 0, b"x"), &of(0));
        tcp.replies(bed, &segment, &with_options(&tcp.reduced(&segment), &of(tcp.length)));
        // The client's selective acknowledgements are about bytes of the backend, whose sequence numbers are not
        // shifted.
        let segment = with_options(&tcp.client(0, &[]), &of(0));
        tcp.forwards(bed, &segment, &tcp.shifted(&segment));
    });
}

#[test]
fn syn_carries_neither_fast_open_nor_bytes() {
    each_on(&RESIZED, "PROXY protocol, TCP Fast Open", |bed, family| {
        let tcp = Connection::new(bed, family);
        let options = [2, 4, 5, 0xb4, 34, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1];
        let bare = [2, 4, 5, 0xb4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
        let expected = with_options(&tcp.syn(), &bare).to(tcp.backend);
        for payload in [&b""[..], b"GET / HTTP/1.1\r\n\r\n"] {
            let syn = with_options(&tcp.syn(), &options).with(|packet| packet.payload = payload.to_vec());
            let outcome = if payload.is_empty() { NewFlow } else { Forward };
            bed.send(Hook::Ingress, &syn).passes(outcome, &expected);
        }
        let answer = tcp.lacking(5000, 0, &[]).syn();
        let narrow = u16::try_from(tcp.length).unwrap();
        let expected = tcp.clamped(&answer).with(|packet| packet.tcp_header().window_size -= narrow);
        tcp.replies(bed, &answer, &expected);
        let first = tcp.client(0, b"GET / HTTP/1.1\r\n\r\n");
        tcp.forwards(bed, &first, &tcp.with_header(&first));
        tcp.forwards(bed, &first, &tcp.shifted(&first));
    });
}

#[test]
fn window_of_the_answer_has_room_for_the_header() {
    each("PROXY protocol, window", |bed, family| {
        let tcp = Connection::new(bed, family);
        bed.send(Hook::Ingress, &tcp.syn()).passes(NewFlow, &tcp.syn().to(tcp.backend));
        for (window, left) in [(1000, 1000 - u16::try_from(tcp.length).unwrap()), (20, 0)] {
            let answer =
                tcp.lacking(5000, 0, &[]).syn().with(|packet| packet.tcp_header().window_size = window);
            let expected = tcp.clamped(&answer).with(|packet| packet.tcp_header().window_size = left);
            tcp.replies(bed, &answer, &expected);
        }
    });
}

/// The backend accepts a RST only with the exact sequence number, which depends on whether the backend has received the
/// header. The programs do not know whether it has, so they shift the first RST, and not the next one.
#[test]
fn reset_of_a_client_without_bytes_tries_both_numbers() {
    each_on(&RESIZED, "PROXY protocol, RST", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open(bed);
        let reset = Packet::tcp(family.client(), family.vip(), BASE, &[]).rst();
        tcp.forwards(bed, &reset, &tcp.shifted(&reset));
        let challenge = tcp.lacking(5001, 0, &[]);
        tcp.replies(bed, &challenge, &tcp.clamped(&challenge));
        tcp.forwards(bed, &reset, &reset.clone().to(tcp.backend));
    });
}

#[test]
fn resets_of_both_ends_close_the_connection() {
    each("PROXY protocol, RST of both", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let request = tcp.client(0, b"GET / HTTP/1.1\r\n\r\n");
        tcp.forwards(bed, &request, &tcp.shifted(&request));
        let ack = tcp.backend(5001, 18, &[]);
        tcp.replies(bed, &ack, &tcp.reduced(&ack));
        let opened = bed.flows();
        let reset = Packet::tcp(family.client(), family.vip(), BASE.wrapping_add(18), &[]).rst();
        tcp.forwards(bed, &reset, &tcp.shifted(&reset));
        tcp.assert_phase(bed, Phase::Closed);
        bed.restore_flows(&opened);
        let reset = tcp.backend(5001, 18, &[]).rst();
        tcp.replies(bed, &reset, &tcp.reduced(&reset));
        tcp.assert_phase(bed, Phase::Closed);
        bed.restore_flows(&opened);
        let refused = Packet::tcp(tcp.backend, family.client(), 5001, &[]).rst();
        tcp.replies(bed, &refused, &refused.clone().from(family.vip()));
    });
}

#[test]
fn refused_connection_stays_as_it_is() {
    each("PROXY protocol, refused", |bed, family| {
        let tcp = Connection::new(bed, family);
        bed.send(Hook::Ingress, &tcp.syn()).passes(NewFlow, &tcp.syn().to(tcp.backend));
        let refusal = tcp.lacking(0, 0, &[]).rst();
        tcp.replies(bed, &refusal, &refusal.clone().from(family.vip()));
        tcp.assert_phase(bed, Phase::Closed);
        let again = tcp.syn().with(|packet| packet.tcp_header().sequence_number = 77);
        bed.send(Hook::Ingress, &again).passes(NewFlow, &again.clone().to(tcp.backend));
    });
}

/// Until the backend has accepted the connection, the programs do not know the sequence number of the client's first
/// byte, so they shift nothing.
#[test]
fn refusal_of_a_client_with_a_small_sequence_number_stays_as_it_is() {
    each("PROXY protocol, refused, small sequence number", |bed, family| {
        let tcp = Connection::new(bed, family);
        let syn = tcp.syn().with(|packet| packet.tcp_header().sequence_number = 1000);
        bed.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(tcp.backend));
        let refusal =
            tcp.lacking(0, 0, &[]).rst().with(|packet| packet.tcp_header().acknowledgment_number = 1001);
        tcp.replies(bed, &refusal, &refusal.clone().from(family.vip()));
        tcp.assert_phase(bed, Phase::Closed);
    });
}

/// The client has lost a connection without ending it, and uses the same port again.
#[test]
fn refusal_on_the_flow_of_an_earlier_connection_stays_as_it_is() {
    each("PROXY protocol, refused on an earlier flow", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let syn = tcp.syn().with(|packet| packet.tcp_header().sequence_number = 1000);
        tcp.forwards(bed, &syn, &syn.clone().to(tcp.backend));
        let refusal =
            tcp.lacking(0, 0, &[]).rst().with(|packet| packet.tcp_header().acknowledgment_number = 1001);
        tcp.replies(bed, &refusal, &refusal.clone().from(family.vip()));
    });
}

/// If either entry of a connection is lost, the programs do not know whether its sequence numbers are shifted.
#[test]
fn connection_whose_entries_are_lost_is_reset() {
    each_on(&RESIZED, "PROXY protocol, lost entries", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let opened = bed.flows();
        let segment = tcp.client(0, b"GET / HTTP/1.1\r\n\r\n");
        for nth in [0, 1] {
            bed.restore_flows(&opened);
            bed.delete_nth_entry(nth);
            bed.send(Hook::Ingress, &segment).redirects_any(RejectTcp);
        }
    });
}

#[test]
fn masqueraded_connection_tells_the_address_of_the_client() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each_on(&RESIZED, "PROXY protocol, masqueraded", |bed, family| {
        bed.settings(&masquerade_settings(PORTS));
        let tcp = Connection::new(bed, family);
        bed.add_flags(family.vip(), TCP, service_flags::MASQUERADE);
        bed.send(Hook::Ingress, &tcp.syn()).passes_any(NewFlow);
        let port = bed.flows()[&tcp.syn().tuple()].to.source_port;
        assert!((FIRST_PORT..FIRST_PORT + PORTS).contains(&port), "{port}");
        let translated = SocketAddr::new(family.client().ip(), port);
        let answer = tcp.lacking(5000, 0, &[]).syn().to(translated);
        let narrow = u16::try_from(tcp.length).unwrap();
        let expected =
            tcp.clamped(&answer).to(family.client()).with(|packet| packet.tcp_header().window_size -= narrow);
        bed.send(Hook::Egress, &answer).passes(Reply, &expected);
        let ack = tcp.client(0, &[]);
        let header = tcp.with_header(&ack).from(translated);
        tcp.forwards(bed, &ack, &header);
        // The second translation, towards the node of the backend, changes no sequence numbers.
        let node = SocketAddr::new(family.node(), port);
        bed.send(Hook::Egress, &header).passes(Masquerade, &header.clone().from(node));
    });
}

#[test]
fn hairpin_connection_gets_the_header_too() {
    each_on(&[Device::Ethernet], "PROXY protocol, hairpin", |bed, family| {
        let pod = SocketAddr::new(family.client().ip(), 8080);
        let vip = SocketAddr::new(family.vip().ip(), family.client().port());
        let tcp = Connection::to(bed, family, pod);
        let turned = |packet: Packet| packet.from(vip).swapped_macs();
        bed.send(Hook::Ingress, &tcp.syn()).redirects(Hairpin, &turned(tcp.syn().to(pod)));
        let answer = Packet::tcp(pod, vip, 5000, &[]).syn().ack(BASE);
        bed.send(Hook::Ingress, &answer).redirects_any(Hairpin);
        let ack = tcp.client(0, &[]);
        bed.send(Hook::Ingress, &ack).redirects(Hairpin, &turned(tcp.with_header(&ack)));
    });
}

/// The client ignores an ICMP error that quotes a sequence number outside of what it has sent.
#[test]
fn icmp_error_quotes_the_number_of_the_client() {
    each("PROXY protocol, ICMP error", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let sent = tcp.client(0, b"GET / HTTP/1.1\r\n\r\n");
        let seen = tcp.shifted(&sent);
        tcp.forwards(bed, &sent, &seen);
        for length in [8, 18, 38] {
            let network = if family == Family::V4 { 20 } else { 40 };
            let (original, translated) = icmp::quote(&sent, &seen, network + length);
            let error =
                |from, quote: &[u8]| icmp::port_unreachable(family, from, family.client().ip(), quote);
            let (inside, outside) =
                (error(family.router(), &translated), error(family.vip().ip(), &original));
            bed.send(Hook::Egress, &inside).passes(lb_common::Outcome::IcmpError, &outside);
        }
    });
}

/// A fragment cannot carry the header: the programs only shift the sequence number.
#[test]
fn fragments_of_later_segments_are_shifted() {
    each("PROXY protocol, fragments", |bed, family| {
        let tcp = Connection::new(bed, family);
        tcp.open_acknowledged(bed);
        let segment = tcp.client(0, &[0xa5; 600]);
        let (parts, expected) = (fragments(&segment, 77, 256), fragments(&tcp.shifted(&segment), 77, 256));
        for (part, expected) in parts.iter().zip(&expected) {
            tcp.forwards(bed, part, expected);
        }
    });
}
