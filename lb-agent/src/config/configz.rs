//! The effective configuration in the format of kube-proxy: the page `/configz`.

use serde_json::{Value, json};

use super::{Config, DetectLocal, NodePortAddresses, Source, kube_proxy};
use crate::{cli::LogFormat, kubernetes::ApiServer};

impl Config {
    /// The effective configuration with the field names of `KubeProxyConfiguration`. Other settings are left out.
    pub fn configz(&self) -> Value {
        let kubeconfig = match &self.source {
            Source::ApiServer(ApiServer::Kubeconfig(path)) => path.display().to_string(),
            Source::ApiServer(ApiServer::InCluster) | Source::Manifests(_) => String::new(),
        };
        let (mode, cluster_cidr, bridge, prefix) = self.detection();
        let address =
            |address: Option<std::net::SocketAddr>| address.map_or_else(String::new, |a| a.to_string());
        json!({ "kubeproxy.config.k8s.io": {
            "apiVersion": kube_proxy::API_VERSION,
            "kind": kube_proxy::KIND,
            "bindAddress": self.bind_address,
            "bindAddressHardFail": false,
            "clientConnection": { "kubeconfig": kubeconfig },
            "clusterCIDR": cluster_cidr,
            "detectLocal": { "bridgeInterface": bridge, "interfaceNamePrefix": prefix },
            "detectLocalMode": mode,
            "featureGates": { kube_proxy::EXTERNAL_IPS_GATE: !self.ignore_external_ips },
            "healthzBindAddress": address(self.healthz),
            "hostnameOverride": self.node_name,
            "iptables": { "localhostNodePorts": true, "masqueradeAll": self.masquerade_all },
            "logging": { "format": match self.log_format { LogFormat::Human => "text", LogFormat::Json => "json" } },
            "metricsBindAddress": address(self.metrics),
            "nftables": { "masqueradeAll": self.masquerade_all },
            "nodePortAddresses": match &self.nodeport_addresses {
                NodePortAddresses::All => Vec::new(),
                NodePortAddresses::Primary => vec!["primary".to_owned()],
                NodePortAddresses::Networks(networks) => networks.iter().map(ToString::to_string).collect(),
            },
        }})
    }

    /// How internal clients are detected, in kube-proxy's terms: mode, pod networks, bridge, prefix of interface names.
    fn detection(&self) -> (&'static str, String, &str, &str) {
        match &self.detect_local {
            DetectLocal::Never => ("ClusterCIDR", String::new(), "", ""),
            DetectLocal::ClusterCidr(networks) => {
                let networks: Vec<_> = networks.iter().map(ToString::to_string).collect();
                ("ClusterCIDR", networks.join(","), "", "")
            }
            DetectLocal::NodeCidr => ("NodeCIDR", String::new(), "", ""),
            DetectLocal::BridgeInterface(name) => ("BridgeInterface", String::new(), name, ""),
            DetectLocal::InterfaceNamePrefix(prefix) => ("InterfaceNamePrefix", String::new(), "", prefix),
        }
    }
}
