//! `monitor`: the events of all nodes, in the order in which they arrive.

use std::io::{self, Write as _};

use anyhow::bail;
use futures_util::future::join_all;
use lb_output::TableOrJson;
use serde_json::{Map, Value};

use crate::{
    cli::{ClusterArgs, MonitorArgs},
    cluster::{AgentNode, Cluster},
    exec,
};

/// Runs `monitor` until the user ends it.
///
/// # Errors
/// The agents cannot be found ([`Cluster::find`]), or the events of every node have ended.
pub(crate) async fn monitor(cluster_args: &ClusterArgs, args: MonitorArgs) -> anyhow::Result<()> {
    let cluster = Cluster::find(cluster_args).await?;
    let width = cluster.nodes.iter().map(|node| node.name.len()).max().unwrap_or(0);
    let arguments = arguments(&args);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    join_all(cluster.nodes.iter().map(|node| follow(&cluster, node, &arguments, args.output, width))).await;
    bail!("no node sends events any more")
}

/// Prints the events of one node until they end, then the reason on standard error. The other nodes go on.
async fn follow(cluster: &Cluster, node: &AgentNode, arguments: &[&str], output: TableOrJson, width: usize) {
    let show = |line: &str| match output {
        TableOrJson::Table => print_line(&format!("{:width$}  {line}", node.name)),
        TableOrJson::Json => print_line(&with_node(line, &node.name)),
    };
    let warn = |line: &str| print_warning(&format!("{}: {line}", node.name));
    let ended = match &node.pod {
        Ok(pod) => exec::follow(&cluster.pods, pod, arguments, show, warn).await,
        Err(error) => Err(error.clone()),
    };
    let why = ended.err().map_or_else(|| "its monitor has ended".to_owned(), |error| error.to_string());
    print_warning(&format!("{}: no more events: {why}", node.name));
}

/// Prints a line to standard error. If that is closed, the command goes on.
fn print_warning(line: &str) {
    let _printed = writeln!(io::stderr(), "{line}");
}

/// Prints a line at once. If standard output is closed, the command ends with success.
fn print_line(line: &str) {
    let mut stdout = io::stdout().lock();
    if writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}

/// The event with the name of the node as its first field; a line that is no JSON object becomes the field `text`.
fn with_node(line: &str, node: &str) -> String {
    let mut event = Map::from_iter([("node".to_owned(), Value::from(node))]);
    match serde_json::from_str(line) {
        Ok(Value::Object(fields)) => event.extend(fields),
        Ok(_) | Err(_) => {
            event.insert("text".to_owned(), Value::from(line));
        }
    }
    Value::Object(event).to_string()
}

/// The arguments of the `lb-agent` command that runs on each node.
fn arguments(args: &MonitorArgs) -> Vec<String> {
    let format = match args.output {
        TableOrJson::Table => "table",
        TableOrJson::Json => "json",
    };
    let mut words = vec!["monitor".to_owned(), "-o".to_owned(), format.to_owned()];
    for (flag, value) in
        [("--service", &args.service), ("--client", &args.client), ("--verdict", &args.verdict)]
    {
        if let Some(value) = value {
            words.extend([flag.to_owned(), value.clone()]);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_name_their_node() {
        let event = with_node(r#"{"outcome":"new_flow"}"#, "n1");
        let event: Value = serde_json::from_str(&event).expect("JSON");
        assert_eq!(event, serde_json::json!({"node": "n1", "outcome": "new_flow"}));
        assert_eq!(with_node("2 events were lost", "n1"), r#"{"node":"n1","text":"2 events were lost"}"#);
    }

    #[test]
    fn filters_go_to_the_nodes() {
        let args = MonitorArgs {
            service: Some("shop/web".to_owned()),
            client: None,
            verdict: Some("dropped".to_owned()),
            output: TableOrJson::Json,
        };
        let expected = ["monitor", "-o", "json", "--service", "shop/web", "--verdict", "dropped"];
        assert_eq!(arguments(&args), expected);
    }
}
