//! IPsec policies that replies from Services bypass.
//!
//! The kernel looks up the out policy when it routes a reply. At that time the reply's source is still the endpoint;
//! the programs write the virtual address later, so a policy for the virtual address does not encrypt the reply. The
//! agent therefore denies the external clients behind such a policy and deletes their connections.

use std::{future, path::PathBuf};

use ipnet::IpNet;
use lb_datapath::{Conntrack, DatapathError, OutPolicy, PolicyWatcher, bypassed_policies};
use tracing::{info, warn};

/// Finds IPsec policies that replies would bypass, and deletes the connections of the external clients that these
/// policies cover.
#[derive(Debug)]
pub(super) struct Ipsec {
    bpffs: PathBuf,
    conntrack: Conntrack,
    watcher: Option<PolicyWatcher>,
    /// The bypassed policies found by the last search that succeeded.
    bypassed: Vec<OutPolicy>,
    /// The policies for which the connections of clients have been deleted.
    ended: Vec<OutPolicy>,
}

impl Ipsec {
    /// Opens the watcher of policies. Must be called within a Tokio runtime.
    pub(super) fn new(bpffs: PathBuf, conntrack: Conntrack) -> Result<Self, DatapathError> {
        Ok(Self {
            bpffs,
            conntrack,
            watcher: PolicyWatcher::open()?,
            bypassed: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Finds bypassed policies. Returns the networks of clients that must be denied, and sentences for `status`. If the
    /// search fails, uses the policies that the last successful search found.
    pub(super) fn denied(&mut self) -> (Vec<IpNet>, Vec<String>) {
        let mut conditions = Vec::new();
        match bypassed_policies(&self.bpffs) {
            Ok(found) => self.bypassed = found,
            Err(error) => {
                conditions.push(format!("replies from Services may bypass IPsec policies: {error}"));
            }
        }
        conditions.extend(self.bypassed.iter().map(|policy| {
            let (address, prefix) = policy.clients();
            format!(
                "external clients in {address}/{prefix} reach no Service, because replies would bypass the IPsec policy \
                 {policy} and leave unencrypted; give the policy the networks of the endpoints, and do not reach virtual \
                 addresses through the tunnel"
            )
        }));
        let network = |policy: &OutPolicy| {
            let (address, prefix) = policy.clients();
            IpNet::new(address, prefix).ok()
        };
        (self.bypassed.iter().filter_map(network).collect(), conditions)
    }

    /// Deletes connections of denied clients, if policies have changed. Must be called after the programs have begun to
    /// deny them. Clients in the `internal` networks keep their connections.
    pub(super) fn end_connections(&mut self, internal: &[IpNet]) -> Result<(), DatapathError> {
        if self.ended == self.bypassed {
            return Ok(());
        }
        let flows = self
            .conntrack
            .purge_unencrypted(&self.bypassed, |ip| internal.iter().any(|network| network.contains(&ip)))?;
        self.ended.clone_from(&self.bypassed);
        if flows > 0 {
            info!(flows, "deleted connections whose replies bypass an IPsec policy");
        }
        Ok(())
    }

    /// Waits for a change of a policy; forever if there is no watcher. Also returns once when the watcher fails.
    pub(super) async fn changed(&mut self) {
        let Some(watcher) = &self.watcher else { return future::pending().await };
        if let Err(error) = watcher.changed().await {
            warn!("{error}; looking every 30 seconds");
            self.watcher = None;
        }
    }
}
