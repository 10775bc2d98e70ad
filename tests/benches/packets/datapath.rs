//! Loads the data plane's programs and maps for the benchmark.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
    path::Path,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, Map, MapData, PerCpuArray},
    programs::ProgramFd,
};
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Backend, DeviceInfo, Network, Networks, Outcome, Scheduler, Service, ServiceKey, Settings, Vip,
    device_flags,
    filter::{Mark, ServiceRanges},
    flow_table::{Header, Seed},
    settings_flags, vip_flags,
};
use lb_core::tables::{self, Maglev};
use lb_datapath::FilterMemory;

use crate::{
    candidate::{load, program},
    flows::Snapshot,
    frames::NODE,
};

/// Names of the programs that are measured.
const PROGRAMS: [&str; 3] = ["tc_ingress", "tc_egress", "xdp_native"];

/// Pod networks in the settings. Nearly all clients are external: at most 256 of 65,536 IPv4 flows, and no IPv6 flow,
/// have a client in these networks.
const PODS: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(10, 244, 0, 0)), 16),
    (IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0)), 48),
];
/// Ranges of cluster IPs in the settings.
const SERVICES: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(192, 0, 2, 0)), 24),
    (IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0)), 64),
];

/// The data plane of one BPF object, loaded with the agent's map sizes.
pub(crate) struct Datapath {
    /// Name of the build in reports, such as a revision.
    pub(crate) name: String,
    ebpf: Ebpf,
    filter: Option<FilterMemory>,
    /// Next free slot of `BACKENDS`.
    slot: u32,
    /// Next free id of a Service.
    id: u32,
    /// Next free slot of `TABLES`.
    table: u32,
    /// The snapshot before the first flow; `None` during the setup.
    empty: Option<Snapshot>,
}

impl Datapath {
    pub(crate) fn load(name: &str, object: &Path) -> anyhow::Result<Self> {
        let mut ebpf = open(object)?;
        for name in PROGRAMS {
            load(&mut ebpf, name)?;
        }
        // Objects of earlier revisions may have no flow table and no filter.
        if let Some(map) = ebpf.map_mut("FLOW_TABLE") {
            seed_flow_table(map)?;
        }
        let filter = ebpf.map("FILTER").map(map_filter).transpose()?;
        Ok(Self { name: name.to_owned(), ebpf, filter, slot: 0, id: 1, table: 0, empty: None })
    }

    /// Ends the setup: from now on, [`Self::clear_flows`] restores the present state.
    pub(crate) fn finish_setup(&mut self) -> anyhow::Result<()> {
        self.empty = Some(Snapshot::take(&self.ebpf)?);
        Ok(())
    }

    pub(crate) fn program(&self, name: &str) -> anyhow::Result<&ProgramFd> {
        program(&self.ebpf, name)
    }

    /// Writes settings that give the node these addresses: IPv4, then IPv6.
    pub(crate) fn settings(&mut self, node: [SocketAddr; 2]) -> anyhow::Result<()> {
        let [v4, v6] = node.map(|address| Address::from(address.ip()));
        let settings = Settings {
            internal: Networks::new(PODS.map(network)),
            flags: settings_flags::DROP_UNKNOWN_VIPS | settings_flags::ROUTES_BY_DESTINATION,
            service_ranges: Networks::new(SERVICES.map(network)),
            peers: Networks::new([]),
            denied: Networks::new([]),
            source_v4: v4,
            source_v6: v6,
            first_port: 10_000,
            ports: 20_000,
        };
        if let Some(filter) = &self.filter {
            filter.set_ranges(&ServiceRanges::covering(&settings.service_ranges));
            filter.activate(Some(0));
        }
        Ok(self.array::<Settings>("SETTINGS")?.set(0, settings, 0)?)
    }

    /// Adds a Service with the policy and scheduler of `record`. `backends`, with their weights, must be sorted by
    /// address and port.
    pub(crate) fn service(
        &mut self,
        vip: SocketAddr,
        protocol: u8,
        backends: &[(SocketAddr, u32)],
        record: Service,
    ) -> anyhow::Result<()> {
        let (slot, table_slot) = (self.slot, self.table);
        let record_of = |&(backend, weight): &(SocketAddr, u32)| {
            let (address, port) = (Address::from(backend.ip()), backend.port());
            Backend { address, port, weight, ..Backend::zeroed() }
        };
        let backends: Vec<Backend> = backends.iter().map(record_of).collect();
        let mut slots: Array<_, Backend> = self.array("BACKENDS")?;
        for (slot, backend) in (slot..).zip(&backends) {
            slots.set(slot, backend, 0)?;
        }
        let scheduler = Scheduler::try_from(record.scheduler)
            .map_err(|unknown| anyhow!("there is no scheduler with the number {unknown}"))?;
        let table = tables::table(scheduler, Maglev::default(), &backends).unwrap_or_default();
        let mut entries: Array<_, u32> = self.array("TABLES")?;
        for (slot, entry) in (table_slot..).zip(&table) {
            entries.set(slot, entry, 0)?;
        }
        let (count, entries) = (u32::try_from(backends.len())?, u32::try_from(table.len())?);
        let record = Service {
            id: self.id,
            backends_base: slot,
            backends_count: count,
            table_base: table_slot,
            table_count: entries,
            ..record
        };
        (self.slot, self.table, self.id) = (slot + count, table_slot + entries, self.id + 1);
        let key = ServiceKey::new(vip.ip().into(), vip.port(), protocol);
        if let Some(filter) = &self.filter {
            Mark::of_frontend(&key).set(filter);
        }
        self.map::<ServiceKey, Service>("SERVICES")?.insert(key, record.sealed(&key), 0)?;
        let vips = Vip { flags: vip_flags::CLUSTER_IP };
        Ok(self.map::<Address, Vip>("VIPS")?.insert(Address::from(vip.ip()), vips, 0)?)
    }

