//! Updates the settings of the data plane when addresses of the node, its Node object or the address ranges of the
//! cluster change, and sends the writer the facts that the writer needs to plan.

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
use tracing::info;

use super::{ipsec::Ipsec, report::NodeReport, state::State};
use crate::{
    kubernetes::NodeInfo,
    log_few::warn_new,
    node::{Addresses, DetectLocal, NodePortAddresses, SettingsInputs, networks, overlaps},
};
use lb_datapath::{
    CatchDevice, DatapathError, Link, Network, PeerAddresses, PortReservation, SettingsMap,
    UnreachableRoutes, forwards,
};

/// Interval between two checks of facts that cause no event, such as whether the kernel forwards packets.
const ROUTINE: Duration = Duration::from_secs(30);
/// Pause before the next attempt after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// The parts of the configuration that the node task uses.
#[derive(Clone, Debug)]
pub(super) struct NodeOptions {
    /// Name of the node's Node object.
    pub(super) name: Arc<str>,
    /// This node's address as `--bind-address` gives it; `None` for an unspecified address (`0.0.0.0` or `::`).
    pub(super) node_ip: Option<IpAddr>,
    /// The value of `--nodeport-addresses`.
    pub(super) nodeport_addresses: NodePortAddresses,
    /// How the agent recognises internal clients.
    pub(super) detect: DetectLocal,
    /// Ranges of cluster IPs; `None` to use those that the API server names.
    pub(super) service_ranges: Option<Vec<IpNet>>,
    /// Whether packets to unassigned addresses in the ranges of cluster IPs are dropped.
    pub(super) drops_unknown_vips: bool,
    /// Range of source ports for masqueraded packets.
    pub(super) ports: RangeInclusive<u16>,
    /// Networks (`--dsr-peers`) of machines, other than the nodes, that may send tunnelled packets to backends on this
    /// node.
    pub(super) peers: Vec<IpNet>,
    /// Networks (`--deny-source`) whose external clients may use no Service.
    pub(super) denied_sources: Vec<IpNet>,
    /// How packets of external clients reach backends on other nodes by default.
    pub(super) north_south: NorthSouthMode,
    /// Whether tunnels are GUE instead of IP in IP.
    pub(super) gue: bool,
    /// Whether Services come from an API server.
    pub(super) has_api_server: bool,
}

/// Inputs of the node task that change. If a channel's sender is dropped, its last value stays.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) network: watch::Receiver<Network>,
    /// The data in the Node object of this node.
    pub(super) info: watch::Receiver<NodeInfo>,
    /// Ranges of cluster IPs that the API server names; empty until it has named them.
    pub(super) service_cidrs: watch::Receiver<Vec<IpNet>>,
    /// Whether at least one synchronisation has completed: the Services are in the kernel.
    pub(super) synchronised: watch::Receiver<bool>,
    /// Addresses of other nodes that may send tunnelled packets, in addition to `--dsr-peers`; `None` until the API
    /// server has named them.
    pub(super) peers: watch::Receiver<Option<BTreeSet<IpAddr>>>,
    /// The interface index of the catch device while its programs are attached, else `None`.
    pub(super) catch: watch::Receiver<Option<u32>>,
    /// The families with backends at addresses that this node does not have.
    pub(super) routed: watch::Receiver<Families>,
}

/// The facts about the node that the writer needs to plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    addresses: NodeAddresses,
    /// Address families in which the node can distinguish internal clients from external ones.
    detects_inside: Families,
}

impl Facts {
    /// The facts as the two events that the writer receives.
    pub(super) fn events(&self) -> [SourceEvent; 2] {
        [SourceEvent::NodeAddresses(self.addresses.clone()), SourceEvent::DetectsInside(self.detects_inside)]
    }

    fn log_changes(&self, earlier: &Self) {
        let Self { addresses, detects_inside } = self;
        if *addresses != earlier.addresses {
            info!(count = addresses.own.len(), "the addresses of the node have changed");
        }
        if *detects_inside != earlier.detects_inside {
            let Families { v4, v6 } = detects_inside;
            info!(ipv4 = v4, ipv6 = v6, "the families in which internal clients are recognised have changed");
        }
    }
}

