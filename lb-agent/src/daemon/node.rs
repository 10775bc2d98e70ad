//! Keeping the data plane and the plan in step with what is known of this node: its addresses, its Node object, the
//! cluster's ranges of addresses.

use std::{
    collections::BTreeSet, convert::Infallible, future, net::IpAddr, ops::RangeInclusive, sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use ipnet::IpNet;
use lb_common::{Address, Networks, Settings, settings_flags};
use lb_core::{
    family::{Families, Family},
    model::{NodeAddresses, SourceEvent},
    north_south::NorthSouthMode,
};
use tokio::{
    sync::{mpsc, watch},
    task, time,
};
use tracing::{info, warn};

use super::state::{NodeReport, State};
use crate::{
    kubernetes::NodeInfo,
    node::{Addresses, DetectLocal, Known, NodePortAddresses, networks, overlaps},
};
use lb_datapath::{DatapathError, Network, PortReservation, SettingsMap, forwards};

/// How often what the kernel does not announce is looked at, such as whether it forwards packets.
const ROUTINE: Duration = Duration::from_secs(30);
/// How soon after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// What was decided when the agent started.
#[derive(Clone, Debug)]
pub(super) struct NodeOptions {
    /// Name of its Node object.
    pub(super) name: Arc<str>,
    /// The address by which others know the node, if it was given.
    pub(super) node_ip: Option<IpAddr>,
    /// Which addresses serve node ports.
    pub(super) node_ports: NodePortAddresses,
    /// Who is inside the cluster.
    pub(super) detect: DetectLocal,
    /// Ranges of cluster IPs; `None` for those that the API server names.
    pub(super) service_ranges: Option<Vec<IpNet>>,
    /// Whether what is sent to an address of these ranges that no Service has is dropped.
    pub(super) drops_unknown_vips: bool,
    /// Source ports of masqueraded packets.
    pub(super) ports: RangeInclusive<u16>,
    /// Who may send packets through a tunnel to backends here.
    pub(super) peers: Vec<IpNet>,
    /// How packets get to backends elsewhere.
    pub(super) north_south: NorthSouthMode,
    /// Whether tunnels there take UDP.
    pub(super) gue: bool,
    /// Whether an API server knows this node.
    pub(super) has_api_server: bool,
}

/// What changes while it runs. A channel whose sender is gone has said everything.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) network: watch::Receiver<Network>,
    /// The Node object.
    pub(super) info: watch::Receiver<NodeInfo>,
    /// What the API server says of ranges of cluster IPs; empty as long as it has not said anything.
    pub(super) service_cidrs: watch::Receiver<Vec<IpNet>>,
    /// Whether everything was in the kernel once.
    pub(super) synchronised: watch::Receiver<bool>,
}

/// What the writer should know of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    addresses: NodeAddresses,
    /// In which families clients inside the cluster can be told from others.
    detects_inside: Families,
}

impl Facts {
    /// How the writer is told. It does nothing about what is as it was.
    pub(super) fn events(&self) -> [SourceEvent; 2] {
        [SourceEvent::NodeAddresses(self.addresses.clone()), SourceEvent::DetectsInside(self.detects_inside)]
    }

    fn log_news(&self, earlier: &Self) {
        let Self { addresses, detects_inside } = self;
        if *addresses != earlier.addresses {
            info!(count = addresses.own.len(), "the node has other addresses");
        }
        if *detects_inside != earlier.detects_inside {
            let Families { v4, v6 } = detects_inside;
            info!(
                ipv4 = v4,
                ipv6 = v6,
                "pods can be told from clients outside of the cluster in other families"
            );
        }
    }
}

/// Where this is written to.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) settings: SettingsMap,
    pub(super) reservation: PortReservation,
}

/// State of the task.
#[derive(Debug)]
pub(super) struct Node {
    options: NodeOptions,
    sources: Sources,
    kernel: Kernel,
    /// Where the health of Services is served: as node ports are.
    listen: watch::Sender<BTreeSet<IpAddr>>,
    state: Arc<State>,
    /// Problems that were logged, so that each is said once.
    said: BTreeSet<String>,
}

impl Node {
    pub(super) fn new(
        options: NodeOptions,
        sources: Sources,
        kernel: Kernel,
        listen: watch::Sender<BTreeSet<IpAddr>>,
        state: Arc<State>,
    ) -> Self {
        Self { options, sources, kernel, listen, state, said: BTreeSet::new() }
    }

    /// Brings the settings up to date; what the writer should know.
    pub(super) fn update(&mut self) -> Result<Facts, DatapathError> {
        let earlier = self.kernel.settings.get()?;
        let network = self.sources.network.borrow_and_update().clone();
        let info = self.sources.info.borrow_and_update().clone();
        let service_cidrs = self.sources.service_cidrs.borrow_and_update().clone();
        let synchronised = *self.sources.synchronised.borrow_and_update();

        let named = preferred(&info, self.options.has_api_server, &earlier);
        let preferred: Vec<IpAddr> = self.options.node_ip.into_iter().chain(named).collect();
        let addresses = Addresses::new(&network, &self.options.node_ports, &preferred);
        self.listen.send_if_modified(|listen| {
            let earlier = std::mem::replace(listen, self.options.node_ports.listen(&addresses.node));
            earlier != *listen
        });
        let named = |networks: Vec<IpNet>| (!networks.is_empty()).then_some(networks);
        let known = Known {
            inside: self.options.detect.networks(info.pod_cidrs.as_deref().unwrap_or_default()),
            service_ranges: self.options.service_ranges.clone().or_else(|| named(service_cidrs)),
            drops_unknown_vips: synchronised.then_some(self.options.drops_unknown_vips),
            primary: addresses.primary,
            ports: self.options.ports.clone(),
            peers: self.options.peers.clone(),
            gue: self.options.gue,
        };
        let (settings, mut problems) = known.settings(&earlier);
        problems.extend(self.reserve_ports());
        let in_use = families_in_use(&addresses.node.own, &networks(&settings.service_ranges));
        problems.extend(not_forwarding(in_use));
        problems.extend(overlaps(&network, &addresses.primary, &networks(&settings.service_ranges)));
        let NodeOptions { name, detect, .. } = &self.options;
        let detects_inside = detect.families(&networks(&settings.internal));
        problems.extend(detect.problems(name, info.pod_cidrs.as_deref(), in_use, detects_inside));
        self.kernel.settings.set(&settings)?;
        self.tell(problems);
        self.report(&network, &addresses, &settings);
        Ok(Facts { addresses: addresses.node, detects_inside })
    }

