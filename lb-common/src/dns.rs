//! Node-local DNS: queries of the node's pods to the cluster IP of the DNS Service go to the DNS server of the agent,
//! while that server answers.

use bytemuck::{Pod, Zeroable};

use crate::{Address, layout::describe};

/// The port of DNS queries (RFC 1035 §4.2).
pub const PORT: u16 = 53;

/// Value of `DNS_INTERCEPT`. An entry for queries has a cluster IP at [`PORT`] as its key, and names the DNS server. An
/// entry for answers has the endpoint of that server as its key, and names the cluster IP.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DnsIntercept {
    /// The address that replaces the one of the key.
    pub address: Address,
    /// When the server's lease ends, in nanoseconds of `CLOCK_MONOTONIC`; [`WITHDRAWN`] while the server stops, 0 if
    /// the key is the server's endpoint. The agent renews the lease while the server answers the agent's own queries.
    pub until: u64,
    /// The port that replaces the one of the key, in host byte order.
    pub port: u16,
    /// Padding, always 0.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<DnsIntercept>() == 32);

describe!(DnsIntercept { address, until, port, reserved });

impl DnsIntercept {
    /// The value for a cluster IP: queries to it go to the server at this address and port until the time `until`.
    pub const fn to_server(address: Address, port: u16, until: u64) -> Self {
        Self { address, until, port, reserved: [0; 6] }
    }

    /// The value for the endpoint of a server: its answers get this cluster IP as their source.
    pub const fn to_client(cluster_ip: Address) -> Self {
        Self { address: cluster_ip, until: 0, port: PORT, reserved: [0; 6] }
    }

    /// Whether the key is the server's endpoint, so that the entry is for the server's answers.
    #[inline(always)]
    pub const fn is_of_answers(&self) -> bool {
        self.until == 0
    }

    /// The state of the server's lease at `now`, in nanoseconds of `CLOCK_MONOTONIC`.
    #[inline(always)]
    pub const fn lease(&self, now: u64) -> Lease {
        if now < self.until {
            Lease::Live
        } else if self.until == WITHDRAWN {
            Lease::Withdrawn
        } else {
            Lease::Over
        }
    }
}

/// The value of [`DnsIntercept::until`] while the server stops.
pub const WITHDRAWN: u64 = 1;

/// Whether a DNS server answers, as far as its lease tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Lease {
    /// The server answers.
    Live = 0,
    /// The server stops: it still answers queries that are on their way, and gets no new ones.
    Withdrawn = 1,
    /// The server does not answer any more.
    Over = 2,
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for DnsIntercept {}
