//! The task that announces load balancers' addresses at layer 2.
//!
//! ```text
//! folder ──Advertised──▶ announcer ──records──▶ ANNOUNCED, programs on devices
//! writer ──Holders─────▶    │  ▲  ──frames───▶ networks (ARP, neighbour advertisements)
//! devices ──Network────▶    ▼  │
//!                        other members (UDP): the right to announce
//! ```
//!
//! The programs answer until a record's deadline. Without other members a record has no deadline, so the programs also
//! answer while no agent runs.

mod devices;
mod frames;
mod members;
mod peers;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use lb_common::{AnnounceKey, Announcement, Heard};
use lb_core::{
    announce::{
        advertisement::{Advertised, labels_of},
        election::{Candidacy, candidacies},
        holders::Holder,
        lease::{Nanos, Right},
        schedule,
    },
    model::ObjectName,
};
use lb_datapath::{AnnounceAttacher, AnnounceSocket, Announcements, DatapathError, DevicePatterns, Network};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time};
use tracing::{info, warn};

pub use self::members::{Key, Member, Members};
use self::{devices::Place, peers::Peers};
use crate::daemon::state::State;

/// How long a node does not answer for an address that another machine has claimed: `DEFEND_INTERVAL` of RFC 5227.
const HOLD_OFF: Nanos = 10_000_000_000;
/// Interval at which the task renews rights, and checks which announcements are due.
const TICK: Duration = Duration::from_millis(200);

/// The Services that have a load balancer's address, by name.
pub type HolderMap = Arc<BTreeMap<ObjectName, Holder>>;

/// Inputs of the task.
#[derive(Debug)]
pub struct Sources {
    /// Advertisements and pools. The sender is closed if Services come from an API server.
    pub advertised: watch::Receiver<Advertised>,
    /// The Services that have a load balancer's address.
    pub holders: watch::Receiver<HolderMap>,
    /// Links and addresses of the node.
    pub network: watch::Receiver<Network>,
    /// Whether at least one synchronisation has completed: the Services are in the kernel.
    pub synchronised: watch::Receiver<bool>,
}

/// The parts of the kernel that the task writes.
#[derive(Debug)]
pub struct Kernel {
    /// Attaches the program `tc_announce` to devices.
    pub attacher: AnnounceAttacher,
    /// The records that the programs read, and the programs' counters of answers and conflicts.
    pub maps: Announcements,
}

/// An address that this node or another member announces, as `announce list` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnouncementReport {
    /// The address.
    pub address: IpAddr,
    /// The name of its pool.
    pub pool: String,
    /// `namespace/name` of the Services that have it.
    pub services: Vec<String>,
    /// The node that announces it, as far as this node knows.
    pub node: Option<String>,
    /// Whether this node answers ARP requests and neighbour solicitations for the address now.
    pub here: bool,
    /// The interfaces on which this node announces the address, or would if it had the right to.
    pub interfaces: Vec<String>,
    /// When this node began to announce it.
    pub since: Option<Timestamp>,
    /// Milliseconds until this node stops announcing the address unless it renews its right; `None` without a right or
    /// without other members.
    pub expires_in_ms: Option<u64>,
    /// ARP requests and neighbour solicitations for the address that this node has answered.
    pub answers: u64,
    /// Frames in which other machines claimed the address while this node announced it.
    pub conflicts: u64,
    /// MAC address of the machine that claimed the address last.
    pub conflict_mac: Option<String>,
}

/// The task that announces addresses.
#[derive(Debug)]
pub struct Announcer {
    node: Arc<str>,
    patterns: DevicePatterns,
    sources: Sources,
    kernel: Kernel,
    /// Opened when the first address is announced, because it needs `CAP_NET_RAW`.
    socket: Option<AnnounceSocket>,
    peers: Option<Peers>,
    state: Arc<State>,
    candidacies: Vec<Candidacy>,
    /// Announcements of this node.
    held: BTreeMap<AnnounceKey, Held>,
    /// When the last logged conflict happened, so that each is logged once.
    logged: BTreeMap<AnnounceKey, Nanos>,
    /// Whether the maps may still hold records of an earlier agent.
    first: bool,
    /// The error of the last update; `None` if it succeeded.
    failure: Option<String>,
}

