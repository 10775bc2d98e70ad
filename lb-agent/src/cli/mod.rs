//! The grammar of the command line: commands, flags and the types of their values. [`crate::config`] checks and
//! completes the arguments of `run`.

mod commands;
mod settings;
mod values;

use std::{ffi::OsString, path::PathBuf};

use clap::{Parser, Subcommand};

pub(crate) use self::values::without_localhost;
pub use self::{
    commands::{
        AnnounceCommand, BugreportArgs, CheckArgs, CleanupArgs, ConntrackCommand, EnvironmentArgs,
        EnvironmentFormat, ExecArgs, ExplainArgs, FlowFilter, FlowsArgs, MonitorArgs, ProfileArgs, ReadyArgs,
        ServiceCommand, ServiceOutput, StatusArgs, TableOrJson, TopArgs, TopFlows, WebArgs,
    },
    settings::{
        AnnouncePrefer, BpfLog, DetectLocalMode, DsrEncapsulation, FileSettings, FlowLogServices, Forwarding,
        KernelArgs, List, LogFormat, RunArgs, SETTINGS, ServiceMetrics, Setting, SocketLb, Xdp,
    },
    values::{Client, Destination, EventVerdict, ServiceFilter, split_name},
};

/// Kubernetes Services in the kernel: an eBPF load balancer for a node, with or without Kubernetes.
///
/// Exit codes: 0 success, 1 runtime failure, 2 bad usage or configuration; `exec` ends with that of its program.
#[derive(Debug, Parser)]
#[command(name = "lb-agent", version, max_term_width = 110)]
pub struct Cli {
    /// Settings that every command accepts: paths of the BPF file system and of the cgroup.
    #[command(flatten)]
    pub kernel: KernelArgs,
    /// The command to run, with its arguments.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of `lb-agent`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: write Services into the kernel and keep them up to date
    ///
    /// Services come from a directory (--manifests) or from an API server (--kubeconfig). In a Pod the default is the
    /// API server of the cluster. SIGTERM stops the agent; its programs and maps stay in the kernel and keep serving.
    Run(Box<RunArgs>),
    /// Show what is wrong and what to do, then the agent, attached programs, map fill and packet counters
    Status(StatusArgs),
    /// Exit with 0 if the agent is ready, else print why not and exit with 1; for probes
    ///
    /// Ready means: all Services are in the kernel, no change waits for longer than a minute, and the agent itself
    /// listens on --healthz-bind-address. Asks the agent at its socket, because another process may answer on its port.
    Ready(ReadyArgs),
    /// Show the addresses that nodes announce, at layer 2 and by BGP
    #[command(subcommand)]
    Announce(AnnounceCommand),
    /// Show the Services that the kernel holds
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Run a program with the environment variables of Services, such as WEB_SERVICE_HOST
    ///
    /// The program replaces this command. A variable that is already set keeps its value. The agent must be running.
    /// Like a container, the program keeps the values that it got when it started.
    Exec(ExecArgs),
    /// List or delete tracked connections
    #[command(subcommand)]
    Conntrack(ConntrackCommand),
    /// Show what the data plane would do with a packet, step by step, and why
    Explain(ExplainArgs),
    /// Measure how often each BPF program runs, and for how long
    Profile(ProfileArgs),
    /// Write an archive for a bug report: state of the data plane, network, kernel; no credentials
    Bugreport(BugreportArgs),
    /// Print new flows with their backends, and dropped or rejected packets, as they happen
    ///
    /// Ends on SIGINT or SIGTERM. Events cost time, so the BPF programs emit them only while something reads them: this
    /// command, or the page Live in a browser. Only one of them can read at a time.
    Monitor(MonitorArgs),
    /// Read a flow log: the last connections, or the clients, Services or backends with the most traffic
    Flows(FlowsArgs),
    /// Show the rates of new flows, packets and bytes of each Service, and its active flows
    ///
    /// Keys: Enter shows the backends of a Service, Esc goes back; s, n, p, b, a sort by a column, / filters, q quits
    Top(TopArgs),
    /// Show the data plane in a browser: rates, Services, connections, events, the way of a packet
    ///
    /// Only reads. Needs no running agent, which can also serve the pages itself (--web-bind-address of run). On
    /// loopback every process of the node may look, at any other address those who have the token.
    Web(WebArgs),
    /// Check whether this kernel and machine can run the agent, and list what is missing
    Check(CheckArgs),
    /// Remove every program, map and pin of any version of the agent, or (--kube-proxy) rules of kube-proxy
    Cleanup(CleanupArgs),
    /// Ask the agents of all nodes of a cluster, as `kubectl lb` does
    ///
    /// The same as this binary under the name `kubectl-lb`: see `lb-agent kubectl help`.
    #[command(disable_help_flag = true)]
    Kubectl {
        /// Command and flags of `kubectl lb`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<OsString>,
    },
    /// Print a completion script for a shell
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages, one for each command, for packages
    #[command(hide = true)]
    ManPages {
        /// An existing folder
        folder: PathBuf,
    },
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
    fn lists_accept_repeated_flags_and_commas() {
        let typed = ["lb-agent", "run", "--wire-device", "eth0,bond*", "--wire-device", "wg0", "eth1"];
        let cli = Cli::try_parse_from(typed).unwrap();
        let Command::Run(run) = cli.command else { panic!("parsed as {:?}", cli.command) };
        assert_eq!(run.wire_device.unwrap(), ["eth0", "bond*", "wg0", "eth1"]);
    }

    #[test]
    fn settings_of_every_command_stand_before_or_after_the_command() {
        for typed in [["lb-agent", "--bpffs", "/b", "cleanup"], ["lb-agent", "cleanup", "--bpffs", "/b"]] {
            assert_eq!(Cli::try_parse_from(typed).unwrap().kernel.bpffs.unwrap().to_str(), Some("/b"));
        }
    }
}
