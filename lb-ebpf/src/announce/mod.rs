//! ARP and neighbour discovery for virtual addresses: reading what other machines send, and building answers and
//! announcements. Whether the node answers is a rule: [`crate::rules::announce`].

pub mod arp;
pub mod neighbour;
#[cfg(test)]
mod tests;

/// The MAC address of all machines of a network.
pub const BROADCAST: [u8; 6] = [0xff; 6];

/// EtherType of ARP, RFC 826.
pub const ARP: u16 = 0x0806;
/// EtherType of IPv6, RFC 2464.
pub const IPV6: u16 = 0x86dd;
