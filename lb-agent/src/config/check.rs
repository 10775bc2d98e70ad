//! Parses and checks the values of settings.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU32,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use glob::Pattern;
use ipnet::IpNet;
use kube::config::Kubeconfig;
use lb_common::{MAX_NETWORKS, Scheduler, UnknownScheduler, dns};
use lb_core::{
    announce::lease::Prefer,
    dns::Zone,
    model::ObjectName,
    north_south::{NorthSouthMode, UnknownMode},
    tables::{TableSize, UnknownSize},
};
use lb_dns::Access;
use tracing_subscriber::EnvFilter;

use super::{
    AnnounceConfig, DnsConfig, InterceptConfig, Source, WebConfig,
    error::{ConfigError, refused},
};
use crate::{
    announce::{
        Member,
        bgp::{BirdPaths, Options as BgpOptions},
    },
    cli::{self, AnnouncePrefer, BpfLog, DetectLocalMode, FlowLogServices, Xdp},
    flow_log::{FlowLogConfig, FlowLogTarget, Rotation},
    kubernetes::ApiServer,
    node::{DetectLocal, NodePortAddresses},
};
use lb_datapath::{BpfLogLevel, Forwarding, XdpOption};

/// Default port of kube-proxy's health server.
const HEALTHZ_PORT: u16 = 10256;
/// Default port of kube-proxy's metrics server.
const METRICS_PORT: u16 = 10249;
/// Default path of BIRD's control socket: that of Debian.
const BIRD_SOCKET: &str = "/run/bird/bird.ctl";
/// Default of `--dns-intercept-port`: outside of `--masquerade-ports` and of the ports that kubelet and kube-proxy use.
const DNS_INTERCEPT_PORT: u16 = 9053;
/// Default port of the pages for a browser.
const WEB_PORT: u16 = 8088;
/// Default DNS domain of a cluster, as in nearly all clusters.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// Time to live of answers about Services, in seconds: the default of CoreDNS.
const DNS_TTL: u32 = 5;
/// Default of `--dns-rate-limit`: how many UDP queries per second the server answers to each client.
const DNS_RATE: u32 = 2000;
/// The networks that the internet does not route: loopback, private (RFC 1918, RFC 4193), shared (RFC 6598) and
/// link-local ones.
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
/// Length of the longest name of a network interface, in bytes (`IFNAMSIZ` - 1).
const DEVICE_NAME_MAX: usize = 15;

/// The values of the settings `--flow-log…`, unchecked.
#[derive(Debug, Default)]
pub(super) struct FlowLogSettings {
    pub(super) target: Option<String>,
    /// Value of `--flow-log-interval`, in seconds.
    pub(super) interval: Option<u32>,
    pub(super) sample: Option<f64>,
    pub(super) services: Option<FlowLogServices>,
    /// Value of `--flow-log-max-size`, in MiB.
    pub(super) max_size: Option<u32>,
    pub(super) keep: Option<u32>,
}

/// Checks the settings of the flow log; `None` without `--flow-log`, or if that is empty.
pub(super) fn flow_log(given: FlowLogSettings) -> Result<Option<FlowLogConfig>, ConfigError> {
    let Some(target) = given.target.filter(|target| !target.is_empty()) else { return Ok(None) };
    let (target, sample) = (FlowLogTarget::from(&*target), given.sample.unwrap_or(1.0));
    if let FlowLogTarget::File(path) | FlowLogTarget::Unix(path) = &target
        && !path.is_absolute()
    {
        return Err(refused("--flow-log", &target, "give an absolute path"));
    }
    if !(0.000_001..=1.0).contains(&sample) {
        return Err(refused("--flow-log-sample", sample, "give a number from 0.000001 to 1"));
    }
    Ok(Some(FlowLogConfig {
        target,
        interval: Duration::from_secs(given.interval.unwrap_or(60).into()),
        sample: parts_per_million(sample),
        only_annotated: given.services == Some(FlowLogServices::Annotated),
        rotation: Rotation {
            max_size: u64::from(given.max_size.unwrap_or(100)) << 20,
            keep: given.keep.unwrap_or(5),
        },
    }))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the caller has checked the range"
)]
fn parts_per_million(part: f64) -> u32 {
    (part * 1e6).round() as u32
}