    /// Adds the device to `DEVICES` as a wire, which leads to other machines.
    pub(crate) fn wire(&mut self, device: u32, mtu: u32) -> anyhow::Result<()> {
        let flags = device_flags::WIRE | device_flags::XDP_REDIRECT_TARGET | device_flags::XDP_TX;
        let wire = DeviceInfo { mtu, flags, mac: NODE, ..DeviceInfo::UNKNOWN };
        Ok(self.map::<u32, DeviceInfo>("DEVICES")?.insert(device, wire, 0)?)
    }

    pub(crate) fn clear_flows(&self) -> anyhow::Result<()> {
        self.empty.as_ref().context("the setup has not ended")?.restore(&self.ebpf)
    }

    /// Packet counters by outcome since the programs were loaded.
    pub(crate) fn counters(&self) -> anyhow::Result<Counters> {
        let map = self.ebpf.map("STATS").context("there is no map STATS")?;
        let stats: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
        // Objects of other revisions may have fewer outcomes.
        let total = |outcome: Outcome| {
            let index = outcome as u32;
            if index < stats.len() { Ok(stats.get(&index, 0)?.iter().sum()) } else { Ok(0) }
        };
        Ok(Counters(Outcome::ALL.into_iter().map(total).collect::<anyhow::Result<_>>()?))
    }

    fn array<V: Pod>(&mut self, name: &str) -> anyhow::Result<Array<&mut MapData, V>> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("there is no map {name}"))?;
        Array::try_from(map).with_context(|| layout_differs::<u32, V>(name))
    }

    fn map<K: Pod, V: Pod>(&mut self, name: &str) -> anyhow::Result<HashMap<&mut MapData, K, V>> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("there is no map {name}"))?;
        HashMap::try_from(map).with_context(|| layout_differs::<K, V>(name))
    }
}

/// Reads an object and creates its maps, but loads no program.
pub(crate) fn open(object: &Path) -> anyhow::Result<Ebpf> {
    let mut loader = EbpfLoader::new();
    loader.override_global("AYA_LOG_LEVEL", &0u8, true);
    let bytes = std::fs::read(object).with_context(|| format!("reading {}", object.display()))?;
    loader.load(&lb_datapath::link(&bytes)).with_context(|| format!("loading {}", object.display()))
}

fn layout_differs<K, V>(name: &str) -> String {
    format!(
        "the map {name} of this object has another layout than this benchmark writes, with keys of {} bytes and values \
         of {}: the two revisions cannot be compared",
        size_of::<K>(),
        size_of::<V>()
    )
}

/// Gives the flow table a random seed, as the agent does. Without a seed, the hashes of all flows would select the same
/// few slots of the table.
fn seed_flow_table(map: &mut Map) -> anyhow::Result<()> {
    let words = std::array::from_fn(|_| fastrand::u32(..));
    let header = Header { seed: Seed { words, multiplier: fastrand::u64(1..) }, ..Header::zeroed() };
    let mut table: Array<_, Header> =
        Array::try_from(map).with_context(|| layout_differs::<u32, Header>("FLOW_TABLE"))?;
    table.set(0, header, 0).context("seeding the flow table")
}

fn map_filter(map: &Map) -> anyhow::Result<FilterMemory> {
    let Map::Array(map) = map else { bail!("FILTER is no array") };
    FilterMemory::map(map.fd().as_fd()).context("mapping FILTER into memory")
}

fn network((address, prefix): (IpAddr, u8)) -> Network {
    Network::new(address.into(), prefix)
}

/// Packet counters, by outcome.
#[derive(Debug)]
pub(crate) struct Counters(Vec<u64>);

impl Counters {
    /// Number of packets by outcome since `earlier`, only for outcomes that some packet had.
    pub(crate) fn since(&self, earlier: &Self) -> Vec<(Outcome, u64)> {
        let counts = Outcome::ALL.into_iter().zip(self.0.iter().zip(&earlier.0));
        let moved = counts.map(|(outcome, (now, then))| (outcome, now - then));
        moved.filter(|(_, count)| *count > 0).collect()
    }

    /// Returns an error unless exactly `packets` packets were counted since `earlier`, all of them as `outcome`. If
    /// `outcome` is `None`, returns an error if any packet was counted.
    pub(crate) fn ensure_only(
        &self,
        earlier: &Self,
        outcome: Option<Outcome>,
        packets: u64,
    ) -> anyhow::Result<()> {
        let moved = self.since(earlier);
        let wanted: Vec<(Outcome, u64)> = outcome.map(|outcome| (outcome, packets)).into_iter().collect();
        ensure!(
            moved == wanted,
            "{packets} packets should be counted as {outcome:?}, but the counters are: {moved:?}"
        );
        Ok(())
    }
}
