//! The task that announces the addresses of Services of type LoadBalancer at layer 2.
//!
//! ```text
//! source ──Advertised──▶ announcer ──records──▶ ANNOUNCED, programs on devices
//! writer ──Holders─────▶    │  ▲  ──frames───▶ networks (ARP, neighbour advertisements)
//! devices ──Network────▶    ▼  │
//!                        other members (UDP): the right to announce
//! ```
//!
//! The programs answer ARP requests and neighbour solicitations for an address until the deadline in its record.
//! Without members (neither `--announce` nor `--announce-member`), records have no deadline, so the programs also
//! answer while no agent runs.

pub mod bgp;
mod completeness;
mod coverage;
mod devices;
mod frames;
mod held;
mod kernel;
mod members;
mod missed;
mod peers;
mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future,
    net::IpAddr,
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use lb_common::{AnnounceKey, Announcement, Heard};
use lb_core::{
    announce::{
        advertisement::{Advertised, labels_of},
        bgp::is_refuted,
        cluster::Cluster,
        devices::LastingDevices,
        election::{Candidacy, Candidate, candidacies},
        holders::Holder,
        lease::{Nanos, Right},
        schedule,
        voters::Ballot,
    },
    model::ObjectName,
};
use lb_datapath::{Announcements, DatapathError, DevicePatterns, Network, arp_ignore};
use tokio::{sync::watch, time};
use tracing::{info, warn};

pub(crate) use self::report::{announcer, means};
pub use self::{
    completeness::Completeness,
    coverage::Coverage,
    kernel::Kernel,
    members::{Key, Member, Members, Who},
    report::{AnnouncedBy, AnnouncementReport},
};
use self::{
    devices::{Wire, Wires},
    held::Held,
    missed::Missed,
    peers::Peers,
    report::Facts,
};
use crate::{daemon::state::State, log_few::warn_new, metrics::Metrics, stop};

/// Interval at which the announcer renews rights, and checks which announcements are due.
const TICK: Duration = Duration::from_millis(200);

/// A stopping member sends its last messages this many times, because some may get lost. It pauses for
/// `BETWEEN_FAREWELLS` after each time.
const FAREWELLS: u32 = 3;
const BETWEEN_FAREWELLS: Duration = Duration::from_millis(20);

/// The Services that have a load balancer address, by name.
pub type HolderMap = Arc<BTreeMap<ObjectName, Holder>>;

/// The channels from which the announcer reads its inputs.
#[derive(Debug)]
pub struct Sources {
    /// Advertisements and pools. The sender is closed if Services come from an API server and `--announce` is not set.
    pub advertised: watch::Receiver<Advertised>,
    /// The Nodes and voters of the cluster, used if the members are its Nodes.
    pub cluster: watch::Receiver<Cluster>,
    /// The Services that have a load balancer address, by name.
    pub holders: watch::Receiver<HolderMap>,
    /// Links and addresses of this node.
    pub network: watch::Receiver<Network>,
    /// Whether the Services are in the kernel: at least one synchronisation has completed.
    pub synchronised: watch::Receiver<bool>,
    /// Which part of the objects the agent has read and written to the kernel.
    pub complete: watch::Receiver<Completeness>,
    /// Becomes true when the agent stops. The announcer drops this receiver after it has handed over its addresses.
    pub stop: watch::Receiver<bool>,
}

/// The task that announces load balancer addresses at layer 2.
#[derive(Debug)]
pub struct Announcer {
    node: Arc<str>,
    patterns: DevicePatterns,
    sources: Sources,
    kernel: Kernel,
    peers: Option<Peers>,
    /// Sends the voters that this node knows, and those that it proposes.
    ballots: watch::Sender<Ballot>,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    candidacies: Vec<Candidacy>,
    /// Without members: the announcements of an earlier agent for Services that this agent has not read. These
    /// announcements stay until this agent has read all objects, because the kernel still serves these Services.
    adopted: BTreeSet<AnnounceKey>,
    /// Names of the devices on which this node can announce addresses.
    wires: Vec<String>,
    lasting: LastingDevices,
    /// The devices of this node that advertisements name, including devices that have just disappeared; `None` before
    /// the first synchronisation.
    devices: Option<BTreeSet<String>>,
    /// The devices on which this node announces each address, or would announce it if it had the right to.
    places: BTreeMap<AnnounceKey, Wire>,
    /// This node's rights to announce at the last update, by address.
    rights: BTreeMap<IpAddr, Right>,
    /// Interface indices of the devices to which the program could not be attached: this node does not answer there.
    broken: BTreeSet<u32>,
    /// The announcements of this node, by address and device.
    held: BTreeMap<AnnounceKey, Held>,
    /// Time of the last logged conflict per address and device, so that each conflict is logged once.
    logged: BTreeMap<AnnounceKey, Nanos>,
    /// Whether the kernel may hold programs and records of announcements: those of this agent or, until the first
    /// update of this agent, those of an earlier agent.
    in_use: bool,
    /// Whether a synchronisation has completed since this agent started. Until then, programs that an earlier agent
    /// attached stay.
    begun: bool,
    /// Why the last update of programs and records failed; `None` if it succeeded.
    failure: Option<String>,
    /// The last conditions about addresses that are announced and that a device of this node has.
    bound: Vec<String>,
    missed: Missed,
    /// The last conditions about what keeps this node from announcing addresses.
    conditions: Vec<String>,
}

