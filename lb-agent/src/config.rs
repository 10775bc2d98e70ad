//! From what was typed ([`crate::cli`]) to what holds: a flag wins over the environment (clap does that part),
//! the environment over the file, the file over the default. Everything is checked here, before anything is done.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use glob::Pattern;
use ipnet::IpNet;
use kube::config::Kubeconfig;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use crate::{
    cli::{BpfLog, LogFormat, PlaceArgs, RunArgs},
    datapath::{BpfLogLevel, Capacities, DevicePatterns},
    kubernetes::ApiServer,
};

/// Where a BPF file system is mounted by convention.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
/// Where cluster IPs come from when nothing else is said: what kubeadm uses, and a unique local range beside it.
const DEFAULT_SERVICE_RANGES: &str = "10.96.0.0/12,fd00:10:96::/112";
/// kube-proxy's addresses.
const DEFAULT_HEALTHZ: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 10256);
const DEFAULT_METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 10249);
/// Kubernetes sets it in every Pod.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";

/// Why a configuration was refused. The process ends with exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: give --config a file that exists and is readable", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no configuration.
    #[error("the configuration file {} is refused: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// Which key, where, why.
        reason: String,
    },
    /// A setting has a value that cannot be.
    #[error("{setting}: {value:?} is refused: {reason}")]
    BadValue {
        /// The flag; a key of the file has the same name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What is wrong and what is wanted.
        reason: String,
    },
    /// Nothing says where Services come from.
    #[error(
        "no source of Services: give `--manifests DIR`, a folder of YAML manifests, or `--kubeconfig FILE` for a \
         Kubernetes API server; only in a Pod (where {IN_CLUSTER} is set) its API server is the default"
    )]
    NoSource,
    /// Services can come from one place only.
    #[error("two sources of Services, --manifests {} and --kubeconfig {}: give one of them", manifests.display(), kubeconfig.display())]
    TwoSources {
        /// The folder.
        manifests: PathBuf,
        /// The file.
        kubeconfig: PathBuf,
    },
    /// The node has no name.
    #[error("cannot find the host name, which is the default of --node-name: give --node-name NAME")]
    NoHostName(#[source] std::io::Error),
}

/// What every command needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// Control group of the sockets to serve; `None` is the root of the cgroup2 mount.
    pub cgroup: Option<PathBuf>,
}

/// What `run` needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where in the kernel.
    pub place: Place,
    /// Where Services come from.
    pub source: Source,
    /// Name of this node.
    pub node_name: String,
    /// Which devices are served; what is empty is detected.
    pub devices: DevicePatterns,
    /// Ranges of cluster IPs, one of each family at most.
    pub service_ranges: Vec<IpNet>,
    /// Where health is served.
    pub healthz: Option<SocketAddr>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Filter of the log as in `RUST_LOG`; `None` where nothing was said.
    pub log_filter: Option<String>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// How much the BPF programs log; `None` is nothing.
    pub bpf_log: Option<BpfLogLevel>,
    /// Sizes of new maps.
    pub capacities: Capacities,
    /// Settings that were made and have no effect in this version.
    pub ineffective: Vec<&'static str>,
}

/// Where Services come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of manifests.
    Manifests(PathBuf),
    /// An API server.
    ApiServer(ApiServer),
}

/// The file: every setting under the name of its flag. Names written in camelCase are taken, too.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct File {
    bpffs: Option<PathBuf>,
    cgroup: Option<PathBuf>,
    manifests: Option<PathBuf>,
    kubeconfig: Option<PathBuf>,
    #[serde(alias = "nodeName")]
    node_name: Option<String>,
    #[serde(alias = "wireDevice")]
    wire_device: Option<List>,
    #[serde(alias = "workloadDevice")]
    workload_device: Option<List>,
    #[serde(alias = "serviceClusterIPRange")]
    service_cluster_ip_range: Option<List>,
    #[serde(alias = "clusterCIDR")]
    cluster_cidr: Option<List>,
    #[serde(alias = "nodePortAddresses")]
    nodeport_addresses: Option<List>,
    #[serde(alias = "masqueradeAll")]
    masquerade_all: bool,
    #[serde(alias = "healthzBindAddress")]
    healthz_bind_address: Option<String>,
    #[serde(alias = "metricsBindAddress")]
    metrics_bind_address: Option<String>,
    #[serde(alias = "logLevel")]
    log_level: Option<String>,
    #[serde(alias = "logFormat")]
    log_format: Option<LogFormat>,
    #[serde(alias = "bpfLog")]
    bpf_log: Option<BpfLog>,
    #[serde(alias = "maxFrontends")]
    max_frontends: Option<NonZeroU32>,
    #[serde(alias = "maxBackends")]
    max_backends: Option<NonZeroU32>,
    #[serde(alias = "maxConnections")]
    max_connections: Option<NonZeroU32>,
}

