//! The settings for assigning addresses to Services of type LoadBalancer.

use ipnet::IpNet;

use super::networks;
use crate::{
    cli::RunArgs,
    config::{
        Source,
        error::{ConfigError, refused},
    },
};

/// Parses the networks of `--load-balancer-pool`, which needs `--manifests`. They may not overlap the ranges of cluster
/// IPs.
pub(in crate::config) fn load_balancer_pool(
    given: &RunArgs,
    source: &Source,
    service_ranges: &[IpNet],
) -> Result<Vec<IpNet>, ConfigError> {
    const SETTING: &str = "--load-balancer-pool";
    let networks = IpNet::aggregate(&networks(SETTING, given.load_balancer_pool.as_deref(), "")?);
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
pub(in crate::config) fn load_balancer_controller(
    given: &RunArgs,
    source: &Source,
) -> Result<bool, ConfigError> {
    let is_given = given.load_balancer_controller;
    if is_given && matches!(source, Source::Manifests(_)) {
        let why = "with --manifests the agent gives addresses in any case: remove this setting";
        return Err(refused("--load-balancer-controller", true, why));
    }
    Ok(is_given)
}

/// Checks `--load-balancer-reassign`, which with an API server needs `--load-balancer-controller`.
pub(in crate::config) fn load_balancer_reassign(
    given: &RunArgs,
    source: &Source,
) -> Result<bool, ConfigError> {
    let is_given = given.load_balancer_reassign;
    if is_given && !given.load_balancer_controller && matches!(source, Source::ApiServer(_)) {
        let why =
            "this agent gives no addresses: set --load-balancer-controller as well, or remove this setting";
        return Err(refused("--load-balancer-reassign", true, why));
    }
    Ok(is_given)
}
