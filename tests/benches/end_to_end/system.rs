//! The load balancers that are compared, and their setup in a node.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lb_tests::{
    agent::{self, Agent, Settings},
    cleanup::{Cleanup, Resource},
    kube_proxy::{iptables, nftables},
    wait_for,
};
use serde::Serialize;

use crate::{
    node::{self, Node},
    way::Way,
    workload::Workload,
};

/// How long to wait until XDP runs in the requested mode.
const PATIENCE: Duration = Duration::from_secs(5);

/// A load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum System {
    /// None: the client connects to an endpoint directly
    Nothing,
    /// kube-proxy's rules in mode iptables
    Iptables,
    /// kube-proxy's rules in mode nftables
    Nftables,
    /// This project at tc; at the socket for processes of the node
    Tc,
    /// This project at tc with `--forwarding direct`
    Direct,
    /// This project at XDP, for external clients
    Xdp,
}

impl System {
    /// All load balancers.
    pub(crate) const ALL: [Self; 5] = [Self::Iptables, Self::Nftables, Self::Tc, Self::Direct, Self::Xdp];

    /// Whether the load balancer is measured on this path. On a path for which this returns `false`, the load balancer
    /// would do the same as [`Self::Tc`].
    pub(crate) fn serves(self, way: Way) -> bool {
        match self {
            Self::Xdp => way == Way::Outside,
            Self::Direct => way != Way::Node,
            Self::Nothing | Self::Iptables | Self::Nftables | Self::Tc => true,
        }
    }

    /// Name of the load balancer in tables and plots.
    pub(crate) const fn name(self, way: Way) -> &'static str {
        match self {
            Self::Nothing => way.baseline(),
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
            Self::Tc if matches!(way, Way::Node) => "lb-agent, socket",
            Self::Tc => "lb-agent, tc",
            Self::Direct => "lb-agent, tc direct",
            Self::Xdp => "lb-agent, XDP",
        }
    }

    /// Whether the load balancer is this project's.
    pub(crate) const fn is_ours(self) -> bool {
        matches!(self, Self::Tc | Self::Direct | Self::Xdp)
    }
}

/// The kernel subsystem that `iptables-restore` writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// The subsystem `ip_tables` (iptables-legacy).
    Legacy,
    /// The subsystem `nf_tables` (iptables-nft).
    Nft,
}

/// Options for the setup of load balancers.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The subsystem that [`System::Iptables`] uses.
    pub(crate) iptables: Backend,
    /// Mode of XDP that the agent must use for [`System::Xdp`]; `None` if this agent does not know the flag `--xdp`.
    pub(crate) xdp: Option<String>,
    /// The agent's `--cluster-cidr`; `None` uses the network of all pods.
    pub(crate) cluster_cidr: Option<&'static str>,
    /// Further arguments for the agent.
    pub(crate) arguments: Vec<String>,
}

/// Guards that keep a load balancer running until they are dropped.
pub(crate) struct Running {
    agent: Option<RunningAgent>,
}

struct RunningAgent {
    bpffs: PathBuf,
    _agent: Agent,
    _cleanup: Cleanup,
}

impl Running {
    /// The guards of a node without an agent.
    pub(crate) const fn none() -> Self {
        Self { agent: None }
    }

    /// The BPF file system of the agent; `None` if no agent runs.
    pub(crate) fn bpffs(&self) -> Option<&Path> {
        self.agent.as_ref().map(|agent| agent.bpffs.as_path())
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_value(self, f)
    }
}

/// Displays an argument's value in the spelling of the command line.
pub(crate) fn show_value(value: &impl clap::ValueEnum, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(value.to_possible_value().as_ref().map_or("", |value| value.get_name()))
}

