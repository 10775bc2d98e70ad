//! Upgrade or downgrade from another map layout to this one, without interrupting connections.
//!
//! Each version pins a description of its maps next to them ([`crate::bpf::description`]). An agent that finds a
//! described data plane of another version, newer or older, takes it over:
//!
//! 1. Both versions share maps that programs write (flows, affinity, sockets): each version pins them. A map is shared
//!    only if both layouts define the map alike and the size of the map stays the same.
//! 2. The agent copies the other maps that must survive, field by field, after the verifier has accepted the new
//!    programs. The old programs serve meanwhile.
//! 3. The programs of both versions are on every tc hook, the new ones first. If both have a flow, both translate it
//!    alike. The new programs leave packets of unknown flows to the old ones: all such packets, until the new programs
//!    are on all hooks and the flows that began meanwhile are copied; after that only packets from the middle of a
//!    connection.
//! 4. The agent copies the remaining old flows, and removes the old data plane.
//!
//! The two versions choose source ports independently, so the agent copies a flow only while no other flow has its
//! source port: see [`Rank`].
//!
//! At every moment, at least one version has the entries of any given flow. XDP hooks and control groups have one link
//! for both versions, whose program is replaced atomically.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    hash::{BuildHasher as _, RandomState},
    io,
    os::fd::AsFd as _,
    path::PathBuf,
};

use bytemuck::Pod;
use lb_common::{
    Address, Affinity, AnnounceKey, Announcement, Backend, ConnectionLimits, DeviceInfo, Endpoint,
    EndpointName, Heard, Service, ServiceClient, ServiceKey, ServiceName, Settings, SocketBackend,
    SocketConnection, SocketKey, SourceRangeKey, Vip,
    conntrack::{Flow, Tuple, seen},
    filter::Mark,
    handover::{CREATES_FLOWS, EARLIER_CREATES_FLOWS, OVER},
};
use tracing::{info, warn};

use crate::{
    attach::cleanup,
    bpf::{
        bpffs::{self, Folder},
        description::{Conversion, Description, Part},
        layout::{self, DESCRIPTION, MAPS, MapSpec},
        options::Capacities,
        raw_map::RawMap,
        sys,
        table::Table,
    },
    error::DatapathError,
    state::{
        filter::Filter,
        flow_table::{EarlierSlots, FlowTable},
    },
};

/// Number of elements that are written to a map at once.
const CHUNK: usize = 4096;

/// The maps of flows, which both versions share together or not at all: each contains some of the entries, or the seed
/// by which they are found.
const FLOW_MAPS: [&MapSpec; 3] = [&layout::FLOWS, &layout::FLOW_TABLE, &layout::CONNTRACK];

/// The maps of connections of sockets, which both versions share together or not at all: `COUNTED_SOCKETS` stores in
/// each socket the key of its counter in `SOCKET_COUNTS`.
const SOCKET_MAPS: [&MapSpec; 2] = [&layout::SOCKET_COUNTS, &layout::COUNTED_SOCKETS];

/// Other maps in which programs keep state of flows, clients and sockets. The agent copies the maps that cannot be
/// shared, except `FRAGMENTS`, `SOCKETS`, `UNANSWERED` and `LIMIT_BUCKETS`, which begin empty.
const STATE: [&MapSpec; 9] = [
    &layout::ACTIVE_FLOWS,
    &layout::AFFINITY,
    &layout::FRAGMENTS,
    &layout::LIMIT_BUCKETS,
    &layout::UNANSWERED,
    &layout::SOCKETS,
    &layout::SOCKET_BACKENDS,
    &layout::SOCKET_VIPS,
    &layout::CONNECTED_SOCKETS,
];

/// Maps with configured sizes, whose elements are copied.
const SIZED: [&MapSpec; 7] = [
    &layout::SERVICES,
    &layout::SERVICE_NAMES,
    &layout::VIPS,
    &layout::BACKENDS,
    &layout::ACTIVE_FLOWS,
    &layout::ENDPOINT_NAMES,
    &layout::TABLES,
];

/// The takeover of a data plane with another map layout.
#[derive(Debug)]
pub(crate) struct Handover {
    folder: Folder,
    earlier: Earlier,
    /// Capacities of our maps.
    capacities: Capacities,
    /// Names of the maps that both versions have pinned.
    shared: BTreeSet<&'static str>,
    /// Whether flows have already begun in our maps, because an agent of this version was killed during its handover.
    resumed: bool,
    /// Digests of the keys of copied entries. An entry of our flow table with another key may belong to a flow that has
    /// begun in our flow table.
    copied: HashSet<u64>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Earlier {
    folder: PathBuf,
    description: Description,
}

/// How to convert keys, and how to convert values, to this layout.
type Conversions = (Conversion, Conversion);

/// Which flows to copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Flows that have had neither a FIN nor a RST so far: after a FIN or RST, the same tuple may begin another
    /// connection.
    Living,
    /// All flows; updates the copies of flows that were copied before.
    Rest,
}

