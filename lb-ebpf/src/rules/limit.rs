//! The limits on new connections of a Service: which packets they apply to, and which buckets a connection takes tokens
//! from.
//!
//! Each new connection takes a token from the bucket of its client, then one from the bucket of the service. A client
//! whose own bucket is empty takes nothing from the service's bucket, so that it cannot use up what other clients may
//! have. A full bucket has the tokens of the limit's whole period (one second or one minute).

use lb_common::{Address, ConnectionLimits, ConnectionRate, Service, ServiceClient, protocol, service_flags};

use super::token_bucket::TokenBucket;

const SECOND: u64 = 1_000_000_000;

/// Whether a limit applies to the packet that begins a flow of the service. Segments in the middle of a connection
/// (`is_syn` is false) may also begin a flow, for example if the connection began on another node: they take no token.
#[inline(always)]
pub const fn applies(service: &Service, protocol: u8, is_syn: bool) -> bool {
    service.flags & service_flags::LIMITED != 0 && (is_syn || protocol == protocol::UDP)
}

/// The buckets that a connection takes a token from, in this order: the client's bucket, then the service's bucket.
#[inline(always)]
pub fn buckets(
    limits: &ConnectionLimits,
    service: u32,
    client: &Address,
) -> [(ServiceClient, ConnectionRate); 2] {
    [
        (ServiceClient { client: network(client), service }, limits.client),
        (ServiceClient { client: Address::NONE, service }, limits.service),
    ]
}

/// The bucket of a limit.
#[inline(always)]
pub const fn bucket(rate: ConnectionRate) -> TokenBucket {
    let burst = rate.connections as u64;
    let time = rate.seconds as u64 * SECOND;
    let interval = match time.checked_div(burst) {
        Some(interval) => interval,
        None => 0,
    };
    TokenBucket { interval, burst }
}

/// The first address of the network that counts as one client: for IPv4 the client's address alone, for IPv6 its /64
/// network, because one machine may use any address of that network.
#[inline(always)]
fn network(client: &Address) -> Address {
    if client.is_v4() {
        return *client;
    }
    let [first, second, _, _] = client.words();
    Address::from_words([first, second, 0, 0])
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use bytemuck::Zeroable as _;

    use super::*;

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn only_packets_that_begin_connections_are_limited() {
        let limited = Service { flags: service_flags::LIMITED, ..Service::zeroed() };
        for (protocol, is_syn, expected) in [
            (protocol::TCP, true, true),
            (protocol::TCP, false, false),
            (protocol::SCTP, true, true),
            (protocol::SCTP, false, false),
            (protocol::UDP, false, true),
        ] {
            assert_eq!(applies(&limited, protocol, is_syn), expected, "{protocol} {is_syn}");
            assert!(!applies(&Service::zeroed(), protocol, is_syn));
        }
    }

    #[test]
    fn rate_gives_its_connections_in_its_time() {
        for (connections, seconds, interval) in
            [(1, 1, SECOND), (4, 1, SECOND / 4), (30, 60, 2 * SECOND), (1_000_000, 1, 1_000)]
        {
            let bucket = bucket(ConnectionRate { connections, seconds });
            assert_eq!((bucket.interval, bucket.burst), (interval, u64::from(connections)));
        }
    }

    #[test]
    fn ipv6_client_is_its_network() {
        let limits = ConnectionLimits::NONE;
        let client = |text| buckets(&limits, 7, &ip(text))[0].0.client;
        assert_eq!(client("10.1.2.3"), ip("10.1.2.3"));
        assert_eq!(client("2001:db8:1:2:3:4:5:6"), ip("2001:db8:1:2::"));
        assert_eq!(buckets(&limits, 7, &ip("10.1.2.3"))[1].0, ServiceClient { client: ip("::"), service: 7 });
    }
}