impl Announcer {
    /// Creates the task. Without `members`, this node is the only candidate for each address.
    ///
    /// # Errors
    ///
    /// The socket cannot be opened at the configured address of this node.
    pub fn new(
        (node, patterns): (Arc<str>, DevicePatterns),
        sources: Sources,
        kernel: Kernel,
        (members, ballots): (Option<Members>, watch::Sender<Ballot>),
        (state, metrics): (Arc<State>, Arc<Metrics>),
    ) -> anyhow::Result<Self> {
        Ok(Self {
            peers: members.map(|members| Peers::open(Arc::clone(&node), members)).transpose()?,
            node,
            patterns,
            sources,
            kernel,
            ballots,
            state,
            metrics,
            candidacies: Vec::new(),
            adopted: BTreeSet::new(),
            wires: Vec::new(),
            lasting: LastingDevices::default(),
            devices: None,
            places: BTreeMap::new(),
            rights: BTreeMap::new(),
            broken: BTreeSet::new(),
            held: BTreeMap::new(),
            logged: BTreeMap::new(),
            in_use: true,
            begun: false,
            failure: None,
            bound: Vec::new(),
            missed: Missed::default(),
            conditions: Vec::new(),
        })
    }

    /// Runs the task.
    ///
    /// # Errors
    ///
    /// The records of an earlier agent cannot be read or deleted, or another task has ended.
    pub async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        if self.peers.is_some() {
            // This agent does not know the rights behind the records of an earlier agent, so it deletes the records.
            self.kernel.maps.set(&BTreeMap::new())?;
        } else {
            self.adopted = self.kernel.maps.get()?.into_keys().collect();
        }
        self.elect();
        loop {
            let is_member = self.peers.as_ref().is_some_and(Peers::is_active);
            let busy = is_member || self.in_use || !self.candidacies.is_empty();
            let Sources { advertised, cluster, holders, network, synchronised, complete, stop } =
                &mut self.sources;
            tokio::select! {
                // With an API server but without `--announce`, the senders of `advertised` and `cluster` are closed, so
                // `changed` fails and `select!` disables the branches. The announcer then only withdraws what an
                // earlier agent, which read a folder of manifests, has announced.
                Ok(()) = advertised.changed() => {}
                Ok(()) = cluster.changed() => {}
                changed = holders.changed() => changed?,
                changed = network.changed() => changed?,
                changed = synchronised.changed() => changed?,
                changed = complete.changed() => changed?,
                () = stop::requested(stop) => break,
                _ = tick.tick(), if busy => {
                    self.tick();
                    continue;
                }
                retires = Peers::receive(self.peers.as_mut()) => {
                    // Most messages change neither the devices of the peers nor which addresses this node may announce,
                    // and elections take time.
                    if self.peers.as_mut().is_some_and(|peers| peers.leases().take_devices_changed()) {
                        self.elect();
                    } else if !retires {
                        if self.rights_changed(Announcements::now()) {
                            self.apply();
                        }
                        continue;
                    }
                    self.tick();
                    continue;
                }
            }
            self.elect();
            self.tick();
        }
        self.retire().await;
        drop(self);
        future::pending().await
    }

    /// Hands the addresses of this node over to other members. Without members, does nothing: the programs go on
    /// answering for the addresses, because the Services stay in the kernel.
    async fn retire(&mut self) {
        let Some(peers) = &mut self.peers else { return };
        let requests = peers.leases().retire(Announcements::now());
        if !self.apply() {
            return;
        }
        for _ in 0..FAREWELLS {
            if let Some(peers) = &self.peers {
                peers.send(&requests);
            }
            time::sleep(BETWEEN_FAREWELLS).await;
        }
    }

    /// Computes which nodes may announce which addresses, and on which devices this node may announce them.
    fn elect(&mut self) {
        self.wires = {
            let network = self.sources.network.borrow_and_update();
            Wires::new(&network, &self.patterns).names().map(str::to_owned).collect()
        };
        self.devices = self.devices(Announcements::now());
        let Sources { advertised, cluster, holders, synchronised, complete, .. } = &mut self.sources;
        let is_closed = advertised.has_changed().is_err();
        let ready = *synchronised.borrow_and_update();
        let devices = self.devices.as_ref();
        let nodes = match &mut self.peers {
            Some(peers) => peers.nodes(&cluster.borrow_and_update(), devices, Announcements::now()),
            None => {
                let this = Candidate { labels: labels_of(&self.node), devices: devices.cloned() };
                BTreeMap::from([(Arc::clone(&self.node), this)])
            }
        };
        let (advertised, holders) = (advertised.borrow_and_update(), holders.borrow_and_update());
        self.candidacies =
            if ready { candidacies(&advertised, &holders, &nodes, &self.node) } else { Vec::new() };
        // The sender of advertisements is closed if this agent announces nothing at layer 2.
        let is_whole = *complete.borrow_and_update() == Completeness::Whole || is_closed;
        let is_known = |address: IpAddr| {
            self.candidacies.iter().any(|candidacy| candidacy.address == address)
                || is_refuted(&holders, &self.node, address)
        };
        self.adopted.retain(|key| !is_whole && !is_known(key.address.into()));
        drop((advertised, holders));
        if let Some(peers) = self.peers.as_mut().filter(|_| ready) {
            let of = |candidacy: &Candidacy| (candidacy.address, candidacy.nodes.clone());
            let candidates = self.candidacies.iter().map(of).collect();
            peers.leases().set_candidates(candidates, Announcements::now());
        }
        self.places = self.places();
        self.decline();
        self.report_bound();
    }

    /// Determines for which addresses this node does not ask the other members: addresses that the kernel of this node
    /// does not serve, and addresses for which the program could be attached to no device. (This function does not
    /// decline an address whose device has just gone down, because the device may come back.)
    fn decline(&mut self) {
        let Some(peers) = &mut self.peers else { return };
        let (places, broken) = (&self.places, &self.broken);
        let is_broken = |address: IpAddr| {
            let mut devices = places.range(keys(address)).map(|(key, _)| key.device).peekable();
            devices.peek().is_some() && devices.all(|device| broken.contains(&device))
        };
        let is_unserved = |candidacy: &&Candidacy| !candidacy.is_served_here || is_broken(candidacy.address);
        let unserved = self.candidacies.iter().filter(is_unserved).map(|candidacy| candidacy.address);
        peers.leases().set_unserved(unserved.collect());
    }

    /// Reports announced addresses that a device of this node has, and logs the addresses that were not in the last
    /// report.
    fn report_bound(&mut self) {
        let pool = |candidacy: &Candidacy| (candidacy.address, Arc::clone(&candidacy.pool));
        let announced = self.candidacies.iter().map(pool).collect();
        let bound = devices::bound(&self.sources.network.borrow(), &self.wires, &announced, arp_ignore);
        warn_new(&mut self.bound, &bound);
        self.state.set_bound_conditions(bound);
    }

    /// Computes the field [`devices`](Announcer#structfield.devices).
    fn devices(&mut self, now: Nanos) -> Option<BTreeSet<String>> {
        let mut lasting = self.lasting.update(self.wires.iter().map(String::as_str), now);
        let advertised = self.sources.advertised.borrow();
        lasting.retain(|device| advertised.names_device(device));
        self.sources.synchronised.borrow().then_some(lasting)
    }

    /// Computes the field `places`: the devices on which this node announces each address, or would if it had the right
    /// to.
    fn places(&mut self) -> BTreeMap<AnnounceKey, Wire> {
        let network = self.sources.network.borrow_and_update();
        let wires = Wires::new(&network, &self.patterns);
        let mine = self.candidacies.iter().filter(|candidacy| candidacy.nodes.contains(&self.node));
        let of = |candidacy: &Candidacy| {
            let address = candidacy.address.into();
            let places = wires.places(candidacy.address, &candidacy.interfaces).cloned();
            let places = places.map(move |wire| (AnnounceKey { address, device: wire.index }, wire));
            places.collect::<Vec<_>>()
        };
        let adopted = self.adopted.iter().filter_map(|key| Some((*key, wires.get(key.device)?.clone())));
        mine.flat_map(of).chain(adopted).collect()
    }

    /// Sends requests to the other members, and proposes voters. Updates the records first, so that this node no longer
    /// answers for addresses that it gives back.
    fn tick(&mut self) {
        if self.devices(Announcements::now()) != self.devices {
            self.elect();
        }
        let requests = self.peers.as_mut().map(|peers| peers.tick(Announcements::now()));
        if !self.apply() {
            return;
        }
        if let (Some(peers), Some(requests)) = (&self.peers, requests) {
            peers.send(&requests);
        }
        self.propose();
        self.report_conditions();
    }

    /// Reports what keeps this node from announcing addresses, and logs what the last report did not have.
    fn report_conditions(&mut self) {
        let missed =
            self.peers.as_ref().and_then(|peers| peers.missed(&mut self.missed, Announcements::now()));
        let conditions: Vec<String> =
            missed.into_iter().chain(self.kernel.failures().iter().cloned()).collect();
        if conditions != self.conditions {
            warn_new(&mut self.conditions, &conditions);
            self.state.set_announcer_conditions(conditions);
        }
    }

    /// Publishes the voters that this node knows and those that it proposes, if either have changed; does nothing
    /// unless the members are Nodes.
    fn propose(&self) {
        let Some(peers) = &self.peers else { return };
        let cluster = self.sources.cluster.borrow();
        let exists = |name: &str| cluster.nodes.contains_key(name);
        let Some(ballot) = peers.ballot(exists, Announcements::now()) else { return };
        self.ballots.send_if_modified(|known| {
            let modified = *known != ballot;
            *known = ballot;
            modified
        });
    }

    /// Calls [`Self::update`] and returns whether it succeeded. After a failure the next tick tries again; meanwhile,
    /// records with a deadline expire.
    fn apply(&mut self) -> bool {
        let failure = self.update().err().map(|error| error.to_string());
        if failure != self.failure {
            match &failure {
                Some(error) => warn!("cannot announce addresses: {error}; retrying"),
                None => info!("announcing addresses again"),
            }
        }
        self.failure = failure;
        self.failure.is_none()
    }

    /// Updates the programs on devices and the announcement records, and sends announcements.
    fn update(&mut self) -> Result<(), DatapathError> {
        self.begun |= *self.sources.synchronised.borrow();
        if !self.begun {
            return Ok(());
        }
        let now = Announcements::now();
        let rights = self.rights(now);
        let is_new = |(address, right): &(&IpAddr, &Right)| {
            self.rights.get(*address).is_none_or(|known| known.since != right.since)
        };
        self.metrics.count_takeovers(rights.iter().filter(is_new).count());
        self.rights = rights;
        self.in_use |= !self.places.is_empty();
        if !self.in_use {
            self.report(&BTreeMap::new(), now);
            return Ok(());
        }
        let (heard, broken) = self.kernel.serve(&self.places)?;
        if broken != self.broken {
            self.broken = broken;
            self.decline();
        }
        let mut records = BTreeMap::new();
        let mut held = BTreeMap::new();
        for (key, wire) in self.places.iter().filter(|(key, _)| !self.broken.contains(&key.device)) {
            let Some(right) = self.rights.get(&IpAddr::from(key.address)) else { continue };
            let known = self.held.get(key).copied();
            let it = Held::after(known, wire.mac, right, heard.get(key), now);
            let (deadline, since, mac) = (right.deadline, it.since, it.mac);
            records.insert(*key, Announcement { deadline, since, mac, reserved: [0; 2] });
            held.insert(*key, it);
        }
        self.kernel.maps.set(&records)?;
        self.log_ends(&held);
        self.held = held;
        self.in_use = !self.places.is_empty();
        self.log_claims(&heard);
        self.announce(&heard, now);
        self.report(&heard, now);
        Ok(())
    }

    /// This node's rights at time `now`, by the address that the right is for.
    fn rights(&mut self, now: Nanos) -> BTreeMap<IpAddr, Right> {
        if let Some(peers) = &mut self.peers {
            return peers.leases().rights(now).collect();
        }
        let alone = Right { since: 0, deadline: Announcement::NEVER };
        let is_mine = |candidacy: &&Candidacy| !candidacy.nodes.is_empty() && candidacy.is_served_here;
        let mine = self.candidacies.iter().filter(is_mine).map(|candidacy| candidacy.address);
        let adopted = self.adopted.iter().map(|key| key.address.into());
        mine.chain(adopted).map(|address| (address, alone)).collect()
    }

    /// Whether this node has gained or lost a right since the last update, or has renewed the right that ends first.
    /// Renewals of other rights do not count: otherwise each message would cause an update of the records.
    fn rights_changed(&mut self, now: Nanos) -> bool {
        let Some(peers) = &mut self.peers else { return false };
        let leases = peers.leases();
        let known = self.rights.iter().map(|(address, right)| (*address, right.since));
        let is_same = leases.rights(now).map(|(address, right)| (address, right.since)).eq(known);
        let earliest = self.rights.values().map(|right| right.deadline).min();
        !is_same || leases.rights(now).map(|(_, right)| right.deadline).min() > earliest
    }

    /// Logs which addresses this node no longer announces, for example because their pool or their Service is gone, or
    /// another node has got the right. `now` are the announcements after this update.
    fn log_ends(&self, now: &BTreeMap<AnnounceKey, Held>) {
        for key in self.held.keys().filter(|key| !now.contains_key(key)) {
            info!(address = %IpAddr::from(key.address), device = key.device, "no longer announcing the address");
        }
    }

    /// Logs each claim of an address by another machine once.
    fn log_claims(&mut self, heard: &BTreeMap<AnnounceKey, Heard>) {
        self.logged.retain(|key, _| self.held.contains_key(key));
        for (key, held) in &self.held {
            let Some(heard) = heard.get(key).filter(|heard| held.is_claimed(Some(heard))) else { continue };
            if self.logged.insert(*key, heard.conflict_at) != Some(heard.conflict_at) {
                let (address, mac) = (IpAddr::from(key.address), frames::text(heard.conflict_mac));
                let device = self.places.get(key).map(|wire| &*wire.name);
                warn!(%address, mac, device, "another machine claims the address: not answering for 10 s");
            }
        }
    }

    /// Sends the announcements (unsolicited ARP and neighbour discovery frames) that are due.
    fn announce(&mut self, heard: &BTreeMap<AnnounceKey, Heard>, now: Nanos) {
        for (key, held) in &mut self.held {
            let due = schedule::due(now.saturating_sub(held.since));
            if held.is_claimed(heard.get(key)) || due <= held.sent {
                continue;
            }
            let address = IpAddr::from(key.address);
            if held.sent == 0 {
                info!(%address, device = key.device, "announcing the address");
            }
            held.sent = due;
            for frame in frames::announcements(address, held.mac) {
                if let Err(error) = self.kernel.send(key.device, &frame) {
                    warn!(%address, device = key.device, "cannot send an announcement: {error}");
                }
            }
        }
    }

    /// Updates the agent's report about addresses, which `status` and `announce list` show.
    fn report(&self, heard: &BTreeMap<AnnounceKey, Heard>, now: Nanos) {
        let report = |candidacy: &Candidacy| {
            let (address, right) = (candidacy.address, self.rights.get(&candidacy.address));
            Facts {
                owner: self.owner(address, right, now),
                deadline: right.map(|right| right.deadline),
                places: self.places.range(keys(address)).map(|(_, wire)| wire).collect(),
                held: self.held.range(keys(address)).map(|(_, held)| held).collect(),
                heard: heard.range(keys(address)).map(|(_, heard)| heard).collect(),
            }
            .report(candidacy, now)
        };
        let reports: Vec<AnnouncementReport> = self.candidacies.iter().map(report).collect();
        self.metrics.set_announced(reports.len(), reports.iter().filter(|report| report.here).count());
        self.state.set_announcements(reports);
    }

    /// The node that announces the address, as far as this node knows. `None` if this node knows no announcer, if no
    /// node may announce it, or if this node should announce it but does not have the right yet.
    fn owner(&self, address: IpAddr, right: Option<&Right>, now: Nanos) -> Option<&Arc<str>> {
        match &self.peers {
            Some(peers) if right.is_none() => peers.owner(address, now).filter(|owner| **owner != self.node),
            Some(_) | None => right.map(|_| &self.node),
        }
    }
}

/// The keys that the records of an address may have, for any device.
fn keys(address: IpAddr) -> RangeInclusive<AnnounceKey> {
    let of = |device| AnnounceKey { address: address.into(), device };
    of(0)..=of(u32::MAX)
}