/// The description of this version's maps.
fn own_description() -> Description {
    let mut description = Description::default();
    for spec in &MAPS {
        description.add(spec.name, (spec.key)(), (spec.value)());
    }
    description
}

/// Pins the description of this version's maps, unless it is pinned already. With this description, an agent of another
/// version can take over this data plane.
pub(crate) fn describe(folder: &Folder) -> Result<(), DatapathError> {
    let path = folder.map(DESCRIPTION);
    if path.exists() {
        return Ok(());
    }
    let failed = |error| DatapathError::file("pin the description of the maps at", &path, error);
    let map = sys::create_array(own_description().render().as_bytes()).map_err(failed)?;
    sys::pin(map.as_fd(), &path).map_err(failed)
}

impl Earlier {
    /// Opens the data plane in `folder`; `None` if it has no description, which is the case for layouts before version
    /// 5.
    fn read(folder: PathBuf) -> Result<Option<Self>, DatapathError> {
        let path = folder.join(DESCRIPTION);
        let Some(map) = RawMap::open(DESCRIPTION, &path)? else { return Ok(None) };
        let mut text = String::new();
        map.for_each(&mut |_, bytes| {
            text.push_str(String::from_utf8_lossy(bytes).trim_end_matches('\0'));
            Ok(())
        })?;
        let description = Description::parse(&text).map_err(|error| {
            DatapathError::file("read the description at", &path, io::Error::other(error))
        })?;
        Ok(Some(Self { folder, description }))
    }

    fn map(&self, spec: &MapSpec) -> Result<Option<RawMap>, DatapathError> {
        RawMap::open(spec.name, &self.folder.join(spec.name))
    }

    /// Capacities of our maps. A map has the wanted capacity, or the capacity of the earlier map if the elements of the
    /// earlier map would not fit otherwise.
    fn capacities(&self, wanted: Capacities) -> Result<Capacities, DatapathError> {
        let mut capacities = wanted;
        for spec in SIZED {
            let Some(map) = self.map(spec)? else { continue };
            let (has, wants) = (map.shape.max_entries, capacities.of(spec));
            if has > wants && entries(&map, spec.is_array())? > wants {
                warn!(
                    map = spec.name,
                    has, wants, "a map keeps its size, because smaller it would be too full"
                );
                capacities.raise(spec, has);
            }
        }
        Ok(capacities)
    }

    fn conversions(&self, spec: &MapSpec) -> Option<Conversions> {
        let key = self.description.get(spec.name, Part::Key)?;
        let value = self.description.get(spec.name, Part::Value)?;
        Some((Conversion::between(key, &(spec.key)()), Conversion::between(value, &(spec.value)())))
    }
}

/// Number of entries that a copy of `map` needs. The zero elements at the end of an array do not count.
fn entries(map: &RawMap, is_array: bool) -> Result<u32, DatapathError> {
    let (mut count, mut end) = (0, 0);
    map.for_each(&mut |_, value| {
        count += 1;
        if value.iter().any(|byte| *byte != 0) {
            end = count;
        }
        Ok(())
    })?;
    Ok(if is_array { end } else { count })
}

fn converted<T: Pod>(conversion: &Conversion, bytes: &[u8]) -> T {
    let mut element = T::zeroed();
    conversion.apply(bytes, bytemuck::bytes_of_mut(&mut element));
    element
}

impl Handover {
    /// Finds a data plane to take over, and pins the maps that can be shared. Must be called before maps are created.
    pub(crate) fn begin(folder: &Folder, capacities: &Capacities) -> Result<Option<Self>, DatapathError> {
        let current = folder.current();
        let mut found = Vec::new();
        for other in folder.versions()?.into_iter().filter(|version| *version != current) {
            let links = bpffs::entries(&other.join("links"))?.len();
            found.extend(Earlier::read(other)?.map(|earlier| (links, earlier)));
        }
        // Several data planes may exist if an agent was killed during its handover; the one with the most links is in
        // use.
        let Some((_, earlier)) = found.into_iter().max_by_key(|(links, _)| *links) else { return Ok(None) };
        let (from, to) = (earlier.folder.display(), current.display());
        info!(%from, %to, "taking over the data plane of another layout");
        let resumed = folder.map(DESCRIPTION).exists();
        if !resumed {
            cleanup::remove_version(&current)?;
            folder.create_folders()?;
        }
        let mut handover = Self {
            folder: folder.clone(),
            capacities: earlier.capacities(*capacities)?,
            earlier,
            shared: BTreeSet::new(),
            resumed,
            copied: HashSet::new(),
            hasher: RandomState::new(),
        };
        handover.share()?;
        Ok(Some(handover))
    }

