//! DNS questions and answers, independent of their encoding.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// The record types in questions that the index distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An IPv4 address.
    A,
    /// An IPv6 address.
    Aaaa,
    /// The target, if the queried name is an alias.
    Cname,
    /// A name server of a zone.
    Ns,
    /// The name that belongs to an address.
    Ptr,
    /// The start of authority of a zone.
    Soa,
    /// A port, and the host that serves it.
    Srv,
    /// A text.
    Txt,
    /// Any type: the answer only shows whether the name exists (RFC 8482).
    Any,
    /// Any other type: no name in the index has records of such a type.
    Other,
}

impl Kind {
    /// All record types, in the order of declaration.
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

    /// The type of record that holds this address: `A` or `AAAA`.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::A } else { Self::Aaaa }
    }
}

/// The data of a DNS record. Names have no dot at their end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Data {
    /// An `A` record: an IPv4 address.
    A(Ipv4Addr),
    /// An `AAAA` record: an IPv6 address.
    Aaaa(Ipv6Addr),
    /// A `CNAME` record: the target of an alias.
    Cname(String),
    /// The `HINFO` record that answers a question of type `ANY` (RFC 8482).
    Hinfo,
    /// An `NS` record: the name of a name server.
    Ns(String),
    /// A `PTR` record: the name that belongs to an address.
    Ptr(String),
    /// The `SOA` record of the zone.
    Soa,
    /// An `SRV` record; its priority is always 0.
    Srv {
        /// Relative weight among the SRV records of the same name.
        weight: u16,
        /// The port that the host serves.
        port: u16,
        /// Name of the host, which is never an alias.
        target: String,
    },
    /// A `TXT` record: a text.
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

/// The answer of the index to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Records of the asked name.
    Found(Found),
    /// The queried name is an alias of the name in this variant. The answer has a CNAME record, then the records of
    /// that name.
    Alias(String),
    /// The name, or a name below it, exists, but has no record of the requested type. The answer carries the SOA record
    /// of this zone.
    NoData(String),
    /// Neither the name nor any name below it exists. The answer carries the SOA record of this zone.
    NxDomain(String),
    /// The name is in one of the zones that the index answers for. The index does not have the name, but does not deny
    /// it, because an object that cannot be read may have it.
    Unknown,
    /// The name is in none of the zones that the index answers for: another server has to answer.
    NotOurs,
}

/// Records that answer a question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Seconds for which clients may keep the records.
    pub ttl: u32,
    /// The records, all at the queried name, in the same order in each answer.
    pub records: Arc<[Data]>,
    /// Names and addresses of the hosts that the records name, for the additional section.
    pub additional: Arc<[(String, IpAddr)]>,
}