/// A list, or what a flag would be given: one text with commas.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a list of texts, or one text with commas")]
enum List {
    Text(String),
    Items(Vec<String>),
}

impl List {
    fn items(self) -> Vec<String> {
        match self {
            Self::Text(text) => text.split(',').map(str::to_owned).collect(),
            Self::Items(items) => items,
        }
    }
}

impl Place {
    /// What holds for a command that only looks at the kernel or cleans up.
    ///
    /// # Errors
    /// The file is unreadable, or any of its settings is refused.
    pub fn new(typed: PlaceArgs) -> Result<Self, ConfigError> {
        let file = File::read(typed.config.as_deref())?;
        Self::merge(typed, file.bpffs, file.cgroup)
    }

    fn merge(typed: PlaceArgs, bpffs: Option<PathBuf>, cgroup: Option<PathBuf>) -> Result<Self, ConfigError> {
        let bpffs = typed.bpffs.or(bpffs).unwrap_or_else(|| DEFAULT_BPFFS.into());
        if !bpffs.is_absolute() {
            return Err(refused("--bpffs", bpffs.display(), "give an absolute path"));
        }
        Ok(Self { bpffs, cgroup: typed.cgroup.or(cgroup) })
    }
}

impl Config {
    /// What holds for `run`.
    ///
    /// # Errors
    /// The file is unreadable, a setting is refused, or there is no source of Services.
    pub fn new(place: PlaceArgs, run: RunArgs) -> Result<Self, ConfigError> {
        let file = File::read(place.config.as_deref())?;
        let list = |typed: Option<Vec<String>>, file: Option<List>| typed.or_else(|| file.map(List::items));
        let ranges = list(run.service_cluster_ip_range, file.service_cluster_ip_range)
            .unwrap_or_else(|| DEFAULT_SERVICE_RANGES.split(',').map(str::to_owned).collect());
        let healthz = run.healthz_bind_address.or(file.healthz_bind_address);
        let metrics = run.metrics_bind_address.or(file.metrics_bind_address);
        let place = Place::merge(place, file.bpffs, file.cgroup)?;
        if let Some(cgroup) = &place.cgroup {
            check_cgroup(cgroup)?;
        }
        let typed = (run.manifests, run.kubeconfig);
        let ineffective = [
            ("--cluster-cidr", run.cluster_cidr.is_some() || file.cluster_cidr.is_some()),
            ("--nodeport-addresses", run.nodeport_addresses.is_some() || file.nodeport_addresses.is_some()),
            ("--masquerade-all", run.masquerade_all || file.masquerade_all),
        ];
        let ineffective = ineffective.into_iter().filter(|(_, made)| *made).map(|(flag, _)| flag).collect();
        let defaults = Capacities::default();
        let size = |typed: Option<u32>, file: Option<NonZeroU32>| typed.or(file.map(NonZeroU32::get));
        let connections = size(run.max_connections, file.max_connections);
        let capacities = Capacities {
            services: size(run.max_frontends, file.max_frontends).unwrap_or(defaults.services),
            backends: size(run.max_backends, file.max_backends).unwrap_or(defaults.backends),
            // One entry for each direction.
            conntrack: connections.map_or(defaults.conntrack, |count| count.saturating_mul(2)),
        };
        let sources = if typed == (None, None) { (file.manifests, file.kubeconfig) } else { typed };
        Ok(Self {
            place,
            source: source(sources, std::env::var_os(IN_CLUSTER).is_some())?,
            node_name: check_node_name(run.node_name.or(file.node_name))?,
            devices: DevicePatterns {
                wire: patterns("--wire-device", list(run.wire_device, file.wire_device))?,
                workload: patterns("--workload-device", list(run.workload_device, file.workload_device))?,
            },
            service_ranges: service_ranges(ranges)?,
            healthz: bind_address("--healthz-bind-address", healthz, DEFAULT_HEALTHZ)?,
            metrics: bind_address("--metrics-bind-address", metrics, DEFAULT_METRICS)?,
            log_filter: log_filter(run.log_level.or(file.log_level))?,
            log_format: run.log_format.or(file.log_format).unwrap_or(LogFormat::Human),
            bpf_log: run.bpf_log.or(file.bpf_log).and_then(bpf_log_level),
            capacities,
            ineffective,
        })
    }
}

