//! `status`: one row for each node, worst first.

use std::cmp::Reverse;

use jiff::Timestamp;
use lb_output::{NOTHING, TableOrJson, age, print, print_json, render, table};
use serde::{Deserialize, Serialize};

use crate::{
    cli::{ClusterArgs, StatusArgs},
    cluster::Cluster,
    gather::{self, Answer},
};

/// The fields of `lb-agent status -o json` that this command reads. Agents of other versions may lack some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    agent: Agent,
    conditions: Option<Vec<Condition>>,
    outcomes: Vec<OutcomeCount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Agent {
    version: Option<String>,
    last_sync: Option<Timestamp>,
}

/// A condition that the agent reports about its node. The agent lists the worst first.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Condition {
    /// `error`, `warning` or `note`.
    severity: String,
    topic: String,
    text: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OutcomeCount {
    verdict: String,
    packets: u64,
}

/// The row of a node, and its JSON. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    node: String,
    version: Option<String>,
    kernel: Option<String>,
    /// Time of the agent's last complete synchronisation; `None` if there was none, no agent runs, or the node has not
    /// answered.
    last_sync: Option<Timestamp>,
    /// All conditions of the node, worst first, including notes; `None` if the agent is too old to send a list, or the
    /// node has not answered.
    conditions: Option<Vec<Condition>>,
    /// Packets dropped since the map `STATS` was created; the map outlives the agent. 0 if the node has not answered.
    drops: u64,
    /// Why the node has not answered.
    error: Option<String>,
}

/// Runs `status`.
///
/// # Errors
/// The agents cannot be found ([`Cluster::find`]), or not all nodes have answered.
pub(crate) async fn status(cluster_args: &ClusterArgs, args: StatusArgs) -> anyhow::Result<()> {
    let cluster = Cluster::find(cluster_args).await?;
    let answers = gather::json(&cluster, &["status", "-o", "json"], cluster_args.limit()).await;
    let rows = sorted(answers.into_iter().map(row).collect());
    match args.output {
        TableOrJson::Json => print_json(&rows)?,
        TableOrJson::Table => print(&page(&rows, Timestamp::now()))?,
    }
    gather::all_answered(rows.iter().map(|row| (row.node.as_str(), row.error.clone())))
}

fn row(Answer { node, result }: Answer<Status>) -> Row {
    let (status, error) = match result {
        Ok(status) => (status, None),
        Err(error) => (Status::default(), Some(error.to_string())),
    };
    let drops = status.outcomes.iter().filter(|outcome| outcome.verdict == "drop");
    Row {
        node: node.name,
        version: status.agent.version,
        kernel: node.kernel,
        last_sync: status.agent.last_sync,
        drops: drops.map(|outcome| outcome.packets).sum(),
        conditions: status.conditions,
        error,
    }
}

impl Row {
    fn count(&self, severity: &str) -> usize {
        self.conditions.iter().flatten().filter(|condition| condition.severity == severity).count()
    }

    /// Number of errors and warnings, and the worst one; `0` if there are none, `no answer` if the node has not
    /// answered, [`NOTHING`] if the agent is too old to send conditions.
    fn problems(&self) -> String {
        if self.error.is_some() {
            return "no answer".to_owned();
        }
        let Some(conditions) = &self.conditions else { return NOTHING.to_owned() };
        let count = self.count("error") + self.count("warning");
        match conditions.first() {
            Some(Condition { topic, text, .. }) if count > 0 => format!("{count}: {topic}: {text}"),
            _ => "0".to_owned(),
        }
    }
}

/// Nodes that have not answered come first, then those with the most errors, warnings, dropped packets.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_by_cached_key(|row| {
        let badness = (row.error.is_some(), row.count("error"), row.count("warning"), row.drops);
        (Reverse(badness), row.node.clone())
    });
    rows
}

fn page(rows: &[Row], now: Timestamp) -> String {
    let mut table = table(&["NODE", "VERSION", "KERNEL", "SYNC", "DROPS", "PROBLEMS"]);
    for row in rows {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| NOTHING.to_owned());
        let (sync, drops) = match (&row.error, row.last_sync) {
            (Some(_), _) => (NOTHING.to_owned(), NOTHING.to_owned()),
            (None, last) => {
                (last.map_or_else(|| "never".to_owned(), |last| age(last, now)), row.drops.to_string())
            }
        };
        table.add_row([row.node.clone(), text(&row.version), text(&row.kernel), sync, drops, row.problems()]);
    }
    render(&table)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{cluster::AgentNode, exec::NodeError};

    fn answer(name: &str, status: Result<Value, NodeError>) -> Answer<Status> {
        let node =
            AgentNode { name: name.to_owned(), kernel: Some("6.1.0".to_owned()), pod: Ok(name.to_owned()) };
        Answer { node, result: status.map(|status| serde_json::from_value(status).expect("a status")) }
    }

    fn status(conditions: &[(&str, &str)], drops: u64) -> Result<Value, NodeError> {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(severity, topic)| json!({"severity": severity, "topic": topic, "text": "bad"}))
            .collect();
        let outcomes = json!([
            {"outcome": "forward", "verdict": "pass", "packets": 9},
            {"outcome": "no_backend", "verdict": "drop", "packets": drops},
        ]);
        let agent = json!({"version": "0.1.0", "lastSync": "2026-11-21T02:59:57Z"});
        Ok(json!({"agent": agent, "conditions": conditions, "outcomes": outcomes}))
    }

    #[test]
    fn rows_are_sorted_worst_first() {
        let answers = [
            answer("good", status(&[("note", "Degraded")], 0)),
            answer("lossy", status(&[], 7)),
            answer("warned", status(&[("warning", "Problem")], 0)),
            answer("ill", status(&[("error", "Sync"), ("warning", "Problem")], 0)),
            answer("lost", Err(NodeError::NoPod)),
            answer("old", Ok(json!({"agent": {"running": true}, "later": 1}))),
        ];
        let rows = sorted(answers.into_iter().map(row).collect());
        let expected = "\
NODE    VERSION  KERNEL  SYNC   DROPS  PROBLEMS
lost    -        6.1.0   -      -      no answer
ill     0.1.0    6.1.0   3s     0      2: Sync: bad
warned  0.1.0    6.1.0   3s     0      1: Problem: bad
lossy   0.1.0    6.1.0   3s     7      0
good    0.1.0    6.1.0   3s     0      0
old     -        6.1.0   never  0      -
";
        assert_eq!(page(&rows, "2026-11-21T03:00:00Z".parse().expect("a time")), expected);
    }
}