/// The values of the settings of the DNS server, unchecked.
#[derive(Debug, Default)]
pub(super) struct Dns {
    pub(super) bind: Option<Vec<String>>,
    pub(super) domain: Option<String>,
    pub(super) upstreams: Option<Vec<String>>,
    pub(super) allow: Option<Vec<String>>,
    pub(super) rate: Option<u32>,
    pub(super) intercept: Option<String>,
    pub(super) intercept_port: Option<u16>,
    /// The pod networks of `--cluster-cidr`, whose clients the server answers by default.
    pub(super) pods: Option<Vec<String>>,
}

pub(super) fn dns(given: Dns) -> Result<DnsConfig, ConfigError> {
    let bind = dns_addresses("--dns-bind-address", given.bind)?;
    if let Some(any) = bind.iter().find(|address| address.ip().is_unspecified()) {
        let why = "give each address: an answer would leave with another address than the query came to";
        return Err(refused("--dns-bind-address", any, why));
    }
    let domain = given.domain.as_deref().unwrap_or(CLUSTER_DOMAIN);
    let zone =
        Zone::new(domain, DNS_TTL).map_err(|error| refused("--cluster-domain", domain, error.to_string()))?;
    let rate = NonZeroU32::new(given.rate.unwrap_or(DNS_RATE));
    let access = Access { allowed: dns_clients(given.allow, given.pods, &bind)?, rate };
    let upstreams = dns_addresses("--dns-upstream", given.upstreams)?;
    let intercept =
        given.intercept.map(|service| dns_intercept(&service, given.intercept_port)).transpose()?;
    Ok(DnsConfig { bind, zone, upstreams, access, intercept })
}

/// The Service of `--dns-intercept`, and the port of the server.
fn dns_intercept(service: &str, port: Option<u16>) -> Result<InterceptConfig, ConfigError> {
    let port = port.unwrap_or(DNS_INTERCEPT_PORT);
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

/// The networks that the DNS server answers: those of `--dns-allow` or the default ones, and the addresses from which
/// processes of the node itself ask.
fn dns_clients(
    allow: Option<Vec<String>>,
    pods: Option<Vec<String>>,
    bind: &[SocketAddr],
) -> Result<Vec<IpNet>, ConfigError> {
    let mut allowed = networks("--dns-allow", allow.unwrap_or_default(), "")?;
    if allowed.is_empty() {
        allowed = networks("--dns-allow", INTERNAL.map(str::to_owned).to_vec(), "")?;
        allowed.extend(networks("--cluster-cidr", pods.unwrap_or_default(), "")?);
    }
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for address in loopback.into_iter().chain(bind.iter().map(SocketAddr::ip)) {
        if !allowed.iter().any(|network| network.contains(&address)) {
            allowed.push(address.into());
        }
    }
    Ok(allowed)
}

fn dns_addresses(setting: &'static str, given: Option<Vec<String>>) -> Result<Vec<SocketAddr>, ConfigError> {
    let given = given.into_iter().flatten().filter(|text| !text.trim().is_empty());
    let address = |text: String| {
        let text = text.trim();
        let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, dns::PORT));
        address
            .or_else(|_| text.parse())
            .map_err(|error| refused(setting, text, format!("{error}: give ADDR, ADDR:PORT or [ADDR]:PORT")))
    };
    given.map(address).collect()
}

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