    /// Runs for ever, after a first [`Self::update`] that the writer has heard of.
    pub(super) async fn run(
        mut self,
        mut sent: Facts,
        events: mpsc::Sender<SourceEvent>,
    ) -> anyhow::Result<Infallible> {
        let mut pause = ROUTINE;
        loop {
            let Sources { network, info, service_cidrs, synchronised } = &mut self.sources;
            tokio::select! {
                () = changed(network) => {}
                () = changed(info) => {}
                () = changed(service_cidrs) => {}
                () = changed(synchronised) => {}
                () = time::sleep(pause) => {}
            }
            match task::block_in_place(|| self.update()) {
                Ok(facts) if facts != sent => {
                    facts.log_news(&sent);
                    for event in facts.events() {
                        events.send(event).await.context("the writer does not listen")?;
                    }
                    sent = facts;
                    pause = ROUTINE;
                }
                Ok(_) => pause = ROUTINE,
                Err(error) => {
                    warn!("{error}; trying again");
                    pause = RETRY;
                }
            }
        }
    }

    /// What is wrong if sockets of the node may get our ports.
    fn reserve_ports(&self) -> Option<String> {
        let ports = &self.options.ports;
        let error = self.kernel.reservation.keep(ports).err()?;
        Some(format!(
            "sockets of the node may get source ports of masqueraded packets, and break connections: {error}; have \
             {first}-{last} in net.ipv4.ip_local_reserved_ports, or give --masquerade-ports outside of \
             net.ipv4.ip_local_port_range",
            first = ports.start(),
            last = ports.end(),
        ))
    }

    fn tell(&mut self, problems: Vec<String>) {
        for problem in &problems {
            if !self.said.contains(problem) {
                warn!("{problem}");
            }
        }
        self.said = problems.iter().cloned().collect();
        self.state.set_node_problems(problems);
    }

    fn report(&self, network: &Network, addresses: &Addresses, settings: &Settings) {
        let NodeOptions { detect, ports, north_south, gue, .. } = &self.options;
        let inside = detect.devices(network);
        let devices = inside.into_iter().filter_map(|index| network.link(index));
        let Addresses { node, primary } = addresses;
        self.state.set_node(NodeReport {
            addresses: node.own.clone(),
            node_port_addresses: node.node_ports.clone(),
            primary: primary.iter().collect(),
            detect_local: detect.as_str().to_owned(),
            inside_networks: texts(&settings.internal),
            inside_devices: devices.map(|link| link.name.clone()).collect(),
            service_ranges: texts(&settings.service_ranges),
            drops_unknown_vips: settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0,
            north_south_mode: north_south.to_string(),
            dsr_encapsulation: if *gue { "gue" } else { "ipip" }.to_owned(),
            dsr_peers: texts(&settings.peers),
            masquerade_first_port: *ports.start(),
            masquerade_last_port: *ports.end(),
        });
    }
}

/// The families that the node has and Services may have.
fn families_in_use(own: &[IpAddr], service_ranges: &[IpNet]) -> Families {
    let of_node: Families = own.iter().copied().map(Family::of).collect();
    let of_services: Families = service_ranges.iter().map(|net| Family::of(net.addr())).collect();
    if service_ranges.is_empty() { of_node } else { of_node.intersection(of_services) }
}

fn not_forwarding(in_use: Families) -> Vec<String> {
    let mut problems = Vec::new();
    let sysctls = [(Family::V4, "net.ipv4.ip_forward"), (Family::V6, "net.ipv6.conf.all.forwarding")];
    for (family, sysctl) in sysctls {
        let ipv4 = family == Family::V4;
        if in_use.contains(family) && forwards(ipv4).is_ok_and(|forwards| !forwards) {
            problems.push(format!(
                "{sysctl} is 0: the kernel does not route packets to pods and other nodes; set it to 1, or let the CNI \
                 plugin do it"
            ));
        }
    }
    problems
}

fn texts(list: &Networks) -> Vec<String> {
    networks(list).iter().map(ToString::to_string).collect()
}

/// What the primary addresses shall be. An agent that starts while the API server is away takes those of the agent
/// before it.
fn preferred(info: &NodeInfo, has_api_server: bool, earlier: &Settings) -> Vec<IpAddr> {
    if info.internal_ips.is_empty() && has_api_server {
        let sources: [Address; 2] = [earlier.source_v4, earlier.source_v6];
        return sources.into_iter().map(IpAddr::from).collect();
    }
    info.internal_ips.clone()
}

/// Waits for news; for ever where there will not be any.
async fn changed<T>(source: &mut watch::Receiver<T>) {
    if source.changed().await.is_err() {
        future::pending::<()>().await;
    }
}
