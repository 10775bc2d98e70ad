//! Parses and checks the values of settings.

mod announce;
mod detect;
mod dns;
mod flow_log;
mod load_balancer;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use glob::Pattern;
use ipnet::IpNet;
use kube::config::Kubeconfig;
use lb_common::{MAX_NETWORKS, Scheduler, UnknownScheduler};
use lb_core::{
    north_south::{NorthSouthMode, UnknownMode},
    tables::{TableSize, UnknownSize},
};
use lb_datapath::{BpfLogLevel, DEFAULT_MASQUERADE_PORTS, Forwarding, XdpOption};
use tracing_subscriber::EnvFilter;

pub(super) use self::{
    announce::{announce, announce_by_bgp},
    detect::detect_local,
    dns::dns,
    flow_log::flow_log,
    load_balancer::{load_balancer_controller, load_balancer_pool, load_balancer_reassign},
};
use super::{
    Source, WebConfig,
    error::{ConfigError, refused},
};
use crate::{
    cli::{self, BpfLog, RunArgs, Xdp, without_localhost},
    kubernetes::ApiServer,
    node::NodePortAddresses,
};

/// Default port of the health server: that of kube-proxy.
const HEALTHZ_PORT: u16 = 10256;
/// Default port of the metrics server: that of kube-proxy.
const METRICS_PORT: u16 = 10249;
/// Port of the pages for a browser if `--web-bind-address` names only an address.
const WEB_PORT: u16 = 8088;
/// Default ranges of cluster IPs with `--manifests`: the range of kubeadm, and a unique local IPv6 range.
const DEFAULT_SERVICE_RANGES: [&str; 2] = ["10.96.0.0/12", "fd00:10:96::/112"];
/// Length of the longest name of a network interface, in bytes (`IFNAMSIZ` - 1).
const DEVICE_NAME_MAX: usize = 15;

pub(super) fn cgroup(dir: &Path) -> Result<(), ConfigError> {
    // Every cgroup2 directory has this file; no directory of a version 1 hierarchy has it.
    if dir.join("cgroup.controllers").exists() {
        return Ok(());
    }
    Err(refused(
        "--cgroup",
        dir.display(),
        "it is not a cgroup2 directory: give one below the mount that `findmnt -t cgroup2` shows",
    ))
}

/// Determines the source of Services: `--manifests` or `--kubeconfig`, else in a Pod the API server of its cluster.
pub(super) fn source(
    given: (Option<PathBuf>, Option<PathBuf>),
    in_cluster: bool,
) -> Result<Source, ConfigError> {
    match given {
        (Some(manifests), Some(kubeconfig)) => Err(ConfigError::TwoSources { manifests, kubeconfig }),
        (Some(dir), None) => manifests(dir).map(Source::Manifests),
        (None, Some(file)) => kubeconfig(file).map(|file| Source::ApiServer(ApiServer::Kubeconfig(file))),
        (None, None) if in_cluster => Ok(Source::ApiServer(ApiServer::InCluster)),
        (None, None) => Err(ConfigError::NoSource),
    }
}

fn kubeconfig(file: PathBuf) -> Result<PathBuf, ConfigError> {
    match Kubeconfig::read_from(&file) {
        Ok(_) => Ok(file),
        Err(error) => {
            let reason = format!("{error}: give a file that `kubectl --kubeconfig FILE` accepts");
            Err(refused("--kubeconfig", file.display(), reason))
        }
    }
}

fn manifests(dir: PathBuf) -> Result<PathBuf, ConfigError> {
    match std::fs::read_dir(&dir) {
        Ok(_) => Ok(dir),
        Err(error) => {
            let reason =
                format!("cannot list it ({error}): give a directory of YAML manifests, which may be empty");
            Err(refused("--manifests", dir.display(), reason))
        }
    }
}

pub(super) fn node_name(given: Option<String>) -> Result<String, ConfigError> {
    let name = match given {
        Some(name) => name,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(ConfigError::NoHostName)?,
    };
    // Node names are in lower case; like kube-proxy, the agent also accepts capitals.
    let name = name.trim().to_lowercase();
    if name.is_empty() {
        return Err(refused(
            "--node-name",
            name,
            "it is empty: give the name of this node in the nodeName of endpoints",
        ));
    }
    Ok(name)
}

/// Checks `--zone`, which needs `--manifests`: an API server names the zone in the Node object.
pub(super) fn zone(given: Option<&str>, source: &Source) -> Result<Option<String>, ConfigError> {
    let zone = given.map(str::trim).filter(|zone| !zone.is_empty());
    match (zone, source) {
        (Some(zone), Source::ApiServer(_)) => {
            let why = "it is for --manifests: set the label topology.kubernetes.io/zone of the Node instead";
            Err(refused("--zone", zone, why))
        }
        (zone, _) => Ok(zone.map(str::to_owned)),
    }
}