pub(super) fn patterns(
    setting: &'static str,
    given: Option<Vec<String>>,
) -> Result<Vec<Pattern>, ConfigError> {
    const WANTED: &str = "give names of network interfaces; * matches any text, ? any character";
    let pattern = |text: String| {
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

pub(super) fn service_ranges(given: Vec<String>) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--service-cluster-ip-range";
    let mut ranges: Vec<IpNet> = Vec::new();
    for text in given {
        let range = text.trim().parse::<IpNet>().map_err(|error| {
            refused(SETTING, &text, format!("{error}: give a range such as 10.96.0.0/12 or fd00:10:96::/112"))
        })?;
        if ranges.iter().any(|other| other.addr().is_ipv4() == range.addr().is_ipv4()) {
            return Err(refused(
                SETTING,
                &text,
                "it is the second range of its family: give at most one IPv4 and one IPv6 range",
            ));
        }
        ranges.push(range.trunc());
    }
    Ok(ranges)
}

/// Parses the networks of `--load-balancer-pool`, which needs `--manifests`. They may not overlap the ranges of cluster
/// IPs.
pub(super) fn load_balancer_pool(
    given: Option<Vec<String>>,
    source: &Source,
    service_ranges: &[IpNet],
) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--load-balancer-pool";
    let networks = IpNet::aggregate(&networks(SETTING, given.unwrap_or_default(), "")?);
    if let (Some(network), Source::ApiServer(_)) = (networks.first(), source) {
        let why =
            "it is for --manifests; in a cluster, create IPAddressPools and set --load-balancer-controller";
        return Err(refused(SETTING, network, why));
    }
    for network in &networks {
        let overlaps = |range: &&IpNet| range.contains(network) || network.contains(*range);
        if let Some(range) = service_ranges.iter().find(overlaps) {
            let why = format!("it overlaps the range {range} of cluster IPs: give another network");
            return Err(refused(SETTING, network, why));
        }
    }
    Ok(networks)
}

/// Checks `--load-balancer-controller`, which needs an API server.
pub(super) fn load_balancer_controller(given: bool, source: &Source) -> Result<bool, ConfigError> {
    match source {
        Source::Manifests(_) if given => {
            let why = "with --manifests the agent gives addresses in any case: remove this setting";
            Err(refused("--load-balancer-controller", true, why))
        }
        Source::Manifests(_) | Source::ApiServer(_) => Ok(given),
    }
}

/// Checks `--load-balancer-reassign`, which needs an agent that gives addresses.
pub(super) fn load_balancer_reassign(
    given: bool,
    controller: bool,
    source: &Source,
) -> Result<bool, ConfigError> {
    if given && !controller && matches!(source, Source::ApiServer(_)) {
        let why =
            "this agent gives no addresses: set --load-balancer-controller as well, or remove this setting";
        return Err(refused("--load-balancer-reassign", true, why));
    }
    Ok(given)
}

/// The default of `--announce-port`.
const ANNOUNCE_PORT: u16 = 7947;

/// The UDP port of `--announce`, which needs an API server and a key; `None` if `--announce` is not given.
fn announce_port(
    (is_on, port): (bool, Option<u16>),
    key_file: Option<&PathBuf>,
    source: &Source,
) -> Result<Option<u16>, ConfigError> {
    const SETTING: &str = "--announce";
    match (source, key_file) {
        _ if !is_on => Ok(None),
        (Source::Manifests(_), _) => {
            let why = "with --manifests the agent announces what L2Advertisements there say in any case: remove this \
                       setting, and name the nodes that share addresses with --announce-member";
            Err(refused(SETTING, true, why))
        }
        (Source::ApiServer(_), None) => {
            let why = "the nodes authenticate their messages with a key: give --announce-key-file";
            Err(refused(SETTING, true, why))
        }
        (Source::ApiServer(_), Some(_)) if port == Some(0) => {
            Err(refused("--announce-port", 0, "all nodes need the same port: give one from 1 to 65535"))
        }
        (Source::ApiServer(_), Some(_)) => Ok(Some(port.unwrap_or(ANNOUNCE_PORT))),
    }
}

/// Checks the settings of the members that share addresses. `--announce-member` needs `--manifests` and a key, and must
/// include this node.
pub(super) fn announce(
    nodes: (bool, Option<u16>),
    given: Option<Vec<String>>,
    key_file: Option<PathBuf>,
    prefer: Option<AnnouncePrefer>,
    source: &Source,
    node: &str,
) -> Result<AnnounceConfig, ConfigError> {
    const SETTING: &str = "--announce-member";
    let mut members = BTreeMap::new();
    for text in given.unwrap_or_default().iter().filter(|text| !text.is_empty()) {
        let Member { name, address } = text.parse().map_err(|why: String| refused(SETTING, text, why))?;
        if members.insert(name, address).is_some() {
            return Err(refused(SETTING, text, "the node is named twice: give each one once"));
        }
    }
    if let (Some(name), Source::ApiServer(_)) = (members.keys().next(), source) {
        return Err(refused(
            SETTING,
            name,
            "it is for --manifests: with an API server, --announce makes its Nodes the members",
        ));
    }
    if !members.is_empty() && !members.contains_key(node) {
        let why = format!("the members must include this node: add {node}=ADDR:PORT, or set --node-name");
        return Err(refused(SETTING, members.keys().map(|name| &**name).collect::<Vec<_>>().join(","), why));
    }
    if let (None, Some(name)) = (&key_file, members.keys().next()) {
        return Err(refused(SETTING, name, "members need a key: give --announce-key-file"));
    }
    let prefer = match prefer {
        None | Some(AnnouncePrefer::Availability) => Prefer::Availability,
        Some(AnnouncePrefer::Single) => Prefer::Single,
    };
    let port = announce_port(nodes, key_file.as_ref(), source)?;
    Ok(AnnounceConfig { members, port, key_file, prefer })
}

