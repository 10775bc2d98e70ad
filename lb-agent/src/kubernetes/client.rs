//! The API server that the agent uses, and its credentials.

use std::path::PathBuf;

use kube::{
    Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// The API server to use, and the credentials for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServer {
    /// The current context of a kubeconfig file.
    Kubeconfig(PathBuf),
    /// The API server of the cluster that runs this Pod, with the Pod's service account.
    InCluster,
}

/// Why the agent cannot use the API server at all.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// The kubeconfig does not lead to an API server.
    #[error("cannot use the kubeconfig {}: {source}; check it with `kubectl --kubeconfig FILE get services`", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The error in the kubeconfig.
        source: Box<KubeconfigError>,
    },
    /// The process lacks the environment of a Pod in a cluster.
    #[error("cannot use the service account of this Pod: {0}; give the Pod one, or set --kubeconfig FILE")]
    InCluster(#[from] Box<InClusterError>),
    /// Certificates, keys or proxies are unusable.
    #[error(
        "cannot set up a client for the API server: {0}; check the certificates, keys and proxy in the kubeconfig"
    )]
    Client(#[from] Box<kube::Error>),
    /// A bug: a watch has ended, which never happens.
    #[error("a watch of the API server has ended; this is a bug, please report it")]
    Ended,
}

/// The address of the API server and the credentials for it; sends no request.
pub(super) async fn client_config(server: ApiServer) -> Result<Config, KubernetesError> {
    match server {
        ApiServer::InCluster => Config::incluster().map_err(|error| Box::new(error).into()),
        ApiServer::Kubeconfig(path) => {
            let unusable =
                |source| KubernetesError::Kubeconfig { path: path.clone(), source: Box::new(source) };
            let file = Kubeconfig::read_from(&path).map_err(unusable)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(unusable)
        }
    }
}