impl File {
    /// The settings in the file; none where there is no file.
    fn read(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        let refused = |reason: String| ConfigError::BadFile { path: path.to_owned(), reason };
        let kind: Kind = serde_saphyr::from_str(&text).unwrap_or_default();
        if kind.kind.as_deref() == Some("KubeProxyConfiguration") {
            return Err(refused(
                "this version does not read a KubeProxyConfiguration yet; name its settings as the \
                                flags of `lb-agent run --help`, such as `node-name: a`"
                    .to_owned(),
            ));
        }
        let file: Option<Self> = serde_saphyr::from_str(&text).map_err(|error| refused(error.to_string()))?;
        Ok(file.unwrap_or_default())
    }
}

/// Tells a Kubernetes configuration object from our own file.
#[derive(Default, Deserialize)]
struct Kind {
    kind: Option<String>,
}

fn refused(setting: &'static str, value: impl ToString, reason: impl Into<String>) -> ConfigError {
    ConfigError::BadValue { setting, value: value.to_string(), reason: reason.into() }
}

fn check_cgroup(dir: &Path) -> Result<(), ConfigError> {
    // Every cgroup2 folder has this file, no folder of a version 1 hierarchy does.
    if dir.join("cgroup.controllers").exists() {
        return Ok(());
    }
    Err(refused(
        "--cgroup",
        dir.display(),
        "it is no cgroup2 folder: give one below the mount that `findmnt -t cgroup2` shows",
    ))
}

/// The source that `--manifests` and `--kubeconfig` name.
fn source(given: (Option<PathBuf>, Option<PathBuf>), in_cluster: bool) -> Result<Source, ConfigError> {
    match given {
        (Some(manifests), Some(kubeconfig)) => Err(ConfigError::TwoSources { manifests, kubeconfig }),
        (Some(manifests), None) => check_manifests(manifests).map(Source::Manifests),
        (None, Some(file)) => {
            check_kubeconfig(file).map(|file| Source::ApiServer(ApiServer::Kubeconfig(file)))
        }
        (None, None) if in_cluster => Ok(Source::ApiServer(ApiServer::InCluster)),
        (None, None) => Err(ConfigError::NoSource),
    }
}

fn check_kubeconfig(file: PathBuf) -> Result<PathBuf, ConfigError> {
    match Kubeconfig::read_from(&file) {
        Ok(_) => Ok(file),
        Err(error) => {
            let reason = format!("{error}: give a file that `kubectl --kubeconfig FILE` takes");
            Err(refused("--kubeconfig", file.display(), reason))
        }
    }
}

fn check_manifests(dir: PathBuf) -> Result<PathBuf, ConfigError> {
    match std::fs::read_dir(&dir) {
        Ok(_) => Ok(dir),
        Err(error) => {
            let reason =
                format!("cannot list it ({error}): give a folder of YAML manifests, which may be empty");
            Err(refused("--manifests", dir.display(), reason))
        }
    }
}

fn check_node_name(given: Option<String>) -> Result<String, ConfigError> {
    let name = match given {
        Some(name) => name,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(ConfigError::NoHostName)?,
    };
    // Node names are lower case; kube-proxy forgives capitals, so do we.
    let name = name.trim().to_lowercase();
    if name.is_empty() {
        return Err(refused(
            "--node-name",
            name,
            "it is empty: give the name that endpoints have in nodeName",
        ));
    }
    Ok(name)
}

fn patterns(setting: &'static str, given: Option<Vec<String>>) -> Result<Vec<Pattern>, ConfigError> {
    const WANTED: &str = "give names of network devices, with * and ? for any text and letter";
    let pattern = |text: String| {
        let text = text.trim();
        if text.is_empty() || text.contains(['/', ' ']) {
            return Err(refused(setting, text, WANTED));
        }
        Pattern::new(text).map_err(|error| refused(setting, text, format!("{error}: {WANTED}")))
    };
    given.into_iter().flatten().map(pattern).collect()
}

const fn bpf_log_level(level: BpfLog) -> Option<BpfLogLevel> {
    match level {
        BpfLog::Off => None,
        BpfLog::Error => Some(BpfLogLevel::Error),
        BpfLog::Warn => Some(BpfLogLevel::Warn),
        BpfLog::Info => Some(BpfLogLevel::Info),
        BpfLog::Debug => Some(BpfLogLevel::Debug),
        BpfLog::Trace => Some(BpfLogLevel::Trace),
    }
}

