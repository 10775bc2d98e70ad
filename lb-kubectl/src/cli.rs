//! The grammar of the command line.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};
use lb_output::TableOrJson;

use crate::target::{IpFamily, PodTarget, ServiceTarget};

/// The load balancers of all nodes of a cluster, through the API server.
///
/// Runs `lb-agent` in the agents' Pods, with your own rights: in their namespace you need the verb list on pods, and
/// create and get on pods/exec. Exit codes: 0 success, 1 a failure, or a node that has not answered, 2 bad usage.
#[derive(Debug, Parser)]
#[command(name = "kubectl lb", bin_name = "kubectl lb", version, max_term_width = 110)]
pub struct Cli {
    /// Settings of every command.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// How to reach the API server, and which Pods are agents.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// File with the API server and credentials [default: $KUBECONFIG, else ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current context]
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of the agents' Pods
    #[arg(long, short, global = true, value_name = "NAME", default_value = "kube-system")]
    pub namespace: String,
    /// Labels of the agents' Pods
    #[arg(
        long,
        short = 'l',
        global = true,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=lb-agent,app.kubernetes.io/component=service-proxy"
    )]
    pub selector: String,
    /// How many seconds a node may take to answer [default: 15; for `bugreport` 60]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: Option<u32>,
}

impl ClusterArgs {
    /// How long a node, or the API server, may take to answer.
    pub(crate) fn limit(&self) -> Duration {
        self.limit_or(15)
    }

    /// How long a node may take to collect its report: without `--timeout` longer than [`Self::limit`], because users
    /// often report a bug while a node is busy.
    pub(crate) fn limit_of_report(&self) -> Duration {
        self.limit_or(60)
    }

    fn limit_or(&self, seconds: u32) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(seconds).into())
    }
}

/// The commands of `kubectl lb`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show version, kernel, age of the last change, problems and dropped packets of every node, worst first
    Status(StatusArgs),
    /// Show the Services of all nodes, those that not all nodes serve alike first
    Service(ServiceArgs),
    /// Show new connections and dropped packets of all nodes as they happen
    Monitor(MonitorArgs),
    /// Show the traffic of each Service, summed over all nodes, the busiest first
    Top(TopArgs),
    /// Collect the bug reports of all nodes in one archive
    Bugreport(BugreportArgs),
    /// Show the way of a packet from a Pod to a Service, on the Pod's node, on the backend's node, and back
    Explain(ExplainArgs),
}

/// Arguments of `status`.
#[derive(Clone, Copy, Debug, Args)]
pub struct StatusArgs {
    /// Format of the output
    #[arg(long, short, default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `service`.
#[derive(Clone, Debug, Args)]
pub struct ServiceArgs {
    /// Only this Service, with its frontends and backends on each node
    #[arg(value_name = "NAMESPACE/NAME", value_parser = namespaced)]
    pub service: Option<String>,
    /// Format of the output
    #[arg(long, short, default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `monitor`. An event is shown if it meets every condition.
#[derive(Clone, Debug, Args)]
pub struct MonitorArgs {
    /// Only events of this Service or virtual address: [NAMESPACE/]NAME[:PORT] or ADDR[:PORT]
    #[arg(long, value_name = "NAME|ADDR")]
    pub service: Option<String>,
    /// Only events of this client, or of clients in this network
    #[arg(long, value_name = "ADDR|CIDR")]
    pub client: Option<String>,
    /// Only events with this verdict, as in `lb-agent monitor`
    #[arg(long, value_name = "VERDICT")]
    pub verdict: Option<String>,
    /// Format of the output: one line for each event, as text or as a JSON object
    #[arg(long, short, default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `top`.
#[derive(Clone, Copy, Debug, Args)]
pub struct TopArgs {
    /// Seconds over which each node counts
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub interval: u32,
    /// Format of the output
    #[arg(long, short, default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `bugreport`.
#[derive(Clone, Debug, Args)]
pub struct BugreportArgs {
    /// Archive to write; it must not exist yet [default: kubectl-lb-bugreport-TIME.tar in the current directory]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Checks that a name has a namespace.
fn namespaced(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(text.to_owned())
        }
        _ => Err("write NAMESPACE/NAME, such as default/web".to_owned()),
    }
}

/// Arguments of `explain`.
#[derive(Clone, Debug, Args)]
pub struct ExplainArgs {
    /// The client
    #[arg(value_name = "pod/NAMESPACE/NAME")]
    pub pod: PodTarget,
    /// The Service, and the name or number of its port. The port may be left out if there is only one
    #[arg(value_name = "svc/NAMESPACE/NAME[:PORT]")]
    pub service: ServiceTarget,
    /// Source port of an open connection of the Pod. Without it the packet begins a new connection
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub client_port: Option<u16>,
    /// The address family of the packet [default: that of the Service's first cluster IP in a family of the Pod]
    #[arg(long, value_name = "FAMILY", value_enum, ignore_case = true)]
    pub ip_family: Option<IpFamily>,
    /// Format of the output
    #[arg(long, short, default_value = "table")]
    pub output: TableOrJson,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn clap_accepts_the_grammar() {
        Cli::command().debug_assert();
    }

    #[test]
    fn settings_of_the_cluster_stand_before_or_after_the_command() {
        for typed in [["kubectl-lb", "--context", "b", "status"], ["kubectl-lb", "status", "--context", "b"]]
        {
            let cli = Cli::try_parse_from(typed).expect("a valid command line");
            assert_eq!(cli.cluster.context.as_deref(), Some("b"));
            assert_eq!((cli.cluster.namespace.as_str(), cli.cluster.limit().as_secs()), ("kube-system", 15));
        }
    }
}