/// Checks the settings of announcements by BGP; `None` without `--announce-table`, which `--bird-config` needs.
pub(super) fn announce_by_bgp(
    table: Option<u32>,
    file: Option<PathBuf>,
    socket: Option<PathBuf>,
) -> Result<Option<BgpOptions>, ConfigError> {
    let Some(table) = table else {
        return match file {
            Some(file) => Err(refused("--bird-config", file.display(), "it needs --announce-table")),
            None => Ok(None),
        };
    };
    if matches!(table, 0 | 253..=255) {
        let why = "the kernel uses this table: give a number from 1 to 252, or a greater one than 255";
        return Err(refused("--announce-table", table, why));
    }
    let socket = socket.unwrap_or_else(|| BIRD_SOCKET.into());
    Ok(Some(BgpOptions { table, bird: file.map(|file| BirdPaths { file, socket }) }))
}

/// Parses networks and drops their host bits. Ignores empty strings, which the configuration files of kube-proxy may
/// contain.
fn networks(setting: &'static str, given: Vec<String>, or: &str) -> Result<Vec<IpNet>, ConfigError> {
    let texts = given.iter().map(|text| text.trim()).filter(|text| !text.is_empty());
    let network = |text: &str| {
        let parsed = text.parse::<IpNet>();
        parsed.map(|net| net.trunc()).map_err(|error| {
            refused(setting, text, format!("{error}: give networks such as 10.0.0.0/8 or fd00::/48{or}"))
        })
    };
    texts.map(network).collect()
}

/// The values of the settings for recognising internal clients, unchecked.
#[derive(Debug, Default)]
pub(super) struct Detect {
    pub(super) mode: Option<DetectLocalMode>,
    pub(super) cluster_cidr: Option<Vec<String>>,
    pub(super) bridge: Option<String>,
    pub(super) prefix: Option<String>,
}

/// Determines how the agent recognises internal clients. As in kube-proxy, each mode uses only its own setting, and the
/// mode `ClusterCIDR` without pod networks recognises no client as internal.
pub(super) fn detect_local(given: Detect, source: &Source) -> Result<DetectLocal, ConfigError> {
    let cidrs = networks("--cluster-cidr", given.cluster_cidr.unwrap_or_default(), "")?;
    match given.mode.unwrap_or(DetectLocalMode::ClusterCidr) {
        DetectLocalMode::ClusterCidr if cidrs.is_empty() => Ok(DetectLocal::Never),
        DetectLocalMode::ClusterCidr => Ok(DetectLocal::ClusterCidr(cidrs)),
        DetectLocalMode::NodeCidr if matches!(source, Source::Manifests(_)) => Err(refused(
            "--detect-local-mode",
            "NodeCIDR",
            "only an API server knows the pod networks of this node: give ClusterCIDR and --cluster-cidr",
        )),
        DetectLocalMode::NodeCidr => Ok(DetectLocal::NodeCidr),
        DetectLocalMode::BridgeInterface => {
            device("--pod-bridge-interface", given.bridge).map(DetectLocal::BridgeInterface)
        }
        DetectLocalMode::InterfaceNamePrefix => {
            device("--pod-interface-name-prefix", given.prefix).map(DetectLocal::InterfaceNamePrefix)
        }
    }
}

/// Checks that the value of `setting` can be the name of an interface, or a prefix of one.
fn device(setting: &'static str, given: Option<String>) -> Result<String, ConfigError> {
    let name = given.unwrap_or_default();
    if name.is_empty() || name.len() > DEVICE_NAME_MAX || name.contains(['/', ' ']) {
        let reason =
            format!("--detect-local-mode needs it: give a name of 1 to {DEVICE_NAME_MAX} characters");
        return Err(refused(setting, name, reason));
    }
    Ok(name)
}