/// An announcement of this node.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// [`Right::since`] of the right to this announcement.
    right: Nanos,
    /// When this node last began to answer: when it got the right, or after a conflict.
    since: Nanos,
    mac: [u8; 6],
    /// Announcements sent since `since`.
    sent: u64,
}

impl Announcer {
    /// Creates the task. Without `members`, this node announces all addresses.
    ///
    /// # Errors
    ///
    /// A socket cannot be opened.
    pub fn new(
        (node, patterns): (Arc<str>, DevicePatterns),
        sources: Sources,
        kernel: Kernel,
        members: Option<Members>,
        state: Arc<State>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            peers: members.map(|members| Peers::open(Arc::clone(&node), members)).transpose()?,
            socket: None,
            node,
            patterns,
            sources,
            kernel,
            state,
            candidacies: Vec::new(),
            held: BTreeMap::new(),
            logged: BTreeMap::new(),
            first: true,
            failure: None,
        })
    }

    /// Runs the task.
    ///
    /// # Errors
    ///
    /// The records of an earlier agent cannot be deleted, or another task has ended.
    pub async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        self.elect();
        if self.peers.is_some() {
            // The rights of an earlier agent are unknown, so its records are deleted.
            self.kernel.maps.set(&BTreeMap::new())?;
        }
        loop {
            let busy = self.peers.is_some() || !self.candidacies.is_empty();
            let Sources { advertised, holders, network, synchronised } = &mut self.sources;
            tokio::select! {
                // Fails if Services come from an API server. The task then only withdraws what an agent with a folder
                // has announced.
                Ok(()) = advertised.changed() => {}
                changed = holders.changed() => changed?,
                changed = network.changed() => changed?,
                changed = synchronised.changed() => changed?,
                _ = tick.tick(), if busy => {
                    self.tick();
                    continue;
                }
                () = Peers::receive(self.peers.as_mut()) => {
                    self.apply();
                    continue;
                }
            }
            self.elect();
            self.tick();
        }
    }

    /// Computes which nodes may announce which addresses.
    fn elect(&mut self) {
        let Sources { advertised, holders, synchronised, .. } = &mut self.sources;
        let nodes: Vec<Arc<str>> = match &self.peers {
            Some(peers) => peers.members().collect(),
            None => vec![Arc::clone(&self.node)],
        };
        let nodes = nodes.into_iter().map(|node| (Arc::clone(&node), labels_of(&node))).collect();
        let (advertised, holders) = (advertised.borrow_and_update(), holders.borrow_and_update());
        let ready = *synchronised.borrow_and_update();
        self.candidacies =
            if ready { candidacies(&advertised, &holders, &nodes, &self.node) } else { Vec::new() };
        if let Some(peers) = &mut self.peers {
            let of = |candidacy: &Candidacy| (candidacy.address, candidacy.nodes.clone());
            peers.leases().set_candidates(self.candidacies.iter().map(of).collect());
        }
    }

    /// Sends questions to the other members. Updates the records first, so that the programs no longer answer for
    /// addresses that this node gives back.
    fn tick(&mut self) {
        let questions = self.peers.as_mut().map(|peers| peers.tick(Announcements::now()));
        if !self.apply() {
            return;
        }
        if let (Some(peers), Some(questions)) = (&self.peers, questions) {
            peers.send(&questions);
        }
    }

    /// Calls [`Self::update`] and returns whether it succeeded. After a failure the next tick tries again; meanwhile
    /// the records in the kernel expire at their deadlines.
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

    /// Updates programs on devices and records, and sends announcements.
    fn update(&mut self) -> Result<(), DatapathError> {
        if self.first && !*self.sources.synchronised.borrow() {
            // Records of an earlier agent stay until the Services are known.
            return Ok(());
        }
        let now = Announcements::now();
        let places = self.places();
        if self.first || !places.is_empty() || !self.held.is_empty() {
            self.serve(&places)?;
        }
        self.first = false;
        let heard = if places.is_empty() { BTreeMap::new() } else { self.kernel.maps.heard()? };
        let rights = self.rights(now);
        let mut records = BTreeMap::new();
        let mut held = BTreeMap::new();
        for (key, place) in &places {
            let Some(right) = rights.get(&IpAddr::from(key.address)) else { continue };
            let it = self.hold(*key, place, right, heard.get(key), now);
            let (deadline, since, mac) = (right.deadline, it.since, it.mac);
            records.insert(*key, Announcement { deadline, since, mac, reserved: [0; 2] });
            held.insert(*key, it);
        }
        self.held = held;
        self.kernel.maps.set(&records)?;
        self.announce(&heard, now);
        self.report(&places, &heard, &rights, now);
        Ok(())
    }

    /// The devices on which this node announces each address, or would if it had the right to.
    fn places(&self) -> BTreeMap<AnnounceKey, Place> {
        let network = self.sources.network.borrow();
        let mine = self.candidacies.iter().filter(|candidacy| candidacy.nodes.contains(&self.node));
        let of = |candidacy: &Candidacy| {
            let places = devices::places(&network, &self.patterns, candidacy.address, &candidacy.interfaces);
            let address = candidacy.address.into();
            places.into_iter().map(move |place| (AnnounceKey { address, device: place.index }, place))
        };
        mine.flat_map(of).collect()
    }

    /// Attaches the program to the devices, and joins the multicast groups of neighbour solicitations there.
    fn serve(&mut self, places: &BTreeMap<AnnounceKey, Place>) -> Result<(), DatapathError> {
        let devices: BTreeSet<u32> = places.keys().map(|key| key.device).collect();
        for (device, error) in self.kernel.attacher.sync(&devices)? {
            warn!(device, "{error}; its addresses are not announced there yet");
        }
        self.kernel.maps.forget_others(&places.keys().copied().collect())?;
        if self.socket.is_none() && !places.is_empty() {
            self.socket = Some(AnnounceSocket::open()?);
        }
        let Some(socket) = &mut self.socket else { return Ok(()) };
        let group = |key: &AnnounceKey| Some((key.device, frames::group(key.address.into())?));
        let groups: BTreeSet<_> = places.keys().filter_map(group).collect();
        for (device, group) in &groups {
            if let Err(error) = socket.join(*device, *group) {
                let loss = "the device may drop neighbour solicitations";
                warn!(device, "cannot receive the multicast group {group}: {error}; {loss}");
            }
        }
        socket.leave_others(|device, group| groups.contains(&(device, group)));
        Ok(())
    }

    /// The addresses that this node may announce now, with its rights.
    fn rights(&mut self, now: Nanos) -> BTreeMap<IpAddr, Right> {
        if let Some(peers) = &mut self.peers {
            return peers.leases().rights(now).collect();
        }
        let alone = Right { since: 0, deadline: Announcement::NEVER };
        self.candidacies.iter().map(|candidacy| (candidacy.address, alone)).collect()
    }

    /// The announcement of an address on a device: the current one, or a new one for a new right or MAC address, or
    /// once the hold-off after a conflict is over.
    fn hold(
        &mut self,
        key: AnnounceKey,
        place: &Place,
        right: &Right,
        heard: Option<&Heard>,
        now: Nanos,
    ) -> Held {
        let begin = Held { right: right.since, since: now, mac: place.mac, sent: 0 };
        let known = self.held.get(&key).copied();
        let Some(known) = known.filter(|known| known.right == right.since && known.mac == place.mac) else {
            return begin;
        };
        let Some(heard) = heard.filter(|heard| heard.conflict_at >= known.since) else { return known };
        if self.logged.insert(key, heard.conflict_at) != Some(heard.conflict_at) {
            let (address, mac) = (IpAddr::from(key.address), frames::text(heard.conflict_mac));
            warn!(%address, mac, device = place.name, "another machine claims the address: not answering for 10 s");
        }
        if now.saturating_sub(heard.conflict_at) >= HOLD_OFF { begin } else { known }
    }

    /// Sends the announcements that are due.
    fn announce(&mut self, heard: &BTreeMap<AnnounceKey, Heard>, now: Nanos) {
        let Some(socket) = &self.socket else { return };
        for (key, held) in &mut self.held {
            let in_conflict = heard.get(key).is_some_and(|heard| heard.conflict_at >= held.since);
            let due = schedule::due(now.saturating_sub(held.since));
            if in_conflict || due <= held.sent {
                continue;
            }
            let address = IpAddr::from(key.address);
            if held.sent == 0 {
                info!(%address, device = key.device, "announcing the address");
            }
            held.sent = due;
            for frame in frames::announcements(address, held.mac) {
                if let Err(error) = socket.send(key.device, &frame) {
                    warn!(%address, device = key.device, "cannot send an announcement: {error}");
                }
            }
        }
    }

    /// Updates the report for `status` and `announce list`.
    fn report(
        &self,
        places: &BTreeMap<AnnounceKey, Place>,
        heard: &BTreeMap<AnnounceKey, Heard>,
        rights: &BTreeMap<IpAddr, Right>,
        now: Nanos,
    ) {
        let report = |candidacy: &Candidacy| {
            let is_here = |key: &AnnounceKey| IpAddr::from(key.address) == candidacy.address;
            let places = places.iter().filter(|(key, _)| is_here(key));
            let interfaces = places.clone().map(|(_, place)| place.name.clone()).collect();
            let heard = places.filter_map(|(key, _)| heard.get(key)).collect();
            let right = rights.get(&candidacy.address);
            self.report_of(candidacy, interfaces, heard, right, now)
        };
        self.state.set_announcements(self.candidacies.iter().map(report).collect());
    }

    /// The report of one address.
    fn report_of(
        &self,
        candidacy: &Candidacy,
        interfaces: Vec<String>,
        heard: Vec<&Heard>,
        right: Option<&Right>,
        now: Nanos,
    ) -> AnnouncementReport {
        let address = candidacy.address;
        let held = self.held.iter().filter(|(key, _)| IpAddr::from(key.address) == address);
        let began: Vec<Nanos> = held.map(|(_, held)| held.since).collect();
        let claims = heard.iter().filter(|heard| heard.conflicts > 0);
        let last_claim = claims.max_by_key(|heard| heard.conflict_at);
        let answers = |since: &Nanos| last_claim.is_none_or(|claim| claim.conflict_at < *since);
        let ago =
            |since: &Nanos| SignedDuration::try_from(Duration::from_nanos(now.saturating_sub(*since))).ok();
        let deadline = right.map(|right| right.deadline).filter(|end| *end != Announcement::NEVER);
        AnnouncementReport {
            address,
            pool: candidacy.pool.to_string(),
            services: candidacy.services.iter().map(ToString::to_string).collect(),
            node: self.owner(address, right, now).map(ToString::to_string),
            here: began.iter().any(answers),
            interfaces,
            since: began.iter().min().and_then(ago).map(|ago| Timestamp::now() - ago),
            expires_in_ms: deadline.map(|deadline| deadline.saturating_sub(now) / 1_000_000),
            answers: heard.iter().map(|heard| heard.answers).sum(),
            conflicts: heard.iter().map(|heard| heard.conflicts).sum(),
            conflict_mac: last_claim.map(|claim| frames::text(claim.conflict_mac)),
        }
    }

    /// The node that announces the address, as far as this node knows; `None` if it knows none, or if that should be
    /// this node, which does not have the right yet.
    fn owner(&self, address: IpAddr, right: Option<&Right>, now: Nanos) -> Option<&Arc<str>> {
        match &self.peers {
            Some(peers) if right.is_none() => peers.owner(address, now).filter(|owner| **owner != self.node),
            Some(_) | None => Some(&self.node),
        }
    }
}
