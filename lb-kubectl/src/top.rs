//! `top`: the traffic of each Service, summed over all nodes.

use std::{collections::BTreeMap, time::Duration};

use lb_output::{TableOrJson, print, print_json, render, table};
use serde::{Deserialize, Serialize};

use crate::{
    cli::{ClusterArgs, TopArgs},
    cluster::Cluster,
    gather::{self, Answer},
};

/// The fields of a row of `lb-agent top -o json` that this command sums.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    name: String,
    active_flows: u64,
    new_flows: f64,
    packets: f64,
    bytes: f64,
}

/// The traffic of a service port on all nodes, and its JSON. Scripts read the JSON: keys may be added, never renamed or
/// removed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Traffic {
    /// The service port, as `namespace/name:port/protocol`.
    name: String,
    active_flows: u64,
    /// New flows per second.
    new_flows: f64,
    /// Packets per second in both directions.
    packets: f64,
    /// Bytes per second in both directions, including IP headers.
    bytes: f64,
    /// The node with the most bytes per second.
    busiest_node: String,
    /// Bytes per second on that node.
    busiest_bytes: f64,
}

/// Runs `top`.
///
/// # Errors
/// The agents cannot be found ([`Cluster::find`]), or not all nodes have answered.
pub(crate) async fn top(cluster_args: &ClusterArgs, args: TopArgs) -> anyhow::Result<()> {
    let cluster = Cluster::find(cluster_args).await?;
    let interval = args.interval.to_string();
    let limit = cluster_args.limit() + Duration::from_secs(args.interval.into());
    let answers: Vec<Answer<Vec<Row>>> =
        gather::json(&cluster, &["top", "-o", "json", "--interval", &interval], limit).await;
    let complete =
        gather::all_answered(answers.iter().map(|Answer { node, result }| {
            (node.name.as_str(), result.as_ref().err().map(ToString::to_string))
        }));
    let all = summed(answers);
    match args.output {
        TableOrJson::Json => print_json(&all)?,
        TableOrJson::Table => print(&rows(&all))?,
    }
    complete
}

/// The traffic of each service port, the most bytes first.
fn summed(answers: Vec<Answer<Vec<Row>>>) -> Vec<Traffic> {
    let mut sums: BTreeMap<String, Traffic> = BTreeMap::new();
    for Answer { node, result } in answers {
        for row in result.into_iter().flatten() {
            let sum = sums.entry(row.name.clone()).or_insert_with(|| Traffic {
                name: row.name.clone(),
                busiest_node: node.name.clone(),
                ..Traffic::default()
            });
            sum.active_flows += row.active_flows;
            sum.new_flows += row.new_flows;
            sum.packets += row.packets;
            sum.bytes += row.bytes;
            if row.bytes > sum.busiest_bytes {
                (sum.busiest_bytes, sum.busiest_node) = (row.bytes, node.name.clone());
            }
        }
    }
    let mut sums: Vec<Traffic> = sums.into_values().collect();
    // The sort is stable: Services with the same traffic stay in the order of their names.
    sums.sort_by(|a, b| b.bytes.total_cmp(&a.bytes));
    sums
}

fn rows(all: &[Traffic]) -> String {
    let mut table = table(&["SERVICE", "NEW/S", "PACKETS/S", "BYTES/S", "ACTIVE", "BUSIEST NODE"]);
    for traffic in all {
        let share = 100.0 * traffic.busiest_bytes / traffic.bytes;
        let busiest = if traffic.bytes > 0.0 {
            format!("{} ({share:.0} %)", traffic.busiest_node)
        } else {
            lb_output::NOTHING.to_owned()
        };
        table.add_row([
            traffic.name.clone(),
            format!("{:.1}", traffic.new_flows),
            format!("{:.1}", traffic.packets),
            format!("{:.0}", traffic.bytes),
            traffic.active_flows.to_string(),
            busiest,
        ]);
    }
    render(&table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster::AgentNode, exec::NodeError};

    fn answer(node: &str, rows: &[(&str, f64)]) -> Answer<Vec<Row>> {
        let row = |(name, bytes): &(&str, f64)| Row {
            name: (*name).to_owned(),
            active_flows: 2,
            new_flows: 0.5,
            packets: 1.0,
            bytes: *bytes,
        };
        let node = AgentNode { name: node.to_owned(), kernel: None, pod: Ok(node.to_owned()) };
        Answer { node, result: Ok(rows.iter().map(row).collect()) }
    }

    #[test]
    fn traffic_is_summed_over_the_nodes_that_answer() {
        let silent = AgentNode { name: "n3".to_owned(), kernel: None, pod: Err(NodeError::NoPod) };
        let all = summed(vec![
            answer("n1", &[("shop/a:80/TCP", 10.0), ("shop/b:80/TCP", 300.0), ("shop/c:80/TCP", 0.0)]),
            answer("n2", &[("shop/a:80/TCP", 500.0)]),
            Answer { node: silent, result: Err(NodeError::NoPod) },
        ]);
        let expected = "\
SERVICE        NEW/S  PACKETS/S  BYTES/S  ACTIVE  BUSIEST NODE
shop/a:80/TCP  1.0    2.0        510      4       n2 (98 %)
shop/b:80/TCP  0.5    1.0        300      2       n1 (100 %)
shop/c:80/TCP  0.5    1.0        0        2       -
";
        assert_eq!(rows(&all), expected);
    }
}
