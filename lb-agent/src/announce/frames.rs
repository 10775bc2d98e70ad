//! The ARP and neighbour discovery frames that announce an address.

use std::net::{IpAddr, Ipv6Addr};

use lb_ebpf::announce::{
    arp::{self, Operation},
    neighbour::{self, Advertisement},
};

/// Unsolicited frames that announce the address to all machines of the network. For IPv4 these are an ARP request and
/// an ARP reply, because some machines accept only one of them.
pub(super) fn announcements(address: IpAddr, mac: [u8; 6]) -> Vec<Vec<u8>> {
    match address {
        IpAddr::V4(v4) => [Operation::Request, Operation::Reply]
            .map(|operation| arp::Frame::announcement(v4.octets(), mac, operation).bytes().to_vec())
            .to_vec(),
        IpAddr::V6(v6) => vec![Advertisement::announcement(v6.octets(), mac).bytes().to_vec()],
    }
}

/// The solicited-node multicast group of an IPv6 address; `None` for IPv4, because ARP requests are broadcast.
pub(super) fn group(address: IpAddr) -> Option<Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(neighbour::group(&v6.octets()).into()),
    }
}

pub(super) fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
