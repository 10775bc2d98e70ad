//! The file of `--config`: our own, or one of kube-proxy.

use std::{num::NonZeroU32, path::Path, path::PathBuf};

use serde::Deserialize;

use super::{error::ConfigError, kube_proxy};
use crate::cli::{
    BpfLog, DetectLocalMode, DsrEncapsulation, Forwarding, LogFormat, ServiceMetrics, SocketLb, Xdp,
};

/// Every setting under the name of its flag. Names written in camelCase are taken, too.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) bpffs: Option<PathBuf>,
    pub(super) cgroup: Option<PathBuf>,
    pub(super) manifests: Option<PathBuf>,
    pub(super) kubeconfig: Option<PathBuf>,
    #[serde(alias = "nodeName")]
    pub(super) node_name: Option<String>,
    #[serde(alias = "bindAddress")]
    pub(super) bind_address: Option<String>,
    #[serde(alias = "wireDevice")]
    pub(super) wire_device: Option<List>,
    #[serde(alias = "workloadDevice")]
    pub(super) workload_device: Option<List>,
    #[serde(alias = "serviceClusterIPRange")]
    pub(super) service_cluster_ip_range: Option<List>,
    #[serde(alias = "detectLocalMode")]
    pub(super) detect_local_mode: Option<DetectLocalMode>,
    #[serde(alias = "clusterCIDR")]
    pub(super) cluster_cidr: Option<List>,
    #[serde(alias = "podBridgeInterface")]
    pub(super) pod_bridge_interface: Option<String>,
    #[serde(alias = "podInterfaceNamePrefix")]
    pub(super) pod_interface_name_prefix: Option<String>,
    #[serde(alias = "masqueradeAll")]
    pub(super) masquerade_all: bool,
    #[serde(alias = "masqueradePorts")]
    pub(super) masquerade_ports: Option<String>,
    #[serde(alias = "nodePortAddresses")]
    pub(super) nodeport_addresses: Option<List>,
    pub(super) scheduler: Option<String>,
    #[serde(alias = "maglevTableSize")]
    pub(super) maglev_table_size: Option<u32>,
    #[serde(alias = "maglevSeed")]
    pub(super) maglev_seed: Option<u64>,
    #[serde(alias = "northSouthMode")]
    pub(super) north_south_mode: Option<String>,
    #[serde(alias = "dsrEncapsulation")]
    pub(super) dsr_encapsulation: Option<DsrEncapsulation>,
    #[serde(alias = "dsrPeers")]
    pub(super) dsr_peers: Option<List>,
    #[serde(alias = "socketLb")]
    pub(super) socket_lb: Option<SocketLb>,
    pub(super) xdp: Option<Xdp>,
    pub(super) forwarding: Option<Forwarding>,
    pub(super) syn_retries: Option<u16>,
    #[serde(alias = "healthzBindAddress")]
    pub(super) healthz_bind_address: Option<String>,
    #[serde(alias = "metricsBindAddress")]
    pub(super) metrics_bind_address: Option<String>,
    #[serde(alias = "serviceMetrics")]
    pub(super) service_metrics: Option<ServiceMetrics>,
    #[serde(alias = "logLevel")]
    pub(super) log_level: Option<String>,
    #[serde(alias = "logFormat")]
    pub(super) log_format: Option<LogFormat>,
    #[serde(alias = "bpfLog")]
    pub(super) bpf_log: Option<BpfLog>,
    #[serde(alias = "maxFrontends")]
    pub(super) max_frontends: Option<NonZeroU32>,
    #[serde(alias = "maxBackends")]
    pub(super) max_backends: Option<NonZeroU32>,
    #[serde(alias = "maxTableSlots")]
    pub(super) max_table_slots: Option<NonZeroU32>,
    #[serde(alias = "maxConnections")]
    pub(super) max_connections: Option<NonZeroU32>,
    #[serde(alias = "maxAffinityClients")]
    pub(super) max_affinity_clients: Option<NonZeroU32>,
    /// What kube-proxy would take and we do not.
    #[serde(skip)]
    pub(super) without_effect: Vec<String>,
}

/// A list, or what a flag would be given: one text with commas.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged, expecting = "expected a list of texts, or one text with commas")]
pub(super) enum List {
    Text(String),
    Items(Vec<String>),
}

impl List {
    pub(super) fn items(self) -> Vec<String> {
        match self {
            Self::Text(text) => text.split(',').map(str::to_owned).collect(),
            Self::Items(items) => items,
        }
    }
}

impl File {
    /// The settings in the file; none where there is no file.
    pub(super) fn read(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|reason| ConfigError::BadFile { path: path.to_owned(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let kind: Kind = serde_saphyr::from_str(text).unwrap_or_default();
        match kind.kind.as_deref() {
            Some(kube_proxy::KIND) => kube_proxy::parse(text),
            Some(other) => Err(format!(
                "its kind is {other}: give a {}, or a file whose keys are the flags of `lb-agent run --help`",
                kube_proxy::KIND
            )),
            None => {
                let file: Option<Self> = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
                Ok(file.unwrap_or_default())
            }
        }
    }
}

/// Tells a Kubernetes configuration object from our own file.
#[derive(Default, Deserialize)]
struct Kind {
    kind: Option<String>,
}
