//! The settings of the DNS server.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU32,
};

use lb_common::dns;
use lb_core::{dns::Zone, model::ObjectName};
use lb_dns::Access;

use super::networks;
use crate::{
    cli::RunArgs,
    config::{
        DnsConfig, InterceptConfig,
        error::{ConfigError, refused},
    },
};

/// Default DNS domain of a cluster, as in nearly all clusters.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// Time to live of answers about Services, in seconds: the default of CoreDNS.
const TTL: u32 = 5;
/// Default of `--dns-rate-limit`: how many UDP queries per second the server answers to each source (an IPv4 address or
/// an IPv6 /64).
const RATE: u32 = 2000;
/// Default of `--dns-intercept-port`: outside of the default of `--masquerade-ports` and of the ports that kubelet and
/// kube-proxy use.
const INTERCEPT_PORT: u16 = 9053;
/// Networks that the internet does not route: loopback, private (RFC 1918, RFC 4193), shared (RFC 6598) and link-local
/// ones.
const INTERNAL: [&str; 9] = [
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
];

/// Checks the settings of the DNS server.
pub(in crate::config) fn dns(given: &RunArgs) -> Result<DnsConfig, ConfigError> {
    let bind = addresses("--dns-bind-address", given.dns_bind_address.as_deref())?;
    if let Some(any) = bind.iter().find(|address| address.ip().is_unspecified()) {
        let why = "give each address: an answer would leave with another address than the query came to";
        return Err(refused("--dns-bind-address", any, why));
    }
    let domain = given.cluster_domain.as_deref().unwrap_or(CLUSTER_DOMAIN);
    let zone =
        Zone::new(domain, TTL).map_err(|error| refused("--cluster-domain", domain, error.to_string()))?;
    let upstreams = addresses("--dns-upstream", given.dns_upstream.as_deref())?;
    let service = given.dns_intercept.as_deref();
    let intercept = service.map(|service| intercept(service, given.dns_intercept_port)).transpose()?;
    Ok(DnsConfig { access: access(given, &bind)?, bind, zone, upstreams, intercept })
}

/// Checks `--dns-intercept`, which names the DNS Service, and `--dns-intercept-port`, the port of the agent's DNS
/// server.
fn intercept(service: &str, port: Option<u16>) -> Result<InterceptConfig, ConfigError> {
    let port = port.unwrap_or(INTERCEPT_PORT);
    if port == 0 || port == dns::PORT {
        let why =
            "give a port that no other server uses, and not 53: pods may ask the node's own DNS server there";
        return Err(refused("--dns-intercept-port", port, why));
    }
    match service.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(InterceptConfig { service: ObjectName::new(namespace, name), port })
        }
        _ => Err(refused("--dns-intercept", service, "give NAMESPACE/NAME, such as kube-system/kube-dns")),
    }
}

/// Which clients the server answers, and at what rate. It answers the networks of `--dns-allow` (by default `INTERNAL`
/// and `--cluster-cidr`) and the sources of queries that processes of this node send: the loopback addresses and the
/// addresses in `bind`.
fn access(given: &RunArgs, bind: &[SocketAddr]) -> Result<Access, ConfigError> {
    let pods = networks("--cluster-cidr", given.cluster_cidr.as_deref(), "")?;
    let mut allowed = networks("--dns-allow", given.dns_allow.as_deref(), "")?;
    if allowed.is_empty() {
        allowed = networks("--dns-allow", Some(&INTERNAL.map(str::to_owned)), "")?;
        allowed.extend(&pods);
    }
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for address in loopback.into_iter().chain(bind.iter().map(SocketAddr::ip)) {
        if !allowed.iter().any(|network| network.contains(&address)) {
            allowed.push(address.into());
        }
    }
    let rate = NonZeroU32::new(given.dns_rate_limit.unwrap_or(RATE));
    Ok(Access { allowed, rate, hosts: pods })
}

/// Parses addresses with or without a port; the default port is 53.
fn addresses(setting: &'static str, given: Option<&[String]>) -> Result<Vec<SocketAddr>, ConfigError> {
    let texts = given.into_iter().flatten().map(|text| text.trim()).filter(|text| !text.is_empty());
    let address = |text: &str| {
        let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, dns::PORT));
        address
            .or_else(|_| text.parse())
            .map_err(|error| refused(setting, text, format!("{error}: give ADDR, ADDR:PORT or [ADDR]:PORT")))
    };
    texts.map(address).collect()
}