/// The state of the kernel that the node task writes.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) settings: SettingsMap,
    pub(super) peers: PeerAddresses,
    pub(super) reservation: PortReservation,
    pub(super) unreachable: UnreachableRoutes,
    pub(super) ipsec: Ipsec,
    pub(super) catch: CatchDevice,
}

/// The task that keeps the settings of the data plane (map `SETTINGS`) up to date.
#[derive(Debug)]
pub(super) struct Node {
    options: NodeOptions,
    sources: Sources,
    kernel: Kernel,
    /// Publishes the addresses at which `healthCheckNodePort` servers listen: those that serve node ports.
    listen: watch::Sender<BTreeSet<IpAddr>>,
    /// Publishes the node's addresses when they change. Also publishes them unchanged if an address was removed and
    /// added again in between, because receivers must check for lost addresses.
    addresses: watch::Sender<NodeAddresses>,
    /// [`Network::removals`] at the last update: if the number has changed, the next update publishes `addresses` in
    /// any case.
    removals: u64,
    state: Arc<State>,
    /// Conditions of the last update; the next update logs only conditions that are not among them.
    logged: Vec<String>,
}

impl Node {
    pub(super) fn new(
        options: NodeOptions,
        sources: Sources,
        kernel: Kernel,
        (listen, addresses): (watch::Sender<BTreeSet<IpAddr>>, watch::Sender<NodeAddresses>),
        state: Arc<State>,
    ) -> Self {
        Self { options, sources, kernel, listen, addresses, removals: 0, state, logged: Vec::new() }
    }

    /// Updates the settings and the rest of [`Kernel`], and publishes addresses, conditions and the report for
    /// `status`. Returns the facts that the writer needs.
    pub(super) fn update(&mut self) -> Result<Facts, DatapathError> {
        let earlier = self.kernel.settings.get()?;
        let network = self.sources.network.borrow_and_update().clone();
        let info = self.sources.info.borrow_and_update().clone();
        let service_cidrs = self.sources.service_cidrs.borrow_and_update().clone();
        let synchronised = *self.sources.synchronised.borrow_and_update();
        let catch = *self.sources.catch.borrow_and_update();
        let peers = self.sources.peers.borrow_and_update().clone();
        let routed = *self.sources.routed.borrow_and_update();

        let named = preferred(&info, self.options.has_api_server, &earlier);
        let preferred: Vec<IpAddr> = self.options.node_ip.into_iter().chain(named).collect();
        let addresses = Addresses::new(&network, &self.options.nodeport_addresses, &preferred);
        self.listen.send_if_modified(|listen| {
            let earlier = std::mem::replace(listen, self.options.nodeport_addresses.listen(&addresses.node));
            earlier != *listen
        });
        let (unencrypted, ipsec) = self.kernel.ipsec.denied();
        let named = |networks: Vec<IpNet>| (!networks.is_empty()).then_some(networks);
        let known = SettingsInputs {
            inside: self.options.detect.networks(info.pod_cidrs.as_deref().unwrap_or_default()),
            service_ranges: self.options.service_ranges.clone().or_else(|| named(service_cidrs)),
            drops_unknown_vips: synchronised.then_some(self.options.drops_unknown_vips),
            primary: addresses.primary,
            ports: self.options.ports.clone(),
            peers: self.options.peers.clone(),
            denied_sources: [&self.options.denied_sources[..], &unencrypted].concat(),
            gue: self.options.gue,
            routes_by_destination: network.routes_by_destination,
        };
        let (settings, mut conditions) = known.settings(&earlier);
        conditions.extend(ipsec);
        conditions.extend(self.reserve_ports());
        conditions.extend(self.catch_untranslated(&settings, catch));
        let in_use = families_in_use(&addresses.node.own, &networks(&settings.service_ranges));
        conditions.extend(not_forwarding(in_use.intersection(routed)));
        conditions.extend(network.links.iter().filter_map(Link::unserved));
        conditions.extend(overlaps(&network, &addresses.primary, &networks(&settings.service_ranges)));
        let NodeOptions { name, detect, .. } = &self.options;
        let detects_inside = detect.families(&networks(&settings.internal));
        conditions.extend(detect.problems(name, info.pod_cidrs.as_deref(), in_use, detects_inside));
        self.kernel.settings.set(&settings)?;
        conditions.extend(self.admit_tunnels_of(peers.as_ref()));
        self.kernel.ipsec.end_connections(&networks(&settings.internal))?;
        // Connection tracking deletes the flows that are masqueraded with an address that the node has lost. This task
        // sends it the addresses only after the kernel has the settings, because with older settings the programs may
        // still give new flows a lost address.
        let removed = std::mem::replace(&mut self.removals, network.removals) != network.removals;
        self.addresses.send_if_modified(|known| {
            let changed = removed || *known != addresses.node;
            known.clone_from(&addresses.node);
            changed
        });
        self.set_conditions(conditions);
        let peers = peers.iter().flatten().map(ToString::to_string).collect();
        self.report(&network, &addresses, &settings, peers);
        Ok(Facts { addresses: addresses.node, detects_inside })
    }

