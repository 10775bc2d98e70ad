//! Gives addresses from MetalLB's `IPAddressPool`s to the Services of a cluster.
//!
//! Every agent with `--load-balancer-controller` stands for election by a Lease ([`lease`]). The one that leads watches
//! pools, and once there is one, Services and namespaces ([`leader`]); it writes what
//! [`lb_core::load_balancer::Controller`] decides. All others only read the Lease every few seconds.

mod kinds;
mod leader;
mod lease;

use ipnet::IpNet;
use lb_core::{lease::Timing, load_balancer::PoolUsage};
use tokio::{sync::watch, time::Instant};

#[cfg(test)]
pub(crate) use self::lease::lease_name;
use super::{
    client::{ApiServer, KubernetesError, own_namespace, watching_client},
    events::Events,
};

/// What the controller is to do.
#[derive(Clone, Debug)]
pub struct AddressOptions {
    /// The name of this node, for the Lease.
    pub node_name: String,
    /// The class of the Services that get addresses; `None` for those without a class.
    pub class: Option<String>,
    /// Networks of cluster IPs and pods from the configuration; no pool may overlap them.
    pub reserved: Vec<IpNet>,
    /// How long the Lease lasts.
    pub timing: Timing,
}

/// State of the controller: its leader, its conditions, and the use of its pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressReport {
    /// The node of the agent that holds the Lease.
    pub leader: Option<String>,
    /// Whether that is this agent.
    pub is_here: bool,
    /// What is wrong with pools and Services; empty where the agent does not lead.
    pub conditions: Vec<String>,
    /// How many addresses of each pool are in use; empty where the agent does not lead.
    pub pools: Vec<PoolUsage>,
}

/// When this agent leads, as far as it knows now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Term {
    begin: Instant,
    end: Instant,
}

/// Gives addresses whenever this agent leads, for ever. `service_cidrs` are the ranges of cluster IPs that the API server
/// names, which no pool may overlap.
///
/// # Errors
///
/// A configuration without a usable API server. A server that does not answer is retried forever.
pub async fn run(
    server: ApiServer,
    options: AddressOptions,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    events: Events,
    report: watch::Sender<AddressReport>,
) -> Result<(), KubernetesError> {
    let (client, config) = watching_client(server).await?;
    let namespace = own_namespace(&config).await;
    let (term_sender, term) = watch::channel(None);
    let election = lease::stand(client.clone(), &namespace, &options, term_sender, &report);
    let office = leader::serve(&client, &options, term, service_cidrs, &events, &report);
    tokio::try_join!(async { Ok(election.await) }, office).map(|_| ())
}

/// Changes the report; receivers wake up only if it differs.
fn update(report: &watch::Sender<AddressReport>, change: impl FnOnce(&mut AddressReport)) {
    report.send_if_modified(|known| {
        let mut now = known.clone();
        change(&mut now);
        let modified = *known != now;
        *known = now;
        modified
    });
}
