//! Fuzzes tunnels. The parser handles any frame. A packet in a tunnel parses as it does outside, unless its headers are
//! too long. etherparse accepts the outer headers.
#![no_main]

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use lb_common::{
    Address, GUE_PORT,
    conntrack::{Flow, Tick, Tuple, flow_flags},
};
use lb_ebpf::{
    forward::tunnel::{Outer, Tunnel, find, length, overhead},
    parse::{Headers, Layer, Packet, frame::Header, parse, parse_at},
};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    nodes: [[u8; 16]; 2],
    port: u16,
    is_gue: bool,
    frame: &'a [u8],
}

fuzz_target!(|input: Input<'_>| {
    for layer in [Layer::Ethernet, Layer::Ip] {
        come_in(input.frame, layer);
    }
    go_through(&input);
});

/// Checks that an inner packet lies within the frame and has the family of the outer header.
fn come_in(frame: &[u8], layer: Layer) {
    let Ok(tunnel) = find(frame, layer) else { return };
    let Tunnel { source, destination, outer, inner } = tunnel;
    assert!(outer + 20 <= inner && (inner as usize) < frame.len(), "{tunnel:?} in {} bytes", frame.len());
    assert_eq!(source.is_v4(), destination.is_v4());
    assert_eq!(frame[inner as usize] >> 4 == 4, source.is_v4());
    if let Ok(packet) = parse_at(frame, inner) {
        assert_eq!((packet.headers.l3, packet.headers.is_v4), (inner, source.is_v4()));
    }
}

fn go_through(input: &Input<'_>) {
    let Ok(packet) = parse(input.frame, Layer::Ip) else { return };
    let Some(flow) = flow(input, &packet) else { return };
    let is_v4 = packet.headers.is_v4;
    let Some(start) = input.frame.first_chunk::<8>() else { return };
    let [a, b, c, d, ..] = *start;
    let whole = length(start, is_v4);
    let outer = Outer::new(&flow, [a, b, c, d], whole);
    let sent = [&headers(&outer, is_v4), input.frame].concat();
    let inner = overhead(is_v4, input.is_gue);
    assert_eq!(sent.len() - input.frame.len(), inner as usize);

    let Tuple { source, destination, .. } = flow.to;
    assert_eq!(find(sent.as_slice(), Layer::Ip), Ok(Tunnel { source, destination, outer: 0, inner }));
    let Headers { l3, l4, is_v4 } = packet.headers;
    let moved = Packet { headers: Headers { l3: l3 + inner, l4: l4 + inner, is_v4 }, ..packet };
    let arrived = parse_at(sent.as_slice(), inner);
    // The tunnel may move long headers so far back that the parser gives up on them.
    assert!(arrived == Ok(moved) || l4 + inner > 1000, "{arrived:?} of {packet:?}");
    if whole != 0 && whole as usize == input.frame.len() && sent.len() <= usize::from(u16::MAX) {
        is_valid(&sent, &flow, input);
    }
}

/// A flow through a tunnel between two nodes of the packet's family; `None` if the input gives no such nodes.
fn flow(input: &Input<'_>, packet: &Packet) -> Option<Flow> {
    let is_v4 = packet.headers.is_v4;
    let [source, destination] = input.nodes.map(|bytes| match bytes {
        [a, b, c, d, ..] if is_v4 => Address::from_v4([a, b, c, d]),
        bytes => Address::from_v6(bytes),
    });
    // A GUE flow always has a source port: `Outer` takes 0 for a tunnel without UDP.
    if source.is_v4() != is_v4 || destination.is_v4() != is_v4 || input.is_gue && input.port == 0 {
        return None;
    }
    let to = Tuple::new(source, destination, input.port, 8080, packet.tuple.protocol);
    let flags = flow_flags::ROUTED | flow_flags::TUNNEL | if input.is_gue { flow_flags::GUE } else { 0 };
    Some(Flow::new(&packet.tuple, &to, 1, flags, Tick(1)))
}

fn headers(outer: &Outer, is_v4: bool) -> Vec<u8> {
    let mut headers = if is_v4 { bytes(&outer.ipv4()).to_vec() } else { bytes(&outer.ipv6()).to_vec() };
    if outer.is_gue() {
        headers.extend(bytes(&outer.udp()));
    }
    headers
}

/// The bytes of a header.
fn bytes<T: Header>(header: &T) -> &[u8] {
    // SAFETY: a `Header` is bytes only, and the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(header).cast(), size_of::<T>()) }
}

fn is_valid(sent: &[u8], flow: &Flow, input: &Input<'_>) {
    let sliced = SlicedPacket::from_ip(sent).expect("an outer header");
    match sliced.net.expect("an outer header") {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(header.calc_header_checksum(), header.header_checksum);
            assert_eq!(usize::from(header.total_len), sent.len());
            assert_eq!(header.ecn.value(), 0);
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header().to_header();
            assert_eq!(usize::from(header.payload_length) + 40, sent.len());
            assert_eq!(header.traffic_class & 3, 0);
        }
        NetSlice::Arp(_) => panic!("ARP"),
    }
    if input.is_gue {
        let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
        assert_eq!((udp.source_port(), udp.destination_port()), (flow.to.source_port, GUE_PORT));
        assert_eq!(udp.payload(), input.frame);
    }
}