    /// Runs the task; the caller has called [`Self::update`] once and sent its facts to the writer.
    pub(super) async fn run(
        mut self,
        mut sent: Facts,
        events: mpsc::Sender<SourceEvent>,
    ) -> anyhow::Result<Infallible> {
        let mut pause = ROUTINE;
        let mut failures = Vec::new();
        loop {
            let Sources { network, info, service_cidrs, synchronised, peers, catch, routed } =
                &mut self.sources;
            tokio::select! {
                () = changed(network) => {}
                () = changed(info) => {}
                () = changed(service_cidrs) => {}
                () = changed(synchronised) => {}
                () = changed(catch) => {}
                () = changed(routed) => {}
                () = changed(peers) => {}
                () = self.kernel.ipsec.changed() => {}
                () = time::sleep(pause) => {}
            }
            let result = task::block_in_place(|| self.update());
            let failure = result.as_ref().err().map(|error| format!("{error}; retrying"));
            warn_new(&mut failures, failure.as_slice());
            match result {
                Ok(facts) if facts != sent => {
                    facts.log_changes(&sent);
                    for event in facts.events() {
                        events.send(event).await.context("the writer has ended")?;
                    }
                    sent = facts;
                    pause = ROUTINE;
                }
                Ok(_) => pause = ROUTINE,
                Err(_logged) => pause = RETRY,
            }
        }
    }

    /// Reserves the source ports of masqueraded packets in the kernel; returns a condition if sockets may still get
    /// them.
    fn reserve_ports(&self) -> Option<String> {
        let ports = &self.options.ports;
        let error = self.kernel.reservation.keep(ports).err()?;
        Some(format!(
            "sockets of the node may get source ports of masqueraded packets, which breaks connections: {error}; add \
             {first}-{last} to net.ipv4.ip_local_reserved_ports, or move --masquerade-ports out of \
             net.ipv4.ip_local_port_range",
            first = ports.start(),
            last = ports.end(),
        ))
    }

    /// Writes the nodes whose tunnelled packets the programs admit. (The networks of `--dsr-peers`, which the programs
    /// also admit, are in the settings.) While `peers` is `None`, the nodes that an earlier agent admitted stay
    /// admitted. Returns a condition if the map cannot be written.
    fn admit_tunnels_of(&mut self, peers: Option<&BTreeSet<IpAddr>>) -> Option<String> {
        let peers = peers?.iter().copied().map(Address::from).collect();
        let error = self.kernel.peers.set(&peers).err()?;
        Some(format!(
            "tunnelled packets of some other nodes are dropped: {error}; name their network with --dsr-peers"
        ))
    }