pub(super) fn nodeport_addresses(given: Option<Vec<String>>) -> Result<NodePortAddresses, ConfigError> {
    const SETTING: &str = "--nodeport-addresses";
    let given = given.unwrap_or_default();
    if let [only] = given.as_slice()
        && only.trim() == "primary"
    {
        return Ok(NodePortAddresses::Primary);
    }
    let networks = networks(SETTING, given, ", or the word primary alone")?;
    Ok(if networks.is_empty() { NodePortAddresses::All } else { NodePortAddresses::Networks(networks) })
}

/// Parses a range of ports `FIRST-LAST`.
pub(super) fn ports(text: &str) -> Result<RangeInclusive<u16>, ConfigError> {
    let range = || {
        let (first, last) = text.split_once('-')?;
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (0 < first && first <= last).then_some(first..=last)
    };
    range().ok_or_else(|| refused("--masquerade-ports", text, "give FIRST-LAST such as 10000-29999"))
}

pub(super) fn scheduler(given: Option<String>) -> Result<Scheduler, ConfigError> {
    let Some(name) = given.filter(|name| !name.is_empty()) else { return Ok(Scheduler::default()) };
    name.parse().map_err(|error: UnknownScheduler| refused("--scheduler", &name, error.to_string()))
}

pub(super) fn north_south(given: Option<String>) -> Result<NorthSouthMode, ConfigError> {
    let Some(name) = given.filter(|name| !name.is_empty()) else { return Ok(NorthSouthMode::default()) };
    name.parse().map_err(|error: UnknownMode| refused("--north-south-mode", &name, error.to_string()))
}

pub(super) fn peers(given: Option<Vec<String>>) -> Result<Vec<IpNet>, ConfigError> {
    networks("--dsr-peers", given.unwrap_or_default(), "")
}

/// Parses the networks of `--deny-source`, aggregated. More networks than the map can hold are an error, because to
/// ignore one would admit its clients.
pub(super) fn denied_sources(given: Option<Vec<String>>) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--deny-source";
    let networks = IpNet::aggregate(&networks(SETTING, given.unwrap_or_default(), "")?);
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

/// Parses `--bind-address`: the address of this node, or an unspecified one that only selects a family.
pub(super) fn bind(given: Option<String>) -> Result<IpAddr, ConfigError> {
    match given.as_deref().unwrap_or_default() {
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

pub(super) fn healthz(given: Option<String>, bind: IpAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let unspecified: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let default = SocketAddr::new(unspecified[usize::from(bind.is_ipv6())], HEALTHZ_PORT);
    listener("--healthz-bind-address", given, default)
}

pub(super) fn metrics(given: Option<String>, bind: IpAddr) -> Result<Option<SocketAddr>, ConfigError> {
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let default = SocketAddr::new(loopback[usize::from(bind.is_ipv6())], METRICS_PORT);
    listener("--metrics-bind-address", given, default)
}

/// Checks the settings of the web server. A token without a server is an error, and so is an address other than
/// loopback without a token.
pub(super) fn web(
    given: Option<String>,
    token_file: Option<PathBuf>,
) -> Result<Option<WebConfig>, ConfigError> {
    const SETTING: &str = "--web-bind-address";
    let text = given.unwrap_or_default();
    let default = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), WEB_PORT);
    let Some(address) = listener(SETTING, Some(text.clone()), default)? else {
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

/// Parses the value of `setting`: `ADDRESS:PORT`, or an IP address alone, which gets the default port. Without a value
/// the result is the default; an empty string means that the server is off.
fn listener(
    setting: &'static str,
    given: Option<String>,
    default: SocketAddr,
) -> Result<Option<SocketAddr>, ConfigError> {
    let Some(text) = given else { return Ok(Some(default)) };
    if text.is_empty() {
        return Ok(None);
    }
    let host_alone =
        text.trim_matches(['[', ']']).parse::<IpAddr>().map(|host| SocketAddr::new(host, default.port()));
    match text.parse::<SocketAddr>().or(host_alone) {
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