impl Setup {
    pub(crate) fn start(&self, system: System, node: &Node, workload: &Workload) -> Result<Running> {
        match system {
            System::Nothing => {}
            System::Iptables => {
                let program = workload.family.pick("iptables", "ip6tables");
                let backend = match self.iptables {
                    Backend::Legacy => "legacy",
                    Backend::Nft => "nft",
                };
                let program = format!("{program}-{backend}-restore");
                node.node.feed(&program, &[], &iptables::rules(&workload.cluster()))?;
            }
            System::Nftables => {
                node.node.feed("nft", &["-f", "-"], &nftables::rules(&workload.cluster()))?;
            }
            System::Tc | System::Direct | System::Xdp => {
                return Ok(Running { agent: Some(self.start_agent(system, node, workload)?) });
            }
        }
        Ok(Running::none())
    }

    fn start_agent(&self, system: System, node: &Node, workload: &Workload) -> Result<RunningAgent> {
        let folder = std::env::temp_dir().join(node.node.name());
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        let manifests = folder.join("manifests");
        fs::create_dir_all(&manifests).with_context(|| format!("creating {}", manifests.display()))?;
        fs::write(manifests.join("services.yaml"), workload.manifests())?;
        let settings = self.agent_settings(system, node, workload, &folder, manifests);
        let agent = Agent::start(&node.node, settings)?;
        if system == System::Xdp {
            self.check_xdp(&agent)?;
        }
        Ok(RunningAgent { bpffs: folder.join("bpffs"), _agent: agent, _cleanup: cleanup })
    }

    /// Waits until XDP runs on the wires in the requested mode: a healthy agent may still be attaching it.
    fn check_xdp(&self, agent: &Agent) -> Result<()> {
        let mut found = Err(anyhow!("the agent has not said anything"));
        let served = wait_for(PATIENCE, || {
            found = modes(agent);
            let modes = found.as_ref().ok()?;
            modes.iter().all(|mode| *mode == self.xdp).then_some(())
        });
        ensure!(served.is_some(), "XDP is not in mode {:?}: {:?}", self.xdp, found?);
        Ok(())
    }

    fn agent_settings(
        &self,
        system: System,
        node: &Node,
        workload: &Workload,
        folder: &Path,
        manifests: PathBuf,
    ) -> Settings {
        let mut arguments: Vec<String> = Vec::new();
        let devices = [("--wire-device", node::WIRES), ("--workload-device", node::PODS)];
        for (flag, names) in devices {
            arguments.extend(names.iter().flat_map(|name| [flag.to_owned(), (*name).to_owned()]));
        }
        let cluster_cidr = self.cluster_cidr.unwrap_or_else(|| workload.family.cluster_cidr());
        arguments.extend(["--cluster-cidr", cluster_cidr].map(str::to_owned));
        arguments.extend(self.arguments.iter().cloned());
        if system == System::Direct {
            arguments.extend(["--forwarding", "direct"].map(str::to_owned));
        }
        if let Some(mode) = &self.xdp {
            let mode = if system == System::Xdp { mode } else { "off" };
            arguments.extend(["--xdp", mode].map(str::to_owned));
        }
        Settings {
            node_name: "node".to_owned(),
            manifests,
            bpffs: folder.join("bpffs"),
            cgroup: Some(node.cgroup.path().to_owned()),
            log: folder.join("agent.log"),
            arguments,
            binary: None,
        }
    }
}

/// The mode in which XDP runs on each of the wires; `None` without XDP.
fn modes(agent: &Agent) -> Result<[Option<String>; 2]> {
    let status = agent.ask(&["status", "-o", "json"])?;
    let status: serde_json::Value =
        serde_json::from_slice(&status.stdout).context("reading `lb-agent status`")?;
    Ok(node::WIRES.map(|name| {
        let mut devices = status["agent"]["devices"].as_array().into_iter().flatten();
        let device = devices.find(|device| device["name"] == name)?;
        device["xdp"].as_str().map(str::to_owned)
    }))
}

pub(crate) fn agent_knows(flag: &str) -> Result<bool> {
    let binary = agent::binary();
    let output = agent::run(Command::new(&binary).args(["run", "--help"]))?;
    Ok(String::from_utf8_lossy(&output.stdout).split_whitespace().any(|word| word == flag))
}
