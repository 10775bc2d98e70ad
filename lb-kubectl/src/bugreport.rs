//! `bugreport`: the archives of all nodes in one.

use std::{fmt::Write as _, fs::File, io, path::PathBuf};

use anyhow::Context as _;
use jiff::Timestamp;
use lb_output::{
    archive::{Archive, create, discard},
    print,
};

use crate::{
    cli::{BugreportArgs, ClusterArgs},
    cluster::Cluster,
    gather::{self, Answer},
};

/// Runs `bugreport`.
///
/// # Errors
/// The archive cannot be written, the agents cannot be found ([`Cluster::find`]), or not all nodes have answered. In
/// the last case, the archive has the reports of the nodes that have answered, and `nodes.txt` has the errors of the
/// other nodes.
pub(crate) async fn bugreport(cluster_args: &ClusterArgs, args: BugreportArgs) -> anyhow::Result<()> {
    let now = Timestamp::now();
    let name = format!("kubectl-lb-bugreport-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = args.output.unwrap_or_else(|| PathBuf::from(format!("{name}.tar")));
    let cluster = Cluster::find(cluster_args).await?;
    // The file is created first, so that an unwritable path fails before the collection.
    let file = create(&path)?;
    let answers =
        gather::bytes(&cluster, &["bugreport", "--output", "-"], cluster_args.limit_of_report()).await;
    let complete =
        gather::all_answered(answers.iter().map(|Answer { node, result }| {
            (node.name.as_str(), result.as_ref().err().map(ToString::to_string))
        }));
    if let Err(error) = write(file, &name, &answers, now) {
        discard(&path);
        return Err(error).with_context(|| format!("cannot write {}", path.display()));
    }
    let collected = answers.iter().filter(|answer| answer.result.is_ok()).count();
    print(&format!(
        "Wrote the reports of {collected} of {} nodes to {}. They name addresses, Services and Pods of this cluster, but \
         hold no credentials.\n",
        answers.len(),
        path.display()
    ))?;
    complete
}

/// Writes the list of nodes, and the archive of each node that has answered.
fn write(file: File, folder: &str, answers: &[Answer<Vec<u8>>], now: Timestamp) -> io::Result<()> {
    let mut archive = Archive::new(file, folder, now);
    archive.add("nodes.txt", nodes(answers, now).as_bytes())?;
    for Answer { node, result } in answers {
        if let Ok(bytes) = result {
            archive.add(&format!("{}.tar.gz", node.name), bytes)?;
        }
    }
    archive.finish()?.sync_all()
}

/// The plugin's version, the time, and a line for each node: its kernel, and `collected` or why it has not answered.
fn nodes(answers: &[Answer<Vec<u8>>], now: Timestamp) -> String {
    let mut text = format!("kubectl lb {}\ncollected: {now}\n", env!("CARGO_PKG_VERSION"));
    let mut answers: Vec<_> = answers.iter().collect();
    answers.sort_by(|a, b| a.node.name.cmp(&b.node.name));
    for Answer { node, result } in answers {
        let kernel = node.kernel.as_deref().unwrap_or("unknown");
        let answer = result.as_ref().map_or_else(ToString::to_string, |_| "collected".to_owned());
        // Writing to a String cannot fail.
        let _written = writeln!(text, "{}: kernel {kernel}: {answer}", node.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster::AgentNode, exec::NodeError};

    #[test]
    fn nodes_without_a_report_are_listed_with_the_reason() {
        let node = |name: &str| AgentNode { name: name.to_owned(), kernel: None, pod: Ok("p".to_owned()) };
        let answers = [
            Answer { node: node("n2"), result: Err(NodeError::NoPod) },
            Answer { node: AgentNode { kernel: Some("6.1".to_owned()), ..node("n1") }, result: Ok(vec![1]) },
        ];
        let text = nodes(&answers, Timestamp::UNIX_EPOCH);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines[0], "n1: kernel 6.1: collected");
        assert!(lines[1].starts_with("n2: kernel unknown: no agent's Pod runs on the node"), "{text}");
    }
}
