//! Finds the API server that the agent uses, and its credentials.

use std::{path::PathBuf, time::Duration};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use tower::layer::layer_fn;

use super::pace::Paced;

/// After this time without data from the API server, the agent drops the connection. kube-apiserver sends a bookmark
/// about every minute.
pub(super) const SILENCE: Duration = Duration::from_secs(150);
/// Time limit of an attempt to connect to the API server.
pub(super) const CONNECT: Duration = Duration::from_secs(10);

/// File with the namespace of the Pod in which the agent runs.
const NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Where the address of the API server, and the credentials for it, come from.
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
    /// The kubeconfig cannot be read, or names no usable API server.
    #[error("cannot use the kubeconfig {}: {source}; check it with `kubectl --kubeconfig FILE get services`", path.display())]
    Kubeconfig {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// What is wrong with the kubeconfig.
        source: Box<KubeconfigError>,
    },
    /// The process does not have the environment variables and files of a Pod in a cluster.
    #[error("cannot use the service account of this Pod: {0}; give the Pod one, or set --kubeconfig FILE")]
    InCluster(#[from] Box<InClusterError>),
    /// The client cannot be set up: certificates, keys or proxies are unusable.
    #[error(
        "cannot set up a client for the API server: {0}; check the certificates, keys and proxy in the kubeconfig"
    )]
    Client(#[from] Box<kube::Error>),
    /// A watch has ended, although it should retry forever: a bug.
    #[error("a watch of the API server has ended; this is a bug, please report it")]
    Ended,
}

/// Determines the API server's address and the credentials. Sends no request.
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

/// Creates a client for watches; also returns its configuration. Sends no request.
pub(super) async fn watching_client(server: ApiServer) -> Result<(Client, Config), KubernetesError> {
    let mut config = client_config(server).await?;
    (config.connect_timeout, config.read_timeout) = (Some(CONNECT), Some(SILENCE));
    config.reset_reader_on_write = true;
    let builder = ClientBuilder::try_from(config.clone()).map_err(Box::new)?;
    Ok((builder.with_layer(&layer_fn(Paced::new)).build(), config))
}

/// The namespace for the agent's own objects: the namespace of the agent's Pod, even if the agent uses a kubeconfig;
/// outside of a Pod, the default namespace of the kubeconfig.
pub(super) async fn own_namespace(config: &Config) -> String {
    let of_pod = tokio::fs::read_to_string(NAMESPACE).await.map(|text| text.trim().to_owned());
    of_pod.ok().filter(|namespace| !namespace.is_empty()).unwrap_or_else(|| config.default_namespace.clone())
}
