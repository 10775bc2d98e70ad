//! The frames that announce an address.

use std::net::{IpAddr, Ipv6Addr};

use lb_ebpf::announce::{
    arp::{self, Operation},
    neighbour::{self, Advertisement},
};

/// The frames by which a node tells all machines that it has the address: for IPv4 both kinds of ARP announcement, because
/// some machines heed only one.
pub(super) fn announcements(address: IpAddr, mac: [u8; 6]) -> Vec<Vec<u8>> {
    match address {
        IpAddr::V4(v4) => [Operation::Request, Operation::Reply]
            .map(|operation| arp::Frame::announcement(v4.octets(), mac, operation).bytes().to_vec())
            .to_vec(),
        IpAddr::V6(v6) => vec![Advertisement::announcement(v6.octets(), mac).bytes().to_vec()],
    }
}

/// The multicast group by which others ask for the address; `None` for IPv4, which asks by broadcast.
pub(super) fn group(address: IpAddr) -> Option<Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(neighbour::group(&v6.octets()).into()),
    }
}

/// A MAC address as text.
pub(super) fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
