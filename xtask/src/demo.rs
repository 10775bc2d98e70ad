//! `cargo xtask demo`: real traffic through the load balancer, in network namespaces of this machine.

mod announce;
mod kept;
mod report;
mod scenario;
mod standalone;

use std::io::IsTerminal as _;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use lb_tests::cleanup;
use lb_tests::cluster::{ClientLink, Cluster};

use self::kept::{FOLDER, PREFIX};
use self::report::{Report, say};
use crate::user::is_root;

/// Arguments of the demo.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    demo: Option<Other>,
    /// Print the results to standard output as JSON
    #[arg(long)]
    json: bool,
    /// Keep the cluster running, and print commands to explore it
    #[arg(long)]
    keep: bool,
    /// Only remove the cluster of an earlier `--keep`
    #[arg(long, conflicts_with_all = ["json", "keep"])]
    remove: bool,
    /// Run the pods' servers; `--keep` starts this process and leaves it behind
    #[arg(long, hide = true, conflicts_with_all = ["json", "keep", "remove"])]
    serve: bool,
}

/// Demos other than the default one.
#[derive(clap::Subcommand)]
enum Other {
    /// Kill one of three nodes that announce addresses at layer 2 and by BGP, under downloads
    Announce(announce::Args),
    /// Serve two containers of one machine without Kubernetes: a name, a health check, and the PROXY protocol
    Standalone(standalone::Args),
}

impl Args {
    /// Whether the demo starts the agent: `--remove` and `--serve` do not.
    pub(crate) fn needs_agent(&self) -> bool {
        !self.remove && !self.serve
    }
}

/// Runs the demo; fails if one of its checks fails.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    ensure!(is_root()?, "the demo makes network namespaces and loads BPF programs: run it as root");
    match args.demo {
        Some(Other::Announce(args)) => return announce::run(&args),
        Some(Other::Standalone(args)) => return standalone::run(&args),
        None => {}
    }
    if args.remove {
        return kept::remove();
    }
    if args.serve {
        return kept::serve();
    }
    if is_up(PREFIX, FOLDER) {
        bail!("a demo is running, or one was killed earlier: remove it with `cargo xtask demo --remove`");
    }
    cleanup::on_interrupt();
    say("creating namespaces for a client, two nodes and four pods");
    let mut cluster = Cluster::create(PREFIX, Path::new(FOLDER), ClientLink::Ethernet)
        .context("creating the namespaces")?;
    scenario::write_manifests(&cluster)?;
    say("starting lb-agent on node1");
    let agent = cluster.start_agent(1)?;
    let (report, agent) = scenario::play(&cluster, agent)?;
    show(&report, args.json)?;
    if args.keep {
        kept::keep(&mut cluster)?;
        // Dropping cluster and agent would remove the cluster.
        std::mem::forget((cluster, agent));
    } else {
        say("removing everything");
        drop((agent, cluster));
    }
    report.verdict()
}

/// Whether a demo with these names is running, or has left something behind.
fn is_up(prefix: &str, folder: &str) -> bool {
    Path::new("/run/netns").join(format!("{prefix}-client")).exists() || Path::new(folder).exists()
}

/// For demos without `--keep`: fails if this demo is running, or was killed and has left something behind.
fn ensure_not_up(prefix: &str, folder: &str) -> anyhow::Result<()> {
    ensure!(
        !is_up(prefix, folder),
        "this demo is running, or one was killed: its namespaces {prefix}-* or {folder} are still there"
    );
    Ok(())
}

fn show(report: &Report, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        println!("\n{}", report.text(colours));
    }
    Ok(())
}
