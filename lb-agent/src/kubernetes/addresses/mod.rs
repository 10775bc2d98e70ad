//! Assigns addresses from MetalLB's `IPAddressPool`s to the Services of a cluster.
//!
//! Every agent with `--load-balancer-controller` takes part in an election through a Lease ([`lease`]). The elected
//! agent watches pools and, once there is one, Services, namespaces and Nodes ([`leader`]); it writes what
//! [`lb_core::load_balancer::Controller`] decides. All other agents only read the Lease at intervals.

mod kinds;
mod leader;
mod lease;
mod retry;

use ipnet::IpNet;
use lb_core::{lease::Timing, load_balancer::PoolUsage};
use tokio::{sync::watch, time::Instant};

#[cfg(test)]
pub(crate) use self::lease::lease_name;
use super::{
    client::{ApiServer, KubernetesError, own_namespace, watching_client},
    events::Events,
};

/// Settings of the load balancer controller.
#[derive(Clone, Debug)]
pub struct AddressOptions {
    /// Name of this node. The Lease names its holder by an identity that begins with the node's name.
    pub node_name: String,
    /// The `loadBalancerClass` of the Services that get addresses; `None` for Services without a class.
    pub class: Option<String>,
    /// Whether Services lose addresses that the pools do not give them any more.
    pub reassign: bool,
    /// Networks of cluster IPs and pods from the configuration; no pool may overlap them.
    pub reserved: Vec<IpNet>,
    /// Time limits and intervals of the election.
    pub timing: Timing,
}

/// State of the controller: its leader, its conditions, and the use of its pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressReport {
    /// Name of the node whose agent holds the Lease; `None` if no agent does.
    pub leader: Option<String>,
    /// Whether this agent acts as the leader: it holds the Lease, and its term has begun.
    pub is_here: bool,
    /// Conditions of pools, Services and the API server; empty unless `is_here`.
    pub conditions: Vec<String>,
    /// How many addresses of each pool are in use; empty unless `is_here`.
    pub pools: Vec<PoolUsage>,
}

/// The period in which this agent leads. Each renewal of the Lease extends this period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Term {
    begin: Instant,
    end: Instant,
}

/// Takes part in the election, and assigns addresses while this agent leads. Runs forever. `service_cidrs` are the
/// ranges of cluster IPs that the API server names; no pool may overlap them. When `stop` becomes true, this agent
/// releases the Lease, then drops `stop`.
///
/// # Errors
///
/// The configuration has no usable API server. A server that does not answer is retried forever.
pub async fn run(
    server: ApiServer,
    options: AddressOptions,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    events: Events,
    report: watch::Sender<AddressReport>,
    stop: watch::Receiver<bool>,
) -> Result<(), KubernetesError> {
    let (client, config) = watching_client(server).await?;
    let namespace = own_namespace(&config).await;
    let (term_sender, term) = watch::channel(None);
    let election = lease::stand(client.clone(), &namespace, &options, term_sender, &report, stop);
    let office = leader::serve(&client, &options, term, service_cidrs, &events, &report);
    tokio::try_join!(async { Ok(election.await) }, office).map(|_| ())
}

/// Applies `change` to the report; wakes receivers only if the report differs afterwards.
fn update(report: &watch::Sender<AddressReport>, change: impl FnOnce(&mut AddressReport)) {
    report.send_if_modified(|known| {
        let mut now = known.clone();
        change(&mut now);
        let modified = *known != now;
        *known = now;
        modified
    });
}
