//! Creates flow table entries of a given age.

use lb_common::{
    Address,
    conntrack::{Flow, Segment, Tick, Tuple, flow_flags, tcp_flags},
    protocol,
};
use lb_datapath::Conntrack;

/// The present tick in these tests.
pub(crate) const NOW: Tick = Tick(1_000_000);

pub(crate) fn ago(seconds: u64) -> Tick {
    Tick(NOW.0 - u32::try_from((seconds * 1_000_000_000) >> 30).unwrap())
}

/// Both entries, with their keys, of an answered flow from client port `port`, last seen at `last`. TCP flows are in
/// `Phase::Established`, UDP flows in `Phase::Replied`.
pub(crate) fn flow(protocol: u8, port: u16, last: Tick) -> [(Tuple, Flow); 2] {
    let address = |last| Address::from_v4([192, 0, 2, last]);
    let from = Tuple::new(address(1), address(10), port, 80, protocol);
    let to = Tuple::new(address(1), address(20), port, 8080, protocol);
    let mut forward = Flow::new(&from, &to, 7, 0, last);
    let mut reply =
        Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::REPLY | flow_flags::AT_EGRESS, last);
    let segment = |flags, seq, ack| Segment { flags, seq, ack, payload: 0 };
    if protocol == protocol::TCP {
        forward.observe_segment(&segment(tcp_flags::SYN, 100, 0), last);
        reply.observe_segment(&segment(tcp_flags::SYN | tcp_flags::ACK, 500, 101), last);
        forward.observe_segment(&segment(tcp_flags::ACK, 101, 501), last);
    } else {
        forward.observe_datagram(last);
        reply.observe_datagram(last);
    }
    [(from, forward), (to.reversed(), reply)]
}

pub(crate) fn insert(conntrack: &Conntrack, entries: &[(Tuple, Flow)]) {
    for (key, entry) in entries {
        assert!(conntrack.table().insert_new(key, entry).unwrap());
    }
}

/// The only entry, with its key, of a tunnelled flow from client port `port`.
pub(crate) fn tunnelled(protocol: u8, port: u16, last: Tick) -> (Tuple, Flow) {
    let [(from, mut forward), _] = counted(protocol, port, last);
    forward.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
    forward.to.source = Address::from_v4([192, 0, 2, 99]);
    (from, forward)
}

/// Like [`flow`]; the slot 5 of `ACTIVE` counts the flow.
pub(crate) fn counted(protocol: u8, port: u16, last: Tick) -> [(Tuple, Flow); 2] {
    flow(protocol, port, last).map(|(key, entry)| (key, Flow { active_flows_slot: 5, ..entry }))
}
