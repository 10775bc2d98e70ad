//! `KubeProxyConfiguration` of `kubeproxy.config.k8s.io/v1alpha1`, the file of kube-proxy.
//!
//! As in kube-proxy, null and the zero value stand for the default, and unknown fields only cause a warning: kube-proxy
//! decodes strictly, and leniently if that fails. The agent also warns of fields that request something that it does
//! not do.

use std::collections::BTreeMap;

use lb_common::Scheduler;
use serde::Deserialize;
use serde_json::Value;

use crate::cli::{DetectLocalMode, FileSettings, List, LogFormat};

/// The `kind` of kube-proxy's configuration file.
pub(super) const KIND: &str = "KubeProxyConfiguration";
/// The only `apiVersion` of kube-proxy's configuration file that the agent supports.
pub(super) const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

/// The feature gate without which kube-proxy serves no external IPs; it is on by default. The agent ignores all other
/// gates.
pub(super) const EXTERNAL_IPS_GATE: &str = "AllowServiceExternalIPs";

/// The lowest `logging.verbosity` that sets the agent's log level to debug: kube-proxy logs details at that verbosity.
const DEBUG_VERBOSITY: u32 = 4;

/// Fields that the agent ignores, each with the values that cause no warning: the defaults of kube-proxy. Zero values
/// cause no warning either. A field with subfields stands for all of them.
const WITHOUT_EFFECT: &[(&str, &[&str])] = &[
    ("bindAddressHardFail", &[]),
    ("clientConnection.acceptContentTypes", &[]),
    ("clientConnection.burst", &["10"]),
    ("clientConnection.contentType", &["application/vnd.kubernetes.protobuf"]),
    ("clientConnection.qps", &["5", "5.0"]),
    ("configSyncPeriod", &["15m0s", "15m"]),
    ("conntrack.maxPerCore", &["32768"]),
    ("conntrack.min", &["131072"]),
    ("conntrack.tcpBeLiberal", &[]),
    ("conntrack.tcpCloseWaitTimeout", &["1h0m0s", "1h"]),
    ("conntrack.tcpEstablishedTimeout", &["24h0m0s", "24h"]),
    ("conntrack.udpStreamTimeout", &[]),
    ("conntrack.udpTimeout", &[]),
    ("enableProfiling", &[]),
    ("iptables.masqueradeBit", &["14"]),
    ("iptables.minSyncPeriod", &["1s"]),
    ("iptables.snatNodeInternalIP", &[]),
    ("iptables.syncPeriod", &["30s"]),
    ("ipvs.excludeCIDRs", &[]),
    ("ipvs.minSyncPeriod", &["1s"]),
    ("ipvs.strictARP", &[]),
    ("ipvs.syncPeriod", &["30s"]),
    ("ipvs.tcpFinTimeout", &[]),
    ("ipvs.tcpTimeout", &[]),
    ("ipvs.udpTimeout", &[]),
    ("logging.flushFrequency", &["5s", "5000000000"]),
    ("logging.options", &[]),
    ("logging.vmodule", &[]),
    ("nftables.masqueradeBit", &["14"]),
    ("nftables.minSyncPeriod", &["1s"]),
    ("nftables.syncPeriod", &["30s"]),
    ("oomScoreAdj", &["-999"]),
    ("portRange", &[]),
    ("showHiddenMetricsForVersion", &[]),
    ("windowsRunAsService", &[]),
    ("winkernel", &[]),
];