    /// Capacities of our maps. A map has the capacity that the options require, or the capacity of the earlier map if
    /// the elements of the earlier map would not fit otherwise.
    pub(crate) const fn capacities(&self) -> Capacities {
        self.capacities
    }

    fn share(&mut self) -> Result<(), DatapathError> {
        if self.resumed {
            return Ok(());
        }
        self.share_all(&FLOW_MAPS)?;
        self.share_all(&SOCKET_MAPS)?;
        STATE.into_iter().try_for_each(|spec| self.share_all(&[spec]))
    }

    /// Pins the earlier maps in our folder as well, if all of them exist and have our layout and size.
    fn share_all(&mut self, specs: &[&'static MapSpec]) -> Result<(), DatapathError> {
        let own = own_description();
        let mut maps = Vec::new();
        for spec in specs {
            let Some(map) = self.earlier.map(spec)? else { return Ok(()) };
            let fits = map.shape.max_entries == self.capacities.of(spec);
            if !fits || !own.agrees(&self.earlier.description, spec.name) {
                return Ok(());
            }
            maps.push((spec.name, map));
        }
        for (name, map) in maps {
            map.pin(&self.folder.map(name))?;
            self.shared.insert(name);
        }
        Ok(())
    }

    /// Copies the earlier maps into ours, and makes our programs leave unknown flows to the earlier programs. If flows
    /// have already begun in our maps (`resumed`), copies nothing, and lets our programs create flows. Must be called
    /// after our programs are loaded and before they are attached.
    pub(crate) fn fill(&mut self, filter: &Filter) -> Result<(), DatapathError> {
        if self.resumed {
            return self.set_mode(CREATES_FLOWS);
        }
        self.carry::<ServiceKey, Service>(&layout::SERVICES, |key, service| service.sealed(key))?;
        self.copy::<u32, Backend>(&layout::BACKENDS)?;
        self.copy::<u32, u32>(&layout::TABLES)?;
        self.copy::<u32, ServiceName>(&layout::SERVICE_NAMES)?;
        self.copy::<Address, EndpointName>(&layout::ENDPOINT_NAMES)?;
        self.copy::<Address, Vip>(&layout::VIPS)?;
        self.copy::<SourceRangeKey, u32>(&layout::SOURCE_RANGES)?;
        self.copy::<u32, ConnectionLimits>(&layout::LIMITS)?;
        self.copy::<u32, u32>(&layout::INSIDE_DEVICES)?;
        self.copy::<Address, u32>(&layout::PEERS)?;
        self.copy::<u32, DeviceInfo>(&layout::DEVICES)?;
        self.copy::<u32, Settings>(&layout::SETTINGS)?;
        self.copy::<u32, u32>(&layout::SETTINGS_SLOT)?;
        self.copy::<u32, i64>(&layout::ACTIVE_FLOWS)?;
        self.copy::<AnnounceKey, Announcement>(&layout::ANNOUNCED)?;
        self.copy::<AnnounceKey, Heard>(&layout::ANNOUNCE_HEARD)?;
        self.copy_clients()?;
        self.copy_flows(Pass::Living, filter)?;
        self.adopt_links(|name| name.contains("-xdp-"))?;
        self.set_mode(EARLIER_CREATES_FLOWS)
    }

    /// Copies the remaining flows and removes the earlier data plane. Must be called after our programs are attached to
    /// all tc hooks. `attach_sockets` must replace the programs of the socket links, whose pins this function has moved
    /// to our folder before.
    pub(crate) fn finish(
        mut self,
        filter: &Filter,
        attach_sockets: impl FnOnce() -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        self.copy_flows(Pass::Living, filter)?;
        // From here on, flows begin in our maps.
        describe(&self.folder)?;
        self.set_mode(CREATES_FLOWS)?;
        if self.adopt_links(|name| name.starts_with("sock_"))? > 0 {
            attach_sockets()?;
        }
        let flows = self.copy_flows(Pass::Rest, filter)?;
        self.copy_clients()?;
        // The description goes first, so that no agent takes over a data plane that is only partly removed.
        bpffs::unpin(&self.earlier.folder.join(DESCRIPTION))?;
        cleanup::remove_version(&self.earlier.folder)?;
        self.set_mode(OVER)?;
        info!(last_entries = flows, "took over the data plane of another layout");
        Ok(())
    }

    fn set_mode(&self, mode: u32) -> Result<(), DatapathError> {
        set_mode(&self.folder, mode)
    }

    /// Moves the pinned links whose names match `which` to our folder. Returns how many.
    fn adopt_links(&self, which: impl Fn(&str) -> bool) -> Result<usize, DatapathError> {
        let mut adopted = 0;
        for link in bpffs::entries(&self.earlier.folder.join("links"))? {
            let Some(name) = link.file_name().and_then(|name| name.to_str()).filter(|name| which(name))
            else {
                continue;
            };
            let ours = self.folder.links().join(name);
            bpffs::unpin(&ours)?;
            fs::rename(&link, &ours).map_err(|error| DatapathError::file("move the link", &link, error))?;
            adopted += 1;
        }
        Ok(adopted)
    }

    /// Copies those entries of affinity and sockets that our maps do not have.
    fn copy_clients(&self) -> Result<(), DatapathError> {
        self.copy_missing::<ServiceClient, Affinity>(&layout::AFFINITY)?;
        self.copy_missing::<SocketKey, SocketBackend>(&layout::SOCKET_BACKENDS)?;
        self.copy_missing::<SocketKey, Endpoint>(&layout::SOCKET_VIPS)?;
        self.copy_missing::<u64, SocketConnection>(&layout::CONNECTED_SOCKETS)
    }

    fn copy_missing<K: Pod, V: Pod>(&self, spec: &MapSpec) -> Result<(), DatapathError> {
        let Some((old, (keys, values))) = self.source(spec)? else { return Ok(()) };
        let table = Table::<K, V>::open(spec, &self.folder.map(spec.name))?;
        old.for_each(&mut |key, value| {
            table.insert_new(&converted(&keys, key), &converted(&values, value)).map(drop)
        })
    }

    fn copy<K: Pod, V: Pod>(&self, spec: &MapSpec) -> Result<(), DatapathError> {
        self.carry::<K, V>(spec, |_, value| value)
    }

    /// Copies the elements of a map; `change` gets the key and the value of each element, and returns the adapted
    /// value.
    fn carry<K: Pod, V: Pod>(
        &self,
        spec: &MapSpec,
        change: impl Fn(&K, V) -> V,
    ) -> Result<(), DatapathError> {
        let Some((old, (keys, values))) = self.source(spec)? else { return Ok(()) };
        let table = Table::<K, V>::open(spec, &self.folder.map(spec.name))?;
        let is_array = spec.is_array();
        let mut elements: (Vec<K>, Vec<V>) = (Vec::new(), Vec::new());
        let write = |(keys, values): &mut (Vec<K>, Vec<V>)| {
            let written = table.update_all(keys, values);
            keys.clear();
            values.clear();
            written
        };
        old.for_each(&mut |key, value| {
            // Skips elements of an array that were never written: they are zero.
            if is_array && value.iter().all(|byte| *byte == 0) {
                return Ok(());
            }
            let key = converted(&keys, key);
            elements.1.push(change(&key, converted(&values, value)));
            elements.0.push(key);
            if elements.0.len() < CHUNK { Ok(()) } else { write(&mut elements) }
        })?;
        write(&mut elements)
    }

    /// The earlier map with its conversions; `None` if the map is shared or does not exist.
    fn source(&self, spec: &MapSpec) -> Result<Option<(RawMap, Conversions)>, DatapathError> {
        if self.shared.contains(spec.name) {
            return Ok(None);
        }
        Ok(self.earlier.map(spec)?.zip(self.earlier.conversions(spec)))
    }

    /// The slots of the earlier flow table; `None` if both versions share the table, or the earlier version has none.
    fn slots(&self) -> Result<Option<EarlierSlots>, DatapathError> {
        let source = self.source(&layout::FLOWS)?;
        source.map(|(map, (_, values))| EarlierSlots::new(&map, values)).transpose()
    }

    /// Copies those entries of this pass that our table does not have. In [`Pass::Rest`], also updates the copies of
    /// flows that were copied before; in [`Pass::Living`], only replaces a copy whose tuple has another flow by now.
    /// Returns how many entries were copied.
    fn copy_flows(&mut self, pass: Pass, filter: &Filter) -> Result<usize, DatapathError> {
        let before = self.copied.len();
        let mut refused = None;
        for rank in Rank::ALL {
            refused = self.copy_ranked(pass, rank, filter)?.or(refused);
        }
        if let Some(error) = refused {
            warn!("cannot take over all connections; the others are cut: {error}");
        }
        Ok(self.copied.len() - before)
    }

    /// Copies the entries of this rank. Returns why our table refused an entry, if it did.
    fn copy_ranked(
        &mut self,
        pass: Pass,
        rank: Rank,
        filter: &Filter,
    ) -> Result<Option<DatapathError>, DatapathError> {
        let table = filter.flows();
        let mut refused = None;
        for_each_flow(self.slots()?, self.source(&layout::CONNTRACK)?, &mut |key, flow| {
            let lives = flow.seen & (seen::FIN | seen::RST) == 0;
            if Rank::of(flow) != rank || pass == Pass::Living && !lives || !is_backed(table, key, flow)? {
                return Ok(());
            }
            let digest = self.hasher.hash_one(key);
            let is_copy = self.copied.contains(&digest) || self.resumed && lives;
            let marks = Mark::of_entry(key, flow.flags);
            match filter.insert_after(marks, || table.insert_new(key, flow)) {
                Ok(true) => drop(self.copied.insert(digest)),
                Ok(false) if is_copy && pass == Pass::Rest => table.merge(key, flow)?,
                // In the pass `Living`, our programs have created no flow yet, so our entry is a copy from the earlier
                // programs. If they now have another flow with this key, the copied flow is over.
                Ok(false) if is_copy && !self.resumed => supersede(table, key, flow)?,
                Ok(false) => {}
                Err(error) => refused = Some(error),
            }
            Ok(())
        })?;
        Ok(refused)
    }
}

/// When the agent copies an entry within a pass: after the entries that this entry relies on. Programs of both versions
/// create and delete flows meanwhile. If the agent copied the forward entry of a flow whose source port another flow
/// has, programs would take the replies of the other flow for replies of the copied flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// Reverse entries: each claims a source port.
    Reverse,
    /// Forward entries, except those of the next rank.
    Forward,
    /// Forward entries of the first flows of masqueraded connections: each relies on the forward entry of the second
    /// flow.
    First,
}

