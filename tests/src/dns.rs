//! Encodes DNS queries for A records and decodes the answers, for tests that query a server without a resolver.

use std::net::Ipv4Addr;

/// A query for the A records of `name`, which has labels of at most 63 bytes and no trailing dot.
pub fn query(id: u16, name: &str) -> Vec<u8> {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.').chain([""]) {
        query.extend(u8::try_from(label.len()));
        query.extend(label.as_bytes());
    }
    query.extend([0, 1, 0, 1]);
    query
}

/// The address in the answer to a [`query`]: the last four bytes of `message`, which must end with the A record.
/// `None` unless the answer has one record and no error.
pub fn address(message: &[u8]) -> Option<Ipv4Addr> {
    let header = message.first_chunk::<12>()?;
    let has_address = header[3] & 15 == 0 && header[7] == 1;
    message.last_chunk::<4>().filter(|_| has_address).map(|bytes| Ipv4Addr::from(*bytes))
}
