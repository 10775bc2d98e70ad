//! Runs a command on all nodes, on up to [`AT_ONCE`] at a time.

use std::{io::IsTerminal as _, time::Duration};

use anyhow::bail;
use futures_util::{StreamExt as _, stream};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::de::DeserializeOwned;

use crate::{
    cluster::{AgentNode, Cluster},
    exec::{self, NodeError},
};

/// Maximum number of nodes that are asked at the same time.
const AT_ONCE: usize = 16;

/// The answer of one node.
pub(crate) struct Answer<T> {
    /// The node that was asked.
    pub(crate) node: AgentNode,
    /// What the node has answered, or why it has not.
    pub(crate) result: Result<T, NodeError>,
}

/// Runs `lb-agent ARGUMENTS` on all nodes and decodes the JSON that it prints. Shows progress on a terminal.
pub(crate) async fn json<T: DeserializeOwned>(
    cluster: &Cluster,
    arguments: &[&str],
    limit: Duration,
) -> Vec<Answer<T>> {
    of_all(cluster, |node| ask(cluster, node, arguments, limit)).await
}

/// Runs `lb-agent ARGUMENTS` on all nodes and returns its output. Shows progress on a terminal.
pub(crate) async fn bytes(cluster: &Cluster, arguments: &[&str], limit: Duration) -> Vec<Answer<Vec<u8>>> {
    of_all(cluster, |node| async {
        let pod = node.pod.as_ref().map_err(Clone::clone)?;
        exec::run(&cluster.pods, pod, arguments, limit).await
    })
    .await
}

async fn of_all<'a, T, F>(cluster: &'a Cluster, ask: impl Fn(&'a AgentNode) -> F) -> Vec<Answer<T>>
where
    F: Future<Output = Result<T, NodeError>>,
{
    let bar = progress(cluster.nodes.len());
    let asked = cluster.nodes.iter().map(|node| async {
        let result = ask(node).await;
        bar.inc(1);
        Answer { node: node.clone(), result }
    });
    let answers = stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    bar.finish_and_clear();
    answers
}

/// Runs `lb-agent ARGUMENTS` on one node and decodes the JSON that it prints.
///
/// # Errors
/// The node has no agent to ask, the command fails, or its output is not the JSON of a `T`.
pub(crate) async fn ask<T: DeserializeOwned>(
    cluster: &Cluster,
    node: &AgentNode,
    arguments: &[&str],
    limit: Duration,
) -> Result<T, NodeError> {
    let pod = node.pod.as_ref().map_err(Clone::clone)?;
    let output = exec::run(&cluster.pods, pod, arguments, limit).await?;
    serde_json::from_slice(&output)
        .map_err(|error| NodeError::Unreadable { pod: pod.clone(), message: error.to_string() })
}

/// Checks that all nodes have answered. An item of `nodes` is the name of a node and, if it has not answered, the
/// error.
///
/// # Errors
/// Some nodes have not answered: the error has a line for each of them.
pub(crate) fn all_answered<'a>(
    nodes: impl IntoIterator<Item = (&'a str, Option<String>)>,
) -> anyhow::Result<()> {
    let (mut count, mut lines) = (0, Vec::new());
    for (node, error) in nodes {
        count += 1;
        lines.extend(error.map(|error| format!("  {node}: {error}")));
    }
    if !lines.is_empty() {
        bail!("{} of {count} nodes have not answered\n{}", lines.len(), lines.join("\n"));
    }
    Ok(())
}

/// A bar that shows how many of the nodes have answered or failed.
fn progress(nodes: usize) -> ProgressBar {
    on_terminal(Some(nodes as u64), "{pos} of {len} nodes have answered or failed ({elapsed})")
}

/// A bar whose message is what the command waits for.
pub(crate) fn waiting() -> ProgressBar {
    on_terminal(None, "{msg} ({elapsed})")
}

/// A bar on standard error; hidden unless standard error is a terminal. Dropping the bar removes it.
fn on_terminal(length: Option<u64>, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    bar.enable_steady_tick(Duration::from_millis(200));
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_have_not_answered_are_named() {
        assert!(all_answered([("a", None), ("b", None)]).is_ok());
        let error = all_answered([("a", None), ("b", Some("no Pod".to_owned()))]).expect_err("b is silent");
        assert_eq!(error.to_string(), "1 of 2 nodes have not answered\n  b: no Pod");
    }
}