pub(super) fn patterns(setting: &'static str, given: Option<&[String]>) -> Result<Vec<Pattern>, ConfigError> {
    const WANTED: &str = "give names of network interfaces; * matches any text, ? any character";
    let pattern = |text: &String| {
        let text = text.trim();
        if text.is_empty() || text.contains(['/', ' ']) {
            return Err(refused(setting, text, WANTED));
        }
        Pattern::new(text).map_err(|error| refused(setting, text, format!("{error}: {WANTED}")))
    };
    given.into_iter().flatten().map(pattern).collect()
}

pub(super) const fn bpf_log_level(level: BpfLog) -> Option<BpfLogLevel> {
    match level {
        BpfLog::Off => None,
        BpfLog::Error => Some(BpfLogLevel::Error),
        BpfLog::Warn => Some(BpfLogLevel::Warn),
        BpfLog::Info => Some(BpfLogLevel::Info),
        BpfLog::Debug => Some(BpfLogLevel::Debug),
        BpfLog::Trace => Some(BpfLogLevel::Trace),
    }
}

/// Parses `--service-cluster-ip-range`. If it is not given, returns the default ranges with `--manifests`, and `None`
/// with an API server, which names the ranges.
pub(super) fn service_ranges(given: &RunArgs, source: &Source) -> Result<Option<Vec<IpNet>>, ConfigError> {
    let defaults = DEFAULT_SERVICE_RANGES.map(str::to_owned);
    match (&given.service_cluster_ip_range, source) {
        (Some(given), _) => parse_service_ranges(given).map(Some),
        (None, Source::Manifests(_)) => parse_service_ranges(&defaults).map(Some),
        (None, Source::ApiServer(_)) => Ok(None),
    }
}

fn parse_service_ranges(given: &[String]) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--service-cluster-ip-range";
    let mut ranges: Vec<IpNet> = Vec::new();
    for text in given {
        let range = text.trim().parse::<IpNet>().map_err(|error| {
            refused(SETTING, text, format!("{error}: give a range such as 10.96.0.0/12 or fd00:10:96::/112"))
        })?;
        if ranges.iter().any(|other| other.addr().is_ipv4() == range.addr().is_ipv4()) {
            return Err(refused(
                SETTING,
                text,
                "it is the second range of its family: give at most one IPv4 and one IPv6 range",
            ));
        }
        ranges.push(range.trunc());
    }
    Ok(ranges)
}

/// Parses networks and drops their host bits. Ignores empty strings, which the configuration files of kube-proxy may
/// contain.
fn networks(setting: &'static str, given: Option<&[String]>, or: &str) -> Result<Vec<IpNet>, ConfigError> {
    let texts = given.into_iter().flatten().map(|text| text.trim()).filter(|text| !text.is_empty());
    let network = |text: &str| {
        let parsed = text.parse::<IpNet>();
        parsed.map(|net| net.trunc()).map_err(|error| {
            refused(setting, text, format!("{error}: give networks such as 10.0.0.0/8 or fd00::/48{or}"))
        })
    };
    texts.map(network).collect()
}

/// Checks that the value of `setting` can be the name of an interface, or a prefix of one.
fn device(setting: &'static str, given: Option<&str>) -> Result<String, ConfigError> {
    let name = given.unwrap_or_default();
    if name.is_empty() || name.len() > DEVICE_NAME_MAX || name.contains(['/', ' ']) {
        let reason =
            format!("--detect-local-mode needs it: give a name of 1 to {DEVICE_NAME_MAX} characters");
        return Err(refused(setting, name, reason));
    }
    Ok(name.to_owned())
}

pub(super) fn nodeport_addresses(given: Option<&[String]>) -> Result<NodePortAddresses, ConfigError> {
    const SETTING: &str = "--nodeport-addresses";
    if let Some([only]) = given
        && only.trim() == "primary"
    {
        return Ok(NodePortAddresses::Primary);
    }
    let networks = networks(SETTING, given, ", or the word primary alone")?;
    Ok(if networks.is_empty() { NodePortAddresses::All } else { NodePortAddresses::Networks(networks) })
}

/// Parses a range of ports `FIRST-LAST`; without a value, returns [`DEFAULT_MASQUERADE_PORTS`].
pub(super) fn masquerade_ports(given: Option<&str>) -> Result<RangeInclusive<u16>, ConfigError> {
    let Some(text) = given else { return Ok(DEFAULT_MASQUERADE_PORTS) };
    let range = || {
        let (first, last) = text.split_once('-')?;
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (0 < first && first <= last).then_some(first..=last)
    };
    range().ok_or_else(|| refused("--masquerade-ports", text, "give FIRST-LAST such as 10000-29999"))
}

pub(super) fn scheduler(given: Option<&str>) -> Result<Scheduler, ConfigError> {
    let Some(name) = given.filter(|name| !name.is_empty()) else { return Ok(Scheduler::default()) };
    name.parse().map_err(|error: UnknownScheduler| refused("--scheduler", name, error.to_string()))
}

pub(super) fn north_south(given: Option<&str>) -> Result<NorthSouthMode, ConfigError> {
    let Some(name) = given.filter(|name| !name.is_empty()) else { return Ok(NorthSouthMode::default()) };
    name.parse().map_err(|error: UnknownMode| refused("--north-south-mode", name, error.to_string()))
}

