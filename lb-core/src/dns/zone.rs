//! The DNS zones that the server is authoritative for.

use std::net::IpAddr;

use ipnet::IpNet;

use super::reverse::{self, Reverse};
use crate::model::ObjectName;

/// TTL of the record `dns-version` in seconds, as in the specification.
pub(super) const VERSION_TTL: u32 = 28_800;
/// The version of the specification, which the record `dns-version` shows.
pub(super) const VERSION: &str = "1.1.0";
/// Namespace and name of the DNS Service of most clusters.
const DNS_SERVICE: [&str; 2] = ["kube-system", "kube-dns"];
/// Maximum TTL of the SOA record, in seconds.
const SOA_TTL: u32 = 300;
/// Maximum length of a name on the wire in bytes, including length bytes and the root label.
const LONGEST_NAME: usize = 255;

/// The cluster domain, and the networks whose reverse names the server owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The cluster domain, in lower case and without a dot at its end.
    name: String,
    /// Seconds for which clients may cache records.
    ttl: u32,
    /// Ranges of cluster IPs: the server owns all their reverse names.
    ranges: Vec<IpNet>,
    /// The DNS Service of the cluster.
    dns_service: ObjectName,
    /// Addresses of this server, to which `ns.dns` resolves if the DNS Service has no cluster IP.
    servers: Vec<IpAddr>,
}

/// Why a text cannot be the cluster domain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is no domain name: labels of 1 to 63 letters, digits, hyphens and underscores, joined by dots, at most {} \
     characters in all, are expected",
    LONGEST_NAME - 2
)]
pub struct ZoneError {
    name: String,
}

impl Zone {
    /// The cluster domain `name`, with or without a dot at its end.
    ///
    /// # Errors
    ///
    /// A name that is no domain name.
    pub fn new(name: &str, ttl: u32) -> Result<Self, ZoneError> {
        let plain = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        if plain.len() + 2 > LONGEST_NAME || !plain.split('.').all(is_label) {
            return Err(ZoneError { name: name.to_owned() });
        }
        let [namespace, name] = DNS_SERVICE;
        let dns_service = ObjectName::new(namespace, name);
        Ok(Self { name: plain, ttl, ranges: Vec::new(), dns_service, servers: Vec::new() })
    }

    /// Makes the server own the reverse names of these networks.
    #[must_use]
    pub fn with_ranges(mut self, ranges: Vec<IpNet>) -> Self {
        self.ranges = ranges;
        self
    }

    /// Replaces the networks whose reverse names the server owns.
    pub fn set_ranges(&mut self, ranges: Vec<IpNet>) {
        self.ranges = ranges;
    }

    /// Sets the DNS Service of the cluster, for `ns.dns`; the default is `kube-system/kube-dns`.
    #[must_use]
    pub fn with_dns_service(mut self, service: ObjectName) -> Self {
        self.dns_service = service;
        self
    }

    /// Sets the addresses of this server, for `ns.dns`.
    #[must_use]
    pub fn with_servers(mut self, servers: Vec<IpAddr>) -> Self {
        self.servers = servers;
        self
    }

    /// The cluster domain, in lower case and without a dot at its end.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Seconds for which clients may cache records. For negative answers, [`Self::soa_ttl`] applies.
    pub const fn ttl(&self) -> u32 {
        self.ttl
    }

    /// TTL of the SOA record, in seconds.
    pub fn soa_ttl(&self) -> u32 {
        self.ttl.min(SOA_TTL)
    }

    pub(super) const fn dns_service(&self) -> &ObjectName {
        &self.dns_service
    }

    pub(super) fn servers(&self) -> &[IpAddr] {
        &self.servers
    }

    /// The labels before the cluster domain; `None` if the name is not in the cluster domain. Compares whole labels.
    pub(super) fn strip<'a, 'b>(&self, labels: &'a [&'b [u8]]) -> Option<&'a [&'b [u8]]> {
        let mut rest = labels;
        for wanted in self.name.rsplit('.') {
            let (last, before) = rest.split_last()?;
            if *last != wanted.as_bytes() {
                return None;
            }
            rest = before;
        }
        Some(rest)
    }

    /// The zone of a reverse name, without a dot at its end, if one of the server's ranges contains the name; else
    /// `None`, even if the index has names for the address.
    pub(super) fn reverse_zone(&self, name: &Reverse) -> Option<String> {
        let range = self.ranges.iter().find(|range| name.is_within(range))?;
        Some(reverse::zone(range, name))
    }
}

fn is_label(label: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=63).contains(&label.len()) && label.bytes().all(allowed)
}
