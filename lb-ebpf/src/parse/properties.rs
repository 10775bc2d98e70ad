//! Properties of the parser that hold for every frame. Tests and fuzz targets check them.

use core::cell::Cell;

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};
use lb_common::{Address, conntrack::Tuple};

use super::{
    Body, Fragment, Headers, Layer, Packet, Part, TupleRule, frame::lengths, is_plain_and, parse,
    parse_plain, parse_quoted,
};

/// Checks what users of the parser rely on: every header that the programs write lies within the frame, all addresses
/// are of one family, the filter gets the tuple that the fast path gets, and whatever the plain parser returns agrees
/// with the full parser.
///
/// # Panics
///
/// If one of these properties does not hold.
pub fn check(frame: &[u8], layer: Layer) {
    let plain = parse_plain(frame);
    assert_eq!(decided(frame), plain.map(|packet| packet.tuple));
    if let Some(plain) = plain {
        assert_eq!(Ok(plain), parse(frame, Layer::Ethernet).map(without_identification));
    }
    if let Ok(packet) = parse(frame, layer) {
        check_headers(frame, &packet);
    }
}

/// Checks that, if this parser and etherparse both find ports, the ports are equal, and so are the addresses.
///
/// # Panics
///
/// If the ports or the addresses differ.
pub fn compare(frame: &[u8]) {
    let Ok(packet) = parse(frame, Layer::Ethernet) else { return };
    let Ok(theirs) = LaxSlicedPacket::from_ethernet(frame) else { return };
    let ports = match (&theirs.transport, packet.body) {
        (Some(TransportSlice::Tcp(tcp)), Body::Tcp) => (tcp.source_port(), tcp.destination_port()),
        (Some(TransportSlice::Udp(udp)), Body::Udp) => (udp.source_port(), udp.destination_port()),
        _ => return,
    };
    assert_eq!((packet.tuple.source_port, packet.tuple.destination_port), ports);
    let addresses = match &theirs.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            Some([ip.header().source(), ip.header().destination()].map(Address::from_v4))
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            Some([ip.header().source(), ip.header().destination()].map(Address::from_v6))
        }
        Some(LaxNetSlice::Arp(_)) | None => None,
    };
    assert_eq!(Some([packet.tuple.source, packet.tuple.destination]), addresses);
}

/// The tuple that [`is_plain_and`] passes to its rule; `None` if the frame is not plain.
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

/// Clears the identification of a whole datagram: the plain parser does not read it, because only fragments need it.
const fn without_identification(packet: Packet) -> Packet {
    match packet.fragment.part {
        Part::Whole => Packet { fragment: Fragment { identification: 0, ..packet.fragment }, ..packet },
        Part::First | Part::Later => packet,
    }
}

fn check_headers(frame: &[u8], packet: &Packet) {
    let Headers { l3, l4, is_v4 } = packet.headers;
    let network = if is_v4 { 20 } else { 40 };
    let transport = match packet.body {
        Body::Tcp => 20,
        Body::Udp => 8,
        Body::Sctp => 16,
        Body::IcmpError | Body::Echo => 2,
        Body::LaterFragment => 0,
    };
    let ends_within = |offset: u32| offset as usize <= frame.len();
    assert!(l3 + network <= l4 && ends_within(l3 + network), "{packet:?} in {} bytes", frame.len());
    assert!(transport == 0 || ends_within(l4 + transport), "{packet:?} in {} bytes", frame.len());
    assert_eq!([packet.tuple.source, packet.tuple.destination].map(|address| address.is_v4()), [is_v4; 2]);
    if packet.body == Body::IcmpError
        && let Ok(quoted) = parse_quoted(frame, &packet.headers)
    {
        let Headers { l3, l4: ports, is_v4: quotes_v4 } = quoted.headers;
        assert_eq!((l3, quotes_v4), (l4 + lengths::ICMP, is_v4));
        assert!(l3 + network <= ports && ends_within(ports + 4), "{quoted:?} in {} bytes", frame.len());
    }
}