pub(super) fn peers(given: Option<&[String]>) -> Result<Vec<IpNet>, ConfigError> {
    networks("--dsr-peers", given, "")
}

/// Parses the networks of `--deny-source`, aggregated. More networks than the map can hold are an error, because
/// ignoring a network would admit its clients.
pub(super) fn denied_sources(given: Option<&[String]>) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--deny-source";
    let networks = IpNet::aggregate(&networks(SETTING, given, "")?);
    if let Some(network) = networks.get(MAX_NETWORKS) {
        let advice = format!("at most {MAX_NETWORKS} networks fit; give fewer and larger ones");
        return Err(refused(SETTING, network, advice));
    }
    Ok(networks)
}

pub(super) fn table_size(given: Option<u32>) -> Result<TableSize, ConfigError> {
    let Some(size) = given else { return Ok(TableSize::default()) };
    size.to_string()
        .parse()
        .map_err(|error: UnknownSize| refused("--maglev-table-size", size, error.to_string()))
}

/// Parses `--bind-address`: the address of this node, or an unspecified one, which only selects the family of the
/// default addresses of the health and metrics servers.
pub(super) fn bind(given: Option<&str>) -> Result<IpAddr, ConfigError> {
    match given.unwrap_or_default() {
        "" => Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        text => text.parse().map_err(|error| {
            refused(
                "--bind-address",
                text,
                format!("{error}: give an address of this node, or 0.0.0.0 or ::"),
            )
        }),
    }
}

pub(super) fn healthz(given: Option<&str>, bind: IpAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let unspecified: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let default = SocketAddr::new(unspecified[usize::from(bind.is_ipv6())], HEALTHZ_PORT);
    listener("--healthz-bind-address", given, default)
}

pub(super) fn metrics(given: Option<&str>, bind: IpAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let default = SocketAddr::new(loopback[usize::from(bind.is_ipv6())], METRICS_PORT);
    listener("--metrics-bind-address", given, default)
}

/// Checks the settings of the web server. It is an error to give a token but no address, or an address other than
/// loopback but no token.
pub(super) fn web(
    given: Option<&str>,
    token_file: Option<PathBuf>,
) -> Result<Option<WebConfig>, ConfigError> {
    const SETTING: &str = "--web-bind-address";
    let text = given.unwrap_or_default();
    let default = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), WEB_PORT);
    let Some(address) = listener(SETTING, Some(text), default)? else {
        return match token_file {
            None => Ok(None),
            Some(file) => Err(refused(
                "--web-token-file",
                file.display(),
                "nothing uses it: give --web-bind-address, too",
            )),
        };
    };
    if token_file.is_none() && !address.ip().to_canonical().is_loopback() {
        let reason =
            "everybody who reaches this address could look: give --web-token-file, or a loopback address";
        return Err(refused(SETTING, text, reason));
    }
    Ok(Some(WebConfig { address, token_file }))
}

/// Parses the value of `setting`: `ADDRESS:PORT`, or an IP address alone, which gets the default port; `localhost` is
/// 127.0.0.1. Without a value the result is the default; an empty string means that the server is off.
fn listener(
    setting: &'static str,
    given: Option<&str>,
    default: SocketAddr,
) -> Result<Option<SocketAddr>, ConfigError> {
    let Some(text) = given else { return Ok(Some(default)) };
    if text.is_empty() {
        return Ok(None);
    }
    let named = without_localhost(text);
    let host_alone =
        named.trim_matches(['[', ']']).parse::<IpAddr>().map(|host| SocketAddr::new(host, default.port()));
    match named.parse::<SocketAddr>().or(host_alone) {
        Ok(address) => Ok(Some(address)),
        Err(_) => Err(refused(
            setting,
            text,
            format!(
                "give ADDRESS:PORT such as {default} or [::]:{}, or an empty text for none",
                default.port()
            ),
        )),
    }
}

pub(super) fn log_filter(given: Option<String>) -> Result<Option<String>, ConfigError> {
    if let Some(filter) = &given
        && let Err(error) = EnvFilter::try_new(filter)
    {
        let reason =
            format!("{error}: give error, warn, info, debug, trace or a filter such as info,lb_agent=debug");
        return Err(refused("--log-level", filter, reason));
    }
    Ok(given)
}

pub(super) fn forwarding(option: Option<cli::Forwarding>) -> Forwarding {
    match option {
        None | Some(cli::Forwarding::Stack) => Forwarding::Stack,
        Some(cli::Forwarding::Direct) => Forwarding::Direct,
    }
}

pub(super) fn xdp(option: Option<Xdp>) -> XdpOption {
    match option {
        Some(Xdp::Auto) => XdpOption::Auto,
        Some(Xdp::Native) => XdpOption::Native,
        Some(Xdp::Generic) => XdpOption::Generic,
        None | Some(Xdp::Off) => XdpOption::Off,
    }
}
