//! The kubectl plugin `kubectl lb`: asks the agents of all nodes and merges their answers. It reaches them through the
//! API server's `exec`, with the user's own rights.
//!
//! ```text
//! cli        the command line
//! cluster    the kubeconfig, the nodes and the agents' Pods
//! exec       a command in one Pod
//! gather     a command on all nodes, with progress
//! status     a row for each node, worst first
//! explain    the path from a Pod to a Service
//! target     the arguments of `explain`, and the packet that they describe
//! service    what each node serves, differences first
//! monitor    events as they happen
//! top        traffic of Services, summed over the nodes
//! bugreport  the archives of all nodes
//! ```

mod bugreport;
mod cli;
mod cluster;
mod exec;
mod explain;
mod gather;
mod monitor;
mod service;
mod status;
mod target;
mod top;

pub use self::{
    cli::{
        BugreportArgs, Cli, ClusterArgs, Command, ExplainArgs, MonitorArgs, ServiceArgs, StatusArgs, TopArgs,
    },
    target::{PodTarget, ServiceTarget, TargetError},
};

/// Runs the command.
///
/// # Errors
/// The kubeconfig or the API server cannot be used, there are no agents, or a node has not answered. The answers of the
/// other nodes are printed, or written to the archive, before the error.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        match cli.command {
            Command::Status(args) => status::status(&cli.cluster, args).await,
            Command::Service(args) => service::service(&cli.cluster, args).await,
            Command::Monitor(args) => monitor::monitor(&cli.cluster, args).await,
            Command::Top(args) => top::top(&cli.cluster, args).await,
            Command::Bugreport(args) => bugreport::bugreport(&cli.cluster, args).await,
            Command::Explain(args) => explain::explain(&cli.cluster, &args).await,
        }
    });
    // A name lookup that still runs on another thread must not delay the end of the program.
    runtime.shutdown_background();
    done
}
