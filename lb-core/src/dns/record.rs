//! Questions and answers, without their encoding.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// The type of a question, as far as names of Services depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// IPv4 addresses.
    A,
    /// IPv6 addresses.
    Aaaa,
    /// The name that this name is an alias of.
    Cname,
    /// Name servers of a zone.
    Ns,
    /// The name of an address.
    Ptr,
    /// The start of a zone.
    Soa,
    /// Ports and the hosts that serve them.
    Srv,
    /// Texts.
    Txt,
    /// Any type: whether the name exists (RFC 8482).
    Any,
    /// All others; no name has records of them.
    Other,
}

impl Kind {
    /// All types.
    pub const ALL: [Self; 10] = [
        Self::A,
        Self::Aaaa,
        Self::Cname,
        Self::Ns,
        Self::Ptr,
        Self::Soa,
        Self::Srv,
        Self::Txt,
        Self::Any,
        Self::Other,
    ];

    /// The type of the records that hold this address.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::A } else { Self::Aaaa }
    }
}

/// The data of a record. Names have no dot at their end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Data {
    /// `A`
    A(Ipv4Addr),
    /// `AAAA`
    Aaaa(Ipv6Addr),
    /// `CNAME`
    Cname(String),
    /// `HINFO` in answer to `ANY` (RFC 8482)
    Hinfo,
    /// `NS`
    Ns(String),
    /// `PTR`
    Ptr(String),
    /// `SOA` of the zone.
    Soa,
    /// `SRV`; the priority is always 0.
    Srv {
        /// The share of this record among those with the same owner.
        weight: u16,
        /// The port.
        port: u16,
        /// The host, which is never an alias.
        target: String,
    },
    /// `TXT`
    Txt(&'static str),
}

impl From<IpAddr> for Data {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::A(address),
            IpAddr::V6(address) => Self::Aaaa(address),
        }
    }
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Records of the name that was asked for.
    Found(Found),
    /// The name is an alias of this one: the answer has a CNAME record, and then the records of the alias's target.
    Alias(String),
    /// The name, or a name below it, exists, but the name has no record of the requested type. The SOA of this zone
    /// goes with the answer.
    NoData(String),
    /// Neither the name nor any name below it exists. The SOA of this zone goes with the answer.
    NxDomain(String),
    /// The name is in a zone of ours. An object that cannot be read may have it.
    Unknown,
    /// The name is in no zone of ours: another server has to answer.
    NotOurs,
}

/// Records that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Seconds for which clients may keep the records.
    pub ttl: u32,
    /// The records, whose owner is the name in the question. Their order is the same in each answer.
    pub records: Arc<[Data]>,
    /// Addresses of the hosts that the records name.
    pub additional: Arc<[(String, IpAddr)]>,
}