impl Rank {
    const ALL: [Self; 3] = [Self::Reverse, Self::Forward, Self::First];

    const fn of(flow: &Flow) -> Self {
        if flow.is_reply() {
            Self::Reverse
        } else if flow.has_second() {
            Self::First
        } else {
            Self::Forward
        }
    }
}

/// Whether our table has what the entry relies on: the source port of the entry belongs to no other flow, and the
/// second flow of a masqueraded connection is there.
fn is_backed(table: &FlowTable, key: &Tuple, flow: &Flow) -> Result<bool, DatapathError> {
    if Rank::of(flow) == Rank::Reverse || flow.is_tunnelled() {
        return Ok(true);
    }
    let has_port = table.get(&flow.to.reversed())?.is_none_or(|reverse| reverse.leads_back_to(key));
    Ok(has_port && (Rank::of(flow) != Rank::First || table.get(&flow.to)?.is_some()))
}

/// Calls `see` for every entry of the earlier flow table and its overflow.
fn for_each_flow(
    slots: Option<EarlierSlots>,
    overflow: Option<(RawMap, Conversions)>,
    see: &mut dyn FnMut(&Tuple, &Flow) -> Result<(), DatapathError>,
) -> Result<(), DatapathError> {
    if let Some(slots) = slots {
        slots.for_each(see)?;
    }
    let Some((map, (keys, values))) = overflow else { return Ok(()) };
    map.for_each(&mut |key, value| see(&converted(&keys, key), &converted(&values, value)))
}

/// Replaces the copy with this key by `original` if the two belong to different flows: then the copied flow is over. If
/// the copy is a reverse entry, also removes the copied flow's forward entry.
fn supersede(table: &FlowTable, key: &Tuple, original: &Flow) -> Result<(), DatapathError> {
    let Some(copy) = table.get(key)?.filter(|copy| copy.to != original.to) else { return Ok(()) };
    let forward = copy.to.reversed();
    if copy.is_reply() && table.get(&forward)?.is_some_and(|flow| flow.leads_back_to(key)) {
        table.remove(&forward)?;
    }
    table.replace(key, original).map(drop)
}

/// Sets which flows our programs create: `mode` is one of those in [`lb_common::handover`].
pub(crate) fn set_mode(folder: &Folder, mode: u32) -> Result<(), DatapathError> {
    let table = Table::<u32, u32>::open(&layout::HANDOVER, &folder.map(layout::HANDOVER.name))?;
    table.update_all(&[0], &[mode])
}
