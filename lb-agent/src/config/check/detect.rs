//! The settings for recognising internal clients.

use super::{device, networks};
use crate::{
    cli::{DetectLocalMode, RunArgs},
    config::{
        Source,
        error::{ConfigError, refused},
    },
    node::DetectLocal,
};

/// Determines how the agent recognises internal clients. As in kube-proxy, each mode uses only its own setting, and the
/// mode `ClusterCIDR` without pod networks recognises no client as internal.
pub(in crate::config) fn detect_local(given: &RunArgs, source: &Source) -> Result<DetectLocal, ConfigError> {
    let cidrs = networks("--cluster-cidr", given.cluster_cidr.as_deref(), "")?;
    match given.detect_local_mode.unwrap_or(DetectLocalMode::ClusterCidr) {
        DetectLocalMode::ClusterCidr if cidrs.is_empty() => Ok(DetectLocal::Never),
        DetectLocalMode::ClusterCidr => Ok(DetectLocal::ClusterCidr(cidrs)),
        DetectLocalMode::NodeCidr if matches!(source, Source::Manifests(_)) => Err(refused(
            "--detect-local-mode",
            "NodeCIDR",
            "only an API server knows the pod networks of this node: give ClusterCIDR and --cluster-cidr",
        )),
        DetectLocalMode::NodeCidr => Ok(DetectLocal::NodeCidr),
        DetectLocalMode::BridgeInterface => {
            device("--pod-bridge-interface", given.pod_bridge_interface.as_deref())
                .map(DetectLocal::BridgeInterface)
        }
        DetectLocalMode::InterfaceNamePrefix => {
            device("--pod-interface-name-prefix", given.pod_interface_name_prefix.as_deref())
                .map(DetectLocal::InterfaceNamePrefix)
        }
    }
}