/// The fields of the file that the agent reads; [`WITHOUT_EFFECT`] lists the others.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeProxyConfiguration {
    api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    bind_address: String,
    client_connection: ClientConnection,
    #[serde(rename = "clusterCIDR")]
    cluster_cidr: String,
    detect_local: DetectLocal,
    detect_local_mode: Option<DetectLocalMode>,
    feature_gates: BTreeMap<String, bool>,
    healthz_bind_address: String,
    hostname_override: String,
    iptables: Iptables,
    ipvs: Ipvs,
    logging: Logging,
    metrics_bind_address: String,
    mode: Mode,
    nftables: Nftables,
    node_port_addresses: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClientConnection {
    kubeconfig: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DetectLocal {
    bridge_interface: String,
    interface_name_prefix: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Iptables {
    masquerade_all: bool,
    localhost_node_ports: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Ipvs {
    scheduler: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Nftables {
    masquerade_all: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Logging {
    format: Format,
    verbosity: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    #[serde(alias = "")]
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
    #[serde(alias = "")]
    Iptables,
    Ipvs,
    Nftables,
}

/// Parses the file: settings, and names of fields without effect.
///
/// # Errors
/// The text is not YAML, has another `apiVersion`, or a field has an invalid value; the error then names the field.
pub(super) fn parse(text: &str) -> Result<(FileSettings, Vec<String>), String> {
    let mut value: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    remove_nulls(&mut value);
    let mut unused = Vec::new();
    let mut note = |path: serde_ignored::Path<'_>| unused.push(path.to_string());
    let config: KubeProxyConfiguration =
        serde_path_to_error::deserialize(serde_ignored::Deserializer::new(&value, &mut note))
            .map_err(|error| error.to_string())?;
    if config.api_version != API_VERSION {
        return Err(format!("apiVersion {:?} is not known: it must be {API_VERSION}", config.api_version));
    }
    let mut without_effect = Vec::new();
    for path in &unused {
        asked_for(path, value.pointer(&format!("/{}", path.replace('.', "/"))), &mut without_effect);
    }
    Ok(config.into_settings(without_effect))
}

/// Removes fields with the value null: kube-proxy's decoder leaves a field at its default for null.
fn remove_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, value| !value.is_null());
        fields.values_mut().for_each(remove_nulls);
    }
}

/// Collects the names of fields at or below `path` that request something without effect, and of unknown fields.
fn asked_for(path: &str, value: Option<&Value>, names: &mut Vec<String>) {
    let known = WITHOUT_EFFECT.iter().find(|(name, _)| *name == path);
    match (known, value) {
        (Some((_, nothing)), Some(value)) if !asks_for_nothing(value, nothing) => names.push(path.to_owned()),
        (None, Some(Value::Object(fields))) => {
            for (name, value) in fields {
                asked_for(&format!("{path}.{name}"), Some(value), names);
            }
        }
        (None, _) => names.push(format!("{path} (unknown)")),
        (Some(_), _) => {}
    }
}

fn asks_for_nothing(value: &Value, nothing: &[&str]) -> bool {
    let text = match value {
        Value::Null => return true,
        Value::Array(items) => return items.is_empty(),
        Value::Object(fields) => return fields.values().all(|value| asks_for_nothing(value, nothing)),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    };
    ["", "false", "0", "0.0", "0s"].contains(&text.as_str()) || nothing.contains(&text.as_str())
}

impl KubeProxyConfiguration {
    /// The scheduler for mode ipvs: the configured one, or round robin if none is configured or the agent does not have
    /// the configured one. `None` in other modes. Adds `ipvs.scheduler` to `without_effect` if the agent ignores the
    /// configured one.
    fn scheduler(&self, without_effect: &mut Vec<String>) -> Option<String> {
        let given = &self.ipvs.scheduler;
        let known = given.parse::<Scheduler>().is_ok();
        let counts = self.mode == Mode::Ipvs && known;
        if !given.is_empty() && !counts {
            without_effect.push("ipvs.scheduler".to_owned());
        }
        let name = if counts { given } else { Scheduler::RoundRobin.as_str() };
        (self.mode == Mode::Ipvs).then(|| name.to_owned())
    }

    /// Whether the file turns off [`EXTERNAL_IPS_GATE`]. Adds each other gate to `without_effect`, even a gate that is
    /// false, because its default may be true.
    fn ignores_external_ips(&self, without_effect: &mut Vec<String>) -> bool {
        let others = self.feature_gates.keys().filter(|gate| *gate != EXTERNAL_IPS_GATE);
        without_effect.extend(others.map(|gate| format!("featureGates.{gate}")));
        self.feature_gates.get(EXTERNAL_IPS_GATE) == Some(&false)
    }

    /// Converts the file to the agent's settings; also returns the sorted names of the fields without effect.
    fn into_settings(self, mut without_effect: Vec<String>) -> (FileSettings, Vec<String>) {
        if self.mode == Mode::Ipvs {
            without_effect.push("mode".to_owned());
        }
        let scheduler = self.scheduler(&mut without_effect);
        let ignore_external_ips = self.ignores_external_ips(&mut without_effect);
        if self.iptables.localhost_node_ports == Some(false) {
            without_effect.push("iptables.localhostNodePorts".to_owned());
        }
        without_effect.sort_unstable();
        let nftables = self.mode == Mode::Nftables;
        let settings = FileSettings {
            kubeconfig: said(self.client_connection.kubeconfig).map(Into::into),
            node_name: said(self.hostname_override),
            bind_address: said(self.bind_address),
            detect_local_mode: self.detect_local_mode,
            cluster_cidr: said(self.cluster_cidr).map(List::Text),
            pod_bridge_interface: said(self.detect_local.bridge_interface),
            pod_interface_name_prefix: said(self.detect_local.interface_name_prefix),
            masquerade_all: if nftables {
                self.nftables.masquerade_all
            } else {
                self.iptables.masquerade_all
            },
            nodeport_addresses: match self.node_port_addresses {
                // In mode nftables, kube-proxy serves node ports on the primary addresses by default.
                none if none.is_empty() && nftables => Some(List::Text("primary".to_owned())),
                addresses => (!addresses.is_empty()).then_some(List::Items(addresses)),
            },
            ignore_external_ips,
            healthz_bind_address: said(self.healthz_bind_address),
            metrics_bind_address: said(self.metrics_bind_address),
            scheduler,
            log_level: (self.logging.verbosity >= DEBUG_VERBOSITY)
                .then(|| "info,lb_agent=debug,lb_datapath=debug".to_owned()),
            log_format: match self.logging.format {
                Format::Text => None,
                Format::Json => Some(LogFormat::Json),
            },
            ..FileSettings::default()
        };
        (settings, without_effect)
    }
}

fn said(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    fn parsed(text: &str) -> (FileSettings, Vec<String>) {
        parse(&format!("{EMPTY}{text}")).unwrap()
    }

    fn settings(text: &str) -> FileSettings {
        parsed(text).0
    }

    fn without_effect(text: &str) -> Vec<String> {
        parsed(text).1
    }

    /// The file that kubeadm writes, with some lines replaced. kubeadm writes every field, and the zero value for each
    /// field that the user of kubeadm has not set.
    fn of_kubeadm(replaced: &[[&str; 2]]) -> (FileSettings, Vec<String>) {
        let objects = include_str!("testdata/kubeadm-objects.yaml");
        let (config_map, _) = objects.split_once("\n---\n").unwrap();
        let config_map: Value = serde_saphyr::from_str(config_map).unwrap();
        let mut file = config_map["data"]["config.conf"].as_str().unwrap().to_owned();
        for [line, by] in replaced {
            assert!(file.contains(line), "{line}");
            file = file.replacen(line, by, 1);
        }
        parse(&file).unwrap()
    }

    /// The settings that the agent takes from the file of kubeadm.
    fn taken_of_kubeadm() -> FileSettings {
        FileSettings {
            kubeconfig: Some("/var/lib/kube-proxy/kubeconfig.conf".into()),
            bind_address: Some("0.0.0.0".to_owned()),
            cluster_cidr: Some(List::Text("10.244.0.0/16".to_owned())),
            detect_local_mode: Some(DetectLocalMode::ClusterCidr),
            ..FileSettings::default()
        }
    }

    #[test]
    fn configuration_of_kubeadm_is_accepted_without_warnings() {
        assert_eq!(of_kubeadm(&[]), (taken_of_kubeadm(), Vec::new()));
    }

    /// kind runs kubeadm with these values.
    #[test]
    fn configuration_of_kind_is_accepted_without_warnings() {
        let of_kind = [
            ["maxPerCore: null", "maxPerCore: 0"],
            ["mode: \"\"", "mode: iptables"],
            ["minSyncPeriod: 0s", "minSyncPeriod: 1s"],
        ];
        assert_eq!(of_kubeadm(&of_kind), (taken_of_kubeadm(), Vec::new()));
    }

    #[test]
    fn networks_and_mode_of_a_kubeadm_cluster_are_applied() {
        let with_cidr = |text: &str| of_kubeadm(&[["clusterCIDR: 10.244.0.0/16", text]]);
        let networks = |cluster_cidr| FileSettings { cluster_cidr, ..taken_of_kubeadm() };
        let both = "10.244.0.0/16,fd00:10:244::/56";
        let taken = networks(Some(List::Text(both.to_owned())));
        assert_eq!(with_cidr(&format!("clusterCIDR: {both}")), (taken, Vec::new()));
        assert_eq!(
            with_cidr("clusterCIDR: \"\""),
            (networks(None), Vec::new()),
            "without --pod-network-cidr"
        );

        let nodeport_addresses = Some(List::Text("primary".to_owned()));
        let nftables = FileSettings { nodeport_addresses, ..taken_of_kubeadm() };
        assert_eq!(of_kubeadm(&[["mode: \"\"", "mode: nftables"]]), (nftables, Vec::new()));

        let ipvs = FileSettings { scheduler: Some("rr".to_owned()), ..taken_of_kubeadm() };
        let ignored = ["ipvs.strictARP", "mode"].map(str::to_owned).to_vec();
        let lines = [["mode: \"\"", "mode: ipvs"], ["strictARP: false", "strictARP: true"]];
        assert_eq!(of_kubeadm(&lines), (ipvs, ignored));
    }

    #[test]
    fn defaults_that_kube_proxy_writes_are_accepted_without_warnings() {
        let file = parse(include_str!("testdata/defaults.yaml")).unwrap();
        let taken = FileSettings {
            bind_address: Some("0.0.0.0".to_owned()),
            detect_local_mode: Some(DetectLocalMode::ClusterCidr),
            healthz_bind_address: Some("0.0.0.0:10256".to_owned()),
            metrics_bind_address: Some("127.0.0.1:10249".to_owned()),
            ..FileSettings::default()
        };
        assert_eq!(file, (taken, Vec::new()));
    }

    #[test]
    fn every_supported_field_is_applied() {
        let file = settings(
            "bindAddress: 192.0.2.1\nclientConnection: {kubeconfig: /k}\nclusterCIDR: '10.0.0.0/16,fd00::/48'\n\
             detectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}\n\
             detectLocalMode: InterfaceNamePrefix\nhealthzBindAddress: '[::]:1'\nhostnameOverride: Node-A\n\
             iptables: {masqueradeAll: true}\nlogging: {format: json, verbosity: 4}\n\
             metricsBindAddress: 127.0.0.1\nnodePortAddresses: [192.0.2.0/24]\n\
             featureGates: {AllowServiceExternalIPs: false}\n",
        );
        let used = FileSettings {
            bind_address: Some("192.0.2.1".to_owned()),
            kubeconfig: Some("/k".into()),
            cluster_cidr: Some(List::Text("10.0.0.0/16,fd00::/48".to_owned())),
            pod_bridge_interface: Some("cni0".to_owned()),
            pod_interface_name_prefix: Some("veth".to_owned()),
            detect_local_mode: Some(DetectLocalMode::InterfaceNamePrefix),
            healthz_bind_address: Some("[::]:1".to_owned()),
            node_name: Some("Node-A".to_owned()),
            masquerade_all: true,
            log_format: Some(LogFormat::Json),
            log_level: Some("info,lb_agent=debug,lb_datapath=debug".to_owned()),
            metrics_bind_address: Some("127.0.0.1".to_owned()),
            nodeport_addresses: Some(List::Items(vec!["192.0.2.0/24".to_owned()])),
            ignore_external_ips: true,
            ..FileSettings::default()
        };
        assert_eq!(file, used);
    }

    #[test]
    fn mode_selects_section_and_default() {
        let masquerades = |text| settings(text).masquerade_all;
        assert!(masquerades("mode: nftables\nnftables: {masqueradeAll: true}\n"));
        assert!(!masquerades("mode: nftables\niptables: {masqueradeAll: true}\n"));
        assert!(!masquerades("nftables: {masqueradeAll: true}\n"));
        assert!(masquerades("mode: ipvs\niptables: {masqueradeAll: true}\n"));
        let primary = Some(List::Text("primary".to_owned()));
        assert_eq!(settings("mode: nftables\n").nodeport_addresses, primary);
        assert_eq!(settings("mode: iptables\n").nodeport_addresses, None);
    }

    #[test]
    fn scheduler_of_mode_ipvs_is_applied() {
        let scheduler = |text| {
            let (settings, without_effect) = parsed(text);
            (settings.scheduler, without_effect)
        };
        let rr = Some("rr".to_owned());
        let ignored = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            scheduler("mode: ipvs\nipvs: {scheduler: lc}\n"),
            (Some("lc".to_owned()), ignored(&["mode"]))
        );
        assert_eq!(scheduler("mode: ipvs\n"), (rr.clone(), ignored(&["mode"])));
        assert_eq!(
            scheduler("mode: ipvs\nipvs: {scheduler: lblc}\n"),
            (rr, ignored(&["ipvs.scheduler", "mode"]))
        );
        assert_eq!(scheduler("ipvs: {scheduler: lc}\n"), (None, ignored(&["ipvs.scheduler"])));
        assert_eq!(scheduler("ipvs: {scheduler: ''}\n"), (None, ignored(&[])));
    }

    #[test]
    fn fields_without_effect_are_named_unless_they_hold_the_default() {
        let file = "mode: ipvs\nipvs: {strictARP: true, scheduler: lc, syncPeriod: 30s}\nfeatureGates: {A: true}\n\
                    conntrack: {min: 0, maxPerCore: 1000}\niptables: {localhostNodePorts: false}\n\
                    winkernel: {enableDSR: true, networkName: ''}\n";
        let named = [
            "conntrack.maxPerCore",
            "featureGates.A",
            "iptables.localhostNodePorts",
            "ipvs.strictARP",
            "mode",
            "winkernel",
        ];
        assert_eq!(without_effect(file), named);
        let unknown = "udpIdleTimeout: 250ms\nipvs: {new: {field: 1}}\n";
        assert_eq!(without_effect(unknown), ["ipvs.new.field (unknown)", "udpIdleTimeout (unknown)"]);
    }

    #[test]
    fn feature_gate_turns_external_ips_off() {
        let gates = |gates: &str| {
            let (settings, without_effect) = parsed(&format!("featureGates: {gates}\n"));
            (settings.ignore_external_ips, without_effect)
        };
        let named = |gate: &str| vec![format!("featureGates.{gate}")];
        assert_eq!(gates("{AllowServiceExternalIPs: false}"), (true, vec![]));
        assert_eq!(gates("{AllowServiceExternalIPs: true}"), (false, vec![]));
        assert_eq!(gates("{AllowServiceExternalIPs: false, B: false}"), (true, named("B")));
        assert_eq!(gates("{B: true}"), (false, named("B")));
        assert_eq!(gates("{}"), (false, vec![]));
    }

    #[test]
    fn invalid_field_is_rejected_with_its_path() {
        for (text, wanted) in [
            ("mode: userspace\n", "mode: unknown variant `userspace`"),
            ("iptables: {masqueradeAll: 1}\n", "iptables.masqueradeAll: invalid type"),
            ("detectLocalMode: Guess\n", "detectLocalMode: unknown variant `Guess`"),
            ("featureGates: {A: 1}\n", "featureGates.A: invalid type"),
            ("nodePortAddresses: primary\n", "nodePortAddresses: invalid type"),
        ] {
            let error = parse(&format!("{EMPTY}{text}")).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let error = parse(&EMPTY.replace("v1alpha1", "v1")).unwrap_err();
        assert!(error.contains("must be kubeproxy.config.k8s.io/v1alpha1"), "{error}");
    }
}