    /// Handles packets to cluster IPs that no program has translated. If the settings let the agent drop packets to
    /// unassigned cluster IPs, adds the catch device, routes that send the untranslated packets to it, and unreachable
    /// routes that apply while the device is missing. If not, removes the device and all these routes. `served` is the
    /// index of the device if its programs are attached, else `None`. With `None`, the routes to the device stay as
    /// they are. Returns a condition for each part that fails.
    fn catch_untranslated(&mut self, settings: &Settings, served: Option<u32>) -> Vec<String> {
        let drops = settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0;
        let ranges = if drops { networks(&settings.service_ranges) } else { Vec::new() };
        let ranges: Vec<_> = ranges.iter().map(|net| (net.network(), net.prefix_len())).collect();
        let leak = self.kernel.unreachable.keep(&ranges).err().map(|error| {
            format!(
                "packets of a pod that starts while no agent runs may leave the node untranslated: {error}"
            )
        });
        let unserved = self.kernel.catch.keep(&ranges, served).err().map(|error| {
            format!("a pod that starts while no agent runs will reach no Service until one runs: {error}")
        });
        leak.into_iter().chain(unserved).collect()
    }

    /// Replaces the conditions of the node in the agent's state, and logs new ones.
    fn set_conditions(&mut self, conditions: Vec<String>) {
        warn_new(&mut self.logged, &conditions);
        self.state.set_node_conditions(conditions);
    }

    fn report(&self, network: &Network, addresses: &Addresses, settings: &Settings, peers: Vec<String>) {
        let NodeOptions { detect, ports, north_south, gue, .. } = &self.options;
        let inside = detect.devices(network);
        let devices = inside.into_iter().filter_map(|index| network.link(index));
        let Addresses { node, primary } = addresses;
        self.state.set_node(NodeReport {
            addresses: node.own.clone(),
            nodeport_addresses: node.node_ports.clone(),
            primary: primary.iter().collect(),
            detect_local: detect.as_str().to_owned(),
            internal_networks: texts(&settings.internal),
            internal_devices: devices.map(|link| link.name.clone()).collect(),
            service_ranges: texts(&settings.service_ranges),
            drops_unknown_vips: settings.flags & settings_flags::DROP_UNKNOWN_VIPS != 0,
            north_south_mode: north_south.to_string(),
            dsr_encapsulation: if *gue { "gue" } else { "ipip" }.to_owned(),
            dsr_peers: [texts(&settings.peers), peers].concat(),
            denied_sources: texts(&settings.denied),
            masquerade_first_port: *ports.start(),
            masquerade_last_port: *ports.end(),
        });
    }
}

/// The families that occur both in the node's addresses and in `service_ranges`; without ranges, all families of the
/// node's addresses.
fn families_in_use(own: &[IpAddr], service_ranges: &[IpNet]) -> Families {
    let of_node: Families = own.iter().copied().map(Family::of).collect();
    let of_services: Families = service_ranges.iter().map(|net| Family::of(net.addr())).collect();
    if service_ranges.is_empty() { of_node } else { of_node.intersection(of_services) }
}

/// A condition for each family in `routed` that the kernel does not forward: packets of pods and other machines then do
/// not reach backends at addresses that this node does not have.
fn not_forwarding(routed: Families) -> Vec<String> {
    let mut conditions = Vec::new();
    let sysctls = [(Family::V4, "net.ipv4.ip_forward"), (Family::V6, "net.ipv6.conf.all.forwarding")];
    for (family, sysctl) in sysctls {
        let ipv4 = family == Family::V4;
        if routed.contains(family) && forwards(ipv4).is_ok_and(|forwards| !forwards) {
            conditions.push(format!(
                "{sysctl} is 0: the kernel does not route packets to pods and other machines; run `sysctl -w {sysctl}=1`, \
                 or let the CNI plugin do it"
            ));
        }
    }
    conditions
}

fn texts(list: &Networks) -> Vec<String> {
    networks(list).iter().map(ToString::to_string).collect()
}

/// The preferred primary addresses: those of the Node object. If Services come from an API server and the agent has no
/// addresses of the Node object yet, those in the settings that an earlier agent has left.
fn preferred(info: &NodeInfo, has_api_server: bool, earlier: &Settings) -> Vec<IpAddr> {
    if info.internal_ips.is_empty() && has_api_server {
        let sources: [Address; 2] = [earlier.source_v4, earlier.source_v6];
        return sources.into_iter().map(IpAddr::from).collect();
    }
    info.internal_ips.clone()
}

/// Waits for a change of the value; forever if its sender is dropped.
async fn changed<T>(source: &mut watch::Receiver<T>) {
    if source.changed().await.is_err() {
        future::pending::<()>().await;
    }
}