fn service_ranges(given: Vec<String>) -> Result<Vec<IpNet>, ConfigError> {
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
                "it is the second range of its family: give one IPv4 and one IPv6 range at most",
            ));
        }
        ranges.push(range.trunc());
    }
    Ok(ranges)
}

/// `HOST:PORT`, or the host alone; empty is nowhere.
fn bind_address(
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
                "give ADDRESS:PORT such as {default} or [::]:{}, or an empty text for nowhere",
                default.port()
            ),
        )),
    }
}

fn log_filter(given: Option<String>) -> Result<Option<String>, ConfigError> {
    if let Some(filter) = &given
        && let Err(error) = EnvFilter::try_new(filter)
    {
        let reason =
            format!("{error}: give error, warn, info, debug, trace or a filter such as info,lb_agent=debug");
        return Err(refused("--log-level", filter, reason));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn with(file: &tempfile::NamedTempFile) -> PlaceArgs {
        PlaceArgs { config: Some(file.path().to_owned()), ..PlaceArgs::default() }
    }

    fn minimal() -> RunArgs {
        RunArgs { manifests: Some("/".into()), node_name: Some("a".into()), ..RunArgs::default() }
    }

    fn refusal(place: PlaceArgs, run: RunArgs) -> String {
        Config::new(place, run).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_those_of_kube_proxy() {
        let config = Config::new(PlaceArgs::default(), minimal()).unwrap();
        assert_eq!(config.place, Place { bpffs: "/sys/fs/bpf".into(), cgroup: None });
        assert_eq!(config.healthz.unwrap().to_string(), "0.0.0.0:10256");
        assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:10249");
        let ranges: Vec<_> = config.service_ranges.iter().map(ToString::to_string).collect();
        assert_eq!(ranges, ["10.96.0.0/12", "fd00:10:96::/112"]);
        assert_eq!(config.devices, DevicePatterns::default());
        assert_eq!((config.log_format, config.bpf_log), (LogFormat::Human, None));
    }

    #[test]
    fn what_was_typed_wins_over_the_file() {
        let file = file(
            "node-name: from-file\nbpffs: /from/file\nwire-device: [eth0, 'bond*']\nworkload-device: a,b\n\
             bpf-log: debug\nmetrics-bind-address: ''\nmax-backends: 100\nmax-connections: 100\n",
        );
        let run = RunArgs {
            node_name: Some("Typed".into()),
            wire_device: Some(vec!["wg0".into()]),
            max_backends: Some(50),
            ..minimal()
        };
        let config = Config::new(with(&file), run).unwrap();
        assert_eq!(config.node_name, "typed");
        assert_eq!(config.place.bpffs, Path::new("/from/file"));
        let names = |patterns: &[Pattern]| patterns.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(&config.devices.wire), ["wg0"]);
        assert_eq!(names(&config.devices.workload), ["a", "b"]);
        assert_eq!(config.bpf_log, Some(BpfLogLevel::Debug));
        let capacities = Capacities { backends: 50, conntrack: 200, ..Capacities::default() };
        assert_eq!(config.capacities, capacities);
        assert_eq!(config.metrics, None);
    }

    #[test]
    fn every_flag_of_run_is_a_key_of_the_file() {
        use clap::CommandFactory as _;
        let mut command = crate::cli::Cli::command();
        command.build();
        let run = command.find_subcommand("run").unwrap();
        let flags = run
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .filter(|flag| !["help", "config"].contains(flag));
        for flag in flags {
            let value = match flag {
                "log-format" => "json",
                "bpf-log" => "info",
                flag if flag.starts_with("max-") => "7",
                "masquerade-all" => "true",
                _ => "x",
            };
            let read = File::read(Some(file(&format!("{flag}: {value}\n")).path()));
            assert!(read.is_ok(), "{flag}: {read:?}");
        }
    }

    #[test]
    fn settings_without_effect_are_known_as_such() {
        let file = file("nodeport-addresses: primary\n");
        let run = RunArgs { masquerade_all: true, ..minimal() };
        let config = Config::new(with(&file), run).unwrap();
        assert_eq!(config.ineffective, ["--nodeport-addresses", "--masquerade-all"]);
        assert!(Config::new(PlaceArgs::default(), minimal()).unwrap().ineffective.is_empty());
    }

    #[test]
    fn keys_in_camel_case_are_taken() {
        let file = file("nodeName: b\nserviceClusterIPRange: [10.0.0.0/16]\n");
        let config = Config::new(with(&file), RunArgs { node_name: None, ..minimal() }).unwrap();
        assert_eq!(config.node_name, "b");
        assert_eq!(config.service_ranges, ["10.0.0.0/16".parse().unwrap()]);
    }

    #[test]
    fn an_unknown_key_is_named() {
        let file = file("node-name: a\nnode-nmae: b\n");
        let error = refusal(with(&file), minimal());
        assert!(error.contains("node-nmae") && error.contains(&file.path().display().to_string()), "{error}");
        assert!(Place::new(with(&file)).is_err(), "also for commands that need only a part of the file");
    }

    #[test]
    fn an_empty_file_changes_nothing() {
        for text in ["", "# nothing\n"] {
            assert!(Config::new(with(&file(text)), minimal()).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn a_kube_proxy_configuration_is_refused_by_its_name() {
        let file =
            file("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n");
        assert!(refusal(with(&file), minimal()).contains("KubeProxyConfiguration"));
    }

    #[test]
    fn every_refusal_names_setting_and_value() {
        let some = |text: &str| Some(vec![text.to_owned()]);
        let refusals = [
            ("--wire-device", "eth/0", RunArgs { wire_device: some("eth/0"), ..minimal() }),
            ("--workload-device", "a[", RunArgs { workload_device: some("a["), ..minimal() }),
            (
                "--service-cluster-ip-range",
                "10.0.0.0/33",
                RunArgs { service_cluster_ip_range: some("10.0.0.0/33"), ..minimal() },
            ),
            (
                "--healthz-bind-address",
                "nowhere:1",
                RunArgs { healthz_bind_address: Some("nowhere:1".into()), ..minimal() },
            ),
            ("--log-level", "lb=loud", RunArgs { log_level: Some("lb=loud".into()), ..minimal() }),
            ("--manifests", "/nowhere", RunArgs { manifests: Some("/nowhere".into()), ..minimal() }),
            ("--node-name", "", RunArgs { node_name: Some(" ".into()), ..minimal() }),
        ];
        for (setting, value, run) in refusals {
            let error = refusal(PlaceArgs::default(), run);
            assert!(error.starts_with(&format!("{setting}: {value:?}")), "{error}");
        }
    }

    #[test]
    fn one_range_of_each_family() {
        let run = RunArgs {
            service_cluster_ip_range: Some(vec!["10.0.0.0/16".into(), "10.1.0.0/16".into()]),
            ..minimal()
        };
        assert!(refusal(PlaceArgs::default(), run).contains("second range"));
    }

    #[test]
    fn no_source_says_what_to_give() {
        let error = source((None, None), false).unwrap_err().to_string();
        assert!(error.contains("--manifests DIR") && error.contains("--kubeconfig FILE"), "{error}");
    }

    #[test]
    fn in_a_pod_the_api_server_of_the_cluster_is_the_default() {
        assert_eq!(source((None, None), true).unwrap(), Source::ApiServer(ApiServer::InCluster));
        assert_eq!(source((Some("/".into()), None), true).unwrap(), Source::Manifests("/".into()));
    }

    #[test]
    fn one_source_at_most() {
        let run = RunArgs { kubeconfig: Some("/k".into()), ..minimal() };
        let error = refusal(PlaceArgs::default(), run);
        assert!(error.contains("--manifests /") && error.contains("--kubeconfig /k"), "{error}");
    }

    #[test]
    fn a_typed_source_wins_over_one_in_the_file() {
        let file = file("kubeconfig: /nowhere\n");
        let config = Config::new(with(&file), minimal()).unwrap();
        assert_eq!(config.source, Source::Manifests("/".into()));
        let error = refusal(with(&file), RunArgs { manifests: None, ..minimal() });
        assert!(error.starts_with("--kubeconfig: \"/nowhere\""), "{error}");
    }

    #[test]
    fn a_bind_address_may_be_a_host_alone() {
        for (text, bound) in
            [("::1", "[::1]:10256"), ("127.0.0.1", "127.0.0.1:10256"), ("[::]:80", "[::]:80")]
        {
            let config = Config::new(
                PlaceArgs::default(),
                RunArgs { healthz_bind_address: Some(text.into()), ..minimal() },
            );
            assert_eq!(config.unwrap().healthz.unwrap().to_string(), bound);
        }
    }
}
