//! The range that addresses are allocated from, and the order in which free addresses and ports are tried.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    family::Family,
    ip::{self, number},
};

/// The allocatable addresses of a network, numbered from 0. They are computed, not stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct IpRange {
    pub(super) net: IpNet,
    first: u128,
    last: u128,
}

impl IpRange {
    /// The addresses of `net`, without the network address (in IPv6 the subnet-router anycast address) and IPv4's
    /// broadcast address.
    pub(super) fn new(net: IpNet) -> Self {
        let last = number(net.broadcast());
        let last = if net.addr().is_ipv4() { last.saturating_sub(1) } else { last };
        Self { net, first: number(net.network()).saturating_add(1), last }
    }

    pub(super) fn family(&self) -> Family {
        Family::of(self.net.addr())
    }

    pub(super) fn contains(&self, ip: IpAddr) -> bool {
        Family::of(ip) == self.family() && (self.first..=self.last).contains(&number(ip))
    }

    /// Number of addresses in the range; 0 for a network with none to allocate, such as a /31.
    pub(super) const fn size(&self) -> u128 {
        if self.first > self.last { 0 } else { (self.last - self.first).saturating_add(1) }
    }

    /// Number of addresses in the static band: the lowest addresses, which are allocated automatically only when all
    /// others are taken, so that users find free addresses to request (KEP-3070).
    pub(super) fn static_band(&self) -> u128 {
        static_band(self.size(), 16, 256)
    }

    pub(super) fn nth(&self, offset: u128) -> IpAddr {
        ip::address(self.family(), self.first.saturating_add(offset).min(self.last))
    }

    pub(super) fn bounds(&self) -> String {
        if self.size() == 0 {
            "which has no usable address".to_owned()
        } else {
            format!("{} to {}", self.nth(0), self.nth(self.size() - 1))
        }
    }
}

/// Size of the static band by KEP-3070 and KEP-3668: `size / step`, at least 16 and at most `max`; 0 if the range is
/// too small for a band.
pub(super) fn static_band(size: u128, step: u128, max: u128) -> u128 {
    if size <= 16 { 0 } else { (size / step).clamp(16, max) }
}

/// The first free offset. Searches above the static band first, from the position of the hash on and wrapping around,
/// then inside the band. `None` if all are taken.
pub(super) fn probe(hash: u128, size: u128, band: u128, is_free: impl Fn(u128) -> bool) -> Option<u128> {
    let upper = size.checked_sub(band)?;
    let start = if upper == 0 { 0 } else { hash % upper };
    let above = (start..upper).chain(0..start).map(|offset| band + offset);
    above.chain(0..band).find(|offset| is_free(*offset))
}
