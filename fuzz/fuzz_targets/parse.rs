//! The parsers: headers lie within the frame, the plain parser agrees with the full one wherever it answers, the filter
//! sees the tuple that the fast path sees, and etherparse finds the same addresses and ports.
#![no_main]

use std::cell::Cell;

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};
use lb_common::{Address, conntrack::Tuple};
use lb_ebpf::parse::{
    Body, Fragment, Headers, Layer, Packet, Part, TupleRule, frame::lengths, is_plain_and, parse,
    parse_plain, parse_quoted,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    for layer in [Layer::Ethernet, Layer::Ip] {
        if let Ok(packet) = parse(frame, layer) {
            lies_within(frame, &packet);
        }
    }
    let plain = parse_plain(frame);
    assert_eq!(decided(frame), plain.map(|packet| packet.tuple));
    let full = parse(frame, Layer::Ethernet);
    if let Some(plain) = plain {
        assert_eq!(Ok(plain), full.map(without_identification));
    }
    if let Ok(full) = full {
        agrees_with_etherparse(frame, &full);
    }
});

/// The plain parser does not read the identification, which only fragments need.
fn without_identification(packet: Packet) -> Packet {
    match packet.fragment.part {
        Part::Whole => Packet { fragment: Fragment { identification: 0, ..packet.fragment }, ..packet },
        Part::First | Part::Later => packet,
    }
}

/// The tuple that [`is_plain_and`] decides about.
fn decided(frame: &[u8]) -> Option<Tuple> {
    struct Note(Cell<Option<Tuple>>);
    impl TupleRule for &Note {
        fn applies(&self, tuple: &Tuple) -> bool {
            self.0.set(Some(*tuple));
            true
        }
    }
    let note = Note(Cell::new(None));
    assert_eq!(is_plain_and(frame, &note), note.0.get().is_some());
    note.0.get()
}

fn lies_within(frame: &[u8], packet: &Packet) {
    let Headers { l3, l4, is_v4 } = packet.headers;
    let network = if is_v4 { lengths::IPV4 } else { lengths::IPV6 };
    let transport = match packet.body {
        Body::Tcp => lengths::TCP,
        Body::Udp => lengths::UDP,
        Body::Sctp => 16,
        Body::IcmpError | Body::Echo => 2,
        Body::LaterFragment => 0,
    };
    let end = frame.len();
    assert!(l3 + network <= l4 && (l3 + network) as usize <= end, "{packet:?} in {end} bytes");
    assert!(transport == 0 || (l4 + transport) as usize <= end, "{packet:?} in {end} bytes");
    assert_eq!([packet.tuple.source, packet.tuple.destination].map(|address| address.is_v4()), [is_v4; 2]);
    if packet.body == Body::IcmpError
        && let Ok(quoted) = parse_quoted(frame, &packet.headers)
    {
        assert_eq!((quoted.headers.l3, quoted.headers.is_v4), (l4 + lengths::ICMP, is_v4));
        let ports = quoted.headers.l4;
        assert!(
            quoted.headers.l3 + network <= ports && ports as usize + 4 <= end,
            "{quoted:?} in {end} bytes"
        );
    }
}

/// If both find ports, the ports are equal, and so are the addresses.
fn agrees_with_etherparse(frame: &[u8], packet: &Packet) {
    let Ok(theirs) = LaxSlicedPacket::from_ethernet(frame) else { return };
    let ports = match (&theirs.transport, packet.body) {
        (Some(TransportSlice::Tcp(tcp)), Body::Tcp) => (tcp.source_port(), tcp.destination_port()),
        (Some(TransportSlice::Udp(udp)), Body::Udp) => (udp.source_port(), udp.destination_port()),
        _ => return,
    };
    assert_eq!((packet.tuple.source_port, packet.tuple.destination_port), ports);
    let addresses = match &theirs.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            [ip.header().source(), ip.header().destination()].map(Address::from_v4)
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            [ip.header().source(), ip.header().destination()].map(Address::from_v6)
        }
        other => panic!("ports in {other:?}"),
    };
    assert_eq!([packet.tuple.source, packet.tuple.destination], addresses);
}
