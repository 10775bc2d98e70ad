//! Which API server the agent talks to, and as whom.

use std::path::PathBuf;

use kube::{
    Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

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

/// Where the API server is and who we are to it; nothing is asked yet.
pub(super) async fn client_config(server: ApiServer) -> Result<Config, KubernetesError> {
    match server {
        ApiServer::InCluster => Config::incluster().map_err(|error| Box::new(error).into()),
        ApiServer::Kubeconfig(path) => {
            let refused =
                |source| KubernetesError::Kubeconfig { path: path.clone(), source: Box::new(source) };
            let file = Kubeconfig::read_from(&path).map_err(refused)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(refused)
        }
    }
}
