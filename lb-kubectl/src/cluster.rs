//! The cluster: a client with the user's rights, the nodes, and the agents' Pods.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::time;

use crate::{cli::ClusterArgs, exec::NodeError};

/// Maximum number of objects on a page of a list.
const PAGE: u32 = 500;

/// The agents of a cluster.
pub(crate) struct Cluster {
    /// A client with the user's rights.
    pub(crate) client: Client,
    /// The Pods of the agents' namespace.
    pub(crate) pods: Api<Pod>,
    /// The nodes with an agent's Pod and, if the plugin could list the Nodes, all other Linux nodes.
    pub(crate) nodes: Vec<AgentNode>,
}

/// A node and its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AgentNode {
    /// Name of the node.
    pub(crate) name: String,
    /// Release of the node's kernel; `None` if the plugin could not list the Nodes, or the list lacks this node.
    pub(crate) kernel: Option<String>,
    /// Name of the agent's Pod, or why no agent's Pod runs on the node.
    pub(crate) pod: Result<String, NodeError>,
}

impl Cluster {
    /// Finds the agents.
    ///
    /// # Errors
    /// The kubeconfig is unusable, the API server does not answer or refuses to list Pods, or no Pod matches
    /// `--selector`.
    pub(crate) async fn find(args: &ClusterArgs) -> anyhow::Result<Self> {
        let client = client(args).await?;
        let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
        let agents = within(args.limit(), all(&pods, &args.selector)).await;
        let agents = agents.map_err(|error| cannot_list(&error, args))?;
        if agents.is_empty() {
            bail!(
                "no Pod in namespace {} has the labels {}; name those of the agent's DaemonSet with --namespace and --selector",
                args.namespace,
                args.selector
            );
        }
        let nodes: Api<Node> = Api::all(client.clone());
        let linux = within(args.limit(), all(&nodes, "kubernetes.io/os=linux")).await;
        let nodes = linux.unwrap_or_else(|error| {
            eprintln!(
                "cannot list the Nodes: {error}; kernels, and nodes without an agent, are missing here"
            );
            Vec::new()
        });
        Ok(Self { client, pods, nodes: agents_by_node(&agents, &nodes) })
    }
}

/// Waits for the API server's answer to `request`.
///
/// # Errors
/// The request fails, or the API server has not answered within `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    request: impl Future<Output = kube::Result<T>>,
) -> anyhow::Result<T> {
    let answer = time::timeout(limit, request).await;
    let late = |_| anyhow!("the API server has not answered within {} s (--timeout)", limit.as_secs());
    Ok(answer.map_err(late)??)
}

async fn client(args: &ClusterArgs) -> anyhow::Result<Client> {
    let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
    let read = match &args.kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::from_env().and_then(|file| file.map_or_else(Kubeconfig::read, Ok)),
    };
    let hint =
        "cannot use the kubeconfig; check it with `kubectl config view`, or name another with --kubeconfig";
    let mut config = Config::from_custom_kubeconfig(read.context(hint)?, &options).await.context(hint)?;
    config.connect_timeout = Some(args.limit());
    Client::try_from(config)
        .context("cannot set up a client for the API server; check the credentials in the kubeconfig")
}

/// All objects with these labels, page by page.
async fn all<K>(api: &Api<K>, selector: &str) -> kube::Result<Vec<K>>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut parameters = ListParams::default().labels(selector).limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

fn cannot_list(error: &anyhow::Error, args: &ClusterArgs) -> anyhow::Error {
    let namespace = &args.namespace;
    if let Some(kube::Error::Api(status)) = error.downcast_ref()
        && status.is_forbidden()
    {
        let message = &status.message;
        return anyhow!(
            "you may not list Pods in namespace {namespace}: {message}; ask for a Role with the verb list on pods, and the verbs create and get on pods/exec"
        );
    }
    anyhow!(
        "cannot list Pods in namespace {namespace}: {error}; check it with `kubectl -n {namespace} get pods`"
    )
}

/// One entry for each node with an agent's Pod, and for each of `nodes` without one. If a node has several agent Pods,
/// such as during an update, a running Pod takes precedence.
fn agents_by_node(pods: &[Pod], nodes: &[Node]) -> Vec<AgentNode> {
    let mut found: BTreeMap<String, Result<String, NodeError>> = BTreeMap::new();
    found.extend(nodes.iter().map(|node| (node.name_any(), Err(NodeError::NoPod))));
    for pod in pods {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        let known = found.entry(node).or_insert(Err(NodeError::NoPod));
        if known.is_err() {
            *known = askable(pod);
        }
    }
    let kernel = |name: &str| {
        let node = nodes.iter().find(|node| node.metadata.name.as_deref() == Some(name))?;
        Some(node.status.as_ref()?.node_info.as_ref()?.kernel_version.clone())
    };
    found.into_iter().map(|(name, pod)| AgentNode { kernel: kernel(&name), name, pod }).collect()
}

fn askable(pod: &Pod) -> Result<String, NodeError> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Unknown");
    match phase {
        "Running" => Ok(pod.name_any()),
        phase => Err(NodeError::NotRunning { pod: pod.name_any(), phase: phase.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(name: &str, node: Option<&str>, phase: &str) -> Pod {
        let object: Value = json!({
            "metadata": {"name": name}, "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase},
        });
        from_value(object).expect("a Pod")
    }

    fn node(name: &str) -> Node {
        let info = json!({
            "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "6.1.0", "kubeProxyVersion": "",
            "kubeletVersion": "", "machineID": "", "operatingSystem": "linux", "osImage": "", "systemUUID": "",
        });
        from_value(json!({"metadata": {"name": name}, "status": {"nodeInfo": info}})).expect("a Node")
    }

    #[test]
    fn running_pod_of_a_node_is_asked_and_other_nodes_say_why_not() {
        let pods = [
            pod("old", Some("a"), "Failed"),
            pod("new", Some("a"), "Running"),
            pod("waits", Some("b"), "Pending"),
            pod("homeless", None, "Pending"),
            pod("far", Some("d"), "Running"),
        ];
        let found = agents_by_node(&pods, &[node("a"), node("b"), node("c")]);
        let names: Vec<_> = found.iter().map(|node| (node.name.as_str(), node.kernel.is_some())).collect();
        assert_eq!(names, [("a", true), ("b", true), ("c", true), ("d", false)]);
        assert_eq!(found[0].pod, Ok("new".to_owned()));
        let waits = NodeError::NotRunning { pod: "waits".to_owned(), phase: "Pending".to_owned() };
        assert_eq!(found[1].pod, Err(waits));
        assert_eq!(found[2].pod, Err(NodeError::NoPod));
        assert_eq!(found[3].pod, Ok("far".to_owned()));
    }
}
