//! The source of a cluster: an API server that is watched for Services and EndpointSlices.
//!
//! A watch of each kind (list, then follow) gives events; [`objects::Objects`] turns them into changes and keeps of
//! every object no more than its name and version. An API server that is away costs nothing but news: the last state
//! stays. `docs/kubernetes.md` says what happens under each fault.

pub mod events;
mod kind;
mod node;
mod objects;
mod pace;
mod run;
mod trouble;
mod watch;

use std::path::PathBuf;

use ipnet::IpNet;
use kube::config::{InClusterError, KubeconfigError};
use tokio::sync::watch::Sender;

pub use self::{events::Events, node::NodeInfo, run::run};

/// What the source tells beside the events for the writer. Each channel has the newest state.
#[derive(Debug)]
pub struct Published {
    /// The Node object of this node.
    pub node: Sender<NodeInfo>,
    /// The ranges of cluster IPs: those of all ServiceCIDR objects, sorted. Where the API server has no such API, what
    /// the channel was made with stays.
    pub service_cidrs: Sender<Vec<IpNet>>,
    /// All that is wrong now.
    pub problems: Sender<Vec<String>>,
}

/// Which API server, and who we are to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServer {
    /// The current context of a kubeconfig file.
    Kubeconfig(PathBuf),
    /// The one of the cluster whose Pod this is, with the Pod's service account.
    InCluster,
}

/// Why the source cannot work at all.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// The kubeconfig does not lead to an API server.
    #[error("the kubeconfig {} is refused: {source}; check it with `kubectl --kubeconfig FILE get services`", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<KubeconfigError>,
    },
    /// The process is not set up as one of a Pod.
    #[error("cannot use the service account of this Pod: {0}; give one to the Pod, or --kubeconfig FILE")]
    InCluster(#[from] Box<InClusterError>),
    /// Certificates, keys or proxies that cannot be used.
    #[error(
        "cannot set up a client of the API server: {0}; check certificates, keys and proxy of the kubeconfig"
    )]
    Client(#[from] Box<kube::Error>),
    /// A bug: a watch goes on for ever.
    #[error("a watch of the API server has ended; this is a bug, please report it")]
    Ended,
}
