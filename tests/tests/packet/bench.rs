//! The loaded object, and one packet through one of its programs.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    ops::{Deref, DerefMut},
    sync::Mutex,
    thread,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{
        Array, HashMap, MapData, PerCpuArray, PerCpuHashMap, PerCpuValues, RingBuf,
        lpm_trie::{Key, LpmTrie},
    },
    programs::{Program, SchedClassifier, Xdp},
    util::nr_cpus,
};
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Affinity, AffinityKey, Backend, DeviceInfo, Event, FragmentKey, FragmentPorts, Outcome,
    Scheduler, Service, ServiceKey, Settings, SourceRange, SourceRangeKey, Vip,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags},
    device_flags, monitor, service_flags,
};
use lb_core::tables::{self, Maglev, TableSize};
use lb_datapath::Globals;
use lb_tests::skip;

use super::{
    packets::Packet,
    report::assert_same_packet,
    test_run::{self, test_run},
};

pub(crate) use lb_common::protocol::{SCTP, TCP, UDP};

pub(crate) const PROGRAMS: [&str; 4] = ["tc_ingress", "tc_egress", "tc_ingress_l3", "tc_egress_l3"];
pub(crate) const XDP_PROGRAMS: [&str; 2] = ["xdp_native", "xdp_generic"];

/// The maps whose default sizes would cost memory for nothing.
const SIZES: [(&str, u32); 11] = [
    ("SERVICES", 64),
    ("BACKENDS", 64),
    ("TABLES", 512),
    ("ACTIVE", 64),
    ("CONNTRACK", 256),
    ("FRAGMENTS", 1024),
    ("VIPS", 16),
    ("SOURCE_RANGES", 16),
    ("SERVICE_NAMES", 1),
    ("ENDPOINT_NAMES", 1),
    ("EVENTS", 65_536),
];

/// Where the table of the one service that has one begins.
const TABLE: u32 = 100;
/// The counter of the first backend of the one service whose scheduler counts.
const COUNTER: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    pub(crate) const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];
}

/// What kind of device the packet passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Ethernet,
    /// It has summed up the whole packet (`CHECKSUM_COMPLETE`). The kernel fails the run if that sum is not right
    /// afterwards. Linux 6.17 and newer can do that.
    EthernetWithSum,
    /// There is no link-layer header.
    Bare,
}

impl Device {
    pub(crate) const ALL: [Self; 3] = [Self::Ethernet, Self::EthernetWithSum, Self::Bare];

    fn program(self, hook: Hook) -> &'static str {
        match (self, hook) {
            (Self::Ethernet | Self::EthernetWithSum, Hook::Ingress) => "tc_ingress",
            (Self::Ethernet | Self::EthernetWithSum, Hook::Egress) => "tc_egress",
            (Self::Bare, Hook::Ingress) => "tc_ingress_l3",
            (Self::Bare, Hook::Egress) => "tc_egress_l3",
        }
    }
}

/// What `linux/pkt_cls.h` calls the return code.
fn action_name(action: i32) -> String {
    match action {
        -1 => "TC_ACT_UNSPEC".into(),
        0 => "TC_ACT_OK".into(),
        2 => "TC_ACT_SHOT".into(),
        7 => "TC_ACT_REDIRECT".into(),
        other => format!("action {other}"),
    }
}

/// Objects that tests of this process are done with. To load one takes longer than most tests, on old kernels by far: they
/// verify ten times as many instructions.
static SPARE: Mutex<Vec<Ebpf>> = Mutex::new(Vec::new());

/// A loaded object, to be used again unless a test has failed with it.
struct Loaded {
    ebpf: Option<Ebpf>,
    /// Its maps have the usual sizes.
    usual: bool,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.usual && !thread::panicking() {
            SPARE.lock().unwrap().extend(self.ebpf.take());
        }
    }
}

impl Deref for Loaded {
    type Target = Ebpf;

    fn deref(&self) -> &Ebpf {
        self.ebpf.as_ref().unwrap()
    }
}

impl DerefMut for Loaded {
    fn deref_mut(&mut self) -> &mut Ebpf {
        self.ebpf.as_mut().unwrap()
    }
}

pub(crate) struct Bench {
    ebpf: Loaded,
    device: Device,
    case: String,
    /// What of it is going on.
    label: String,
    step: u32,
    /// The next free slot of `BACKENDS`.
    slot: u32,
}

/// Loading and emptying.
impl Bench {
    pub(crate) fn new() -> Self {
        Self::with_size("SERVICES", 64)
    }

    /// With one map of another size.
    pub(crate) fn with_size(map: &str, entries: u32) -> Self {
        Self::made(map, entries, Globals::default())
    }

    /// Where clients are led to another backend after so many retransmissions of a SYN.
    pub(crate) fn with_syn_retries(syn_retries: u16) -> Self {
        Self::with_globals(Globals { syn_retries, ..Globals::default() })
    }

    /// With this written in the programs, which have the usual seed.
    pub(crate) fn with_globals(globals: Globals) -> Self {
        Self::made("SERVICES", 64, globals)
    }

    /// One that nobody uses any more, or a new one.
    fn made(map: &str, entries: u32, globals: Globals) -> Self {
        let usual = SIZES.contains(&(map, entries)) && globals == Globals::default();
        let spare = if usual { SPARE.lock().unwrap().pop() } else { None };
        let ebpf = spare.unwrap_or_else(|| Self::load(map, entries, globals));
        let ebpf = Loaded { ebpf: Some(ebpf), usual };
        let (device, case, label) = (Device::Ethernet, String::new(), String::new());
        let mut bench = Self { ebpf, device, case, label, step: 0, slot: 0 };
        bench.forget_turns();
        bench.empty();
        bench
    }

    fn load(map: &str, entries: u32, globals: Globals) -> Ebpf {
        let direct = u8::from(globals.direct);
        let mut loader = EbpfLoader::new();
        loader.override_global("AYA_LOG_LEVEL", &0u8, true);
        loader.override_global("SYN_RETRIES", &globals.syn_retries, true);
        loader.override_global("DIRECT", &direct, true);
        for (name, default) in SIZES {
            loader.map_max_entries(name, if name == map { entries } else { default });
        }
        let mut ebpf = loader.load(lb_datapath::OBJECT).expect("these tests need root");
        for name in PROGRAMS {
            let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        for name in XDP_PROGRAMS {
            let program: &mut Xdp = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        ebpf
    }

    /// Empties all maps and starts a case; false where this kernel cannot do it.
    pub(crate) fn start(&mut self, case: &str, device: Device) -> bool {
        (self.case, self.device, self.slot) = (case.to_owned(), device, 0);
        self.label("");
        self.empty();
        let runs = device != Device::EthernetWithSum || self.can_sum();
        self.clear_counters();
        if !runs {
            skip::part(
                "packets whose sum the device has computed, as `bpf_prog_test_run` cannot make them before 6.17",
            );
        }
        runs
    }

    fn empty(&mut self) {
        self.clear::<ServiceKey, Service>("SERVICES");
        self.clear::<Tuple, Flow>("CONNTRACK");
        self.clear::<FragmentKey, FragmentPorts>("FRAGMENTS");
        self.clear::<AffinityKey, Affinity>("AFFINITY");
        self.clear::<Address, Vip>("VIPS");
        self.clear::<u32, u32>("INSIDE_DEVICES");
        self.clear::<u32, DeviceInfo>("DEVICES");
        self.clear_source_ranges();
        self.settings(&Settings::zeroed());
        self.clear_counters();
        self.unwatch();
        self.monitor().set(monitor::LOST, 0, 0).unwrap();
        self.events();
    }

    /// Names what comes next.
    pub(crate) fn label(&mut self, label: &str) {
        label.clone_into(&mut self.label);
        self.step = 0;
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Where in which case we are.
    fn place(&self) -> String {
        let Self { case, label, step, .. } = self;
        if label.is_empty() {
            format!("{case}, step {step}")
        } else {
            format!("{case}: {label}, step {step}")
        }
    }

    pub(crate) fn forget_services(&mut self) {
        self.clear::<ServiceKey, Service>("SERVICES");
    }

    pub(crate) fn forget_flows(&mut self) {
        self.clear::<Tuple, Flow>("CONNTRACK");
    }

    /// Lets time pass for all clients with affinity.
    pub(crate) fn age_affinity(&mut self, ticks: u32) {
        let mut map: HashMap<_, AffinityKey, Affinity> =
            self.ebpf.map_mut("AFFINITY").unwrap().try_into().unwrap();
        let mut entries: Vec<_> = map.iter().map(Result::unwrap).collect();
        for (_, affinity) in &mut entries {
            affinity.last_used = Tick(affinity.last_used.0.wrapping_sub(ticks));
        }
        for (key, affinity) in &entries {
            map.insert(key, affinity, 0).unwrap();
        }
    }

    fn clear<K: aya::Pod, V: aya::Pod>(&mut self, map: &str) {
        let mut map: HashMap<_, K, V> = self.ebpf.map_mut(map).unwrap().try_into().unwrap();
        let keys: Vec<K> = map.keys().map(Result::unwrap).collect();
        for key in keys {
            map.remove(&key).unwrap();
        }
    }

    fn forget_turns(&mut self) {
        let mut turns: PerCpuHashMap<_, u32, u32> = self.ebpf.map_mut("TURNS").unwrap().try_into().unwrap();
        let services: Vec<u32> = turns.keys().map(Result::unwrap).collect();
        services.iter().for_each(|service| turns.remove(service).unwrap());
    }

    fn clear_source_ranges(&mut self) {
        let mut map = self.source_ranges();
        let keys: Vec<_> = map.keys().map(Result::unwrap).collect();
        for key in keys {
            map.remove(&key).unwrap();
        }
    }

    fn clear_counters(&mut self) {
        let mut stats: PerCpuArray<_, u64> = self.ebpf.map_mut("STATS").unwrap().try_into().unwrap();
        for outcome in Outcome::ALL {
            let zeros = PerCpuValues::try_from(vec![0; nr_cpus().unwrap()]).unwrap();
            stats.set(outcome as u32, zeros, 0).unwrap();
        }
    }
}

/// The state.
impl Bench {
    /// Makes `backends`, which must be sorted, the backends of `vip`.
    pub(crate) fn service(&mut self, vip: SocketAddr, protocol: u8, backends: &[SocketAddr]) {
        self.service_with(vip, protocol, backends, Service { id: 1, ..Service::zeroed() });
    }

    /// The same, with the policy of `record`.
    pub(crate) fn service_with(
        &mut self,
        vip: SocketAddr,
        protocol: u8,
        backends: &[SocketAddr],
        record: Service,
    ) {
        let (backends_base, backends_count) = self.slice(backends, 0);
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        self.record(&key, &Service { backends_base, backends_count, ..record }.sealed(&key));
    }

    /// Writes a slice of `BACKENDS`; its base and length.
    pub(crate) fn slice(&mut self, backends: &[SocketAddr], flags: u16) -> (u32, u32) {
        let base = self.slot;
        for backend in backends {
            self.backend(Backend {
                address: Address::from(backend.ip()),
                port: backend.port(),
                flags,
                weight: 1,
                active_flows_slot: 0,
            });
        }
        (base, self.slot - base)
    }

    fn backend(&mut self, backend: Backend) {
        let mut map: Array<_, Backend> = self.ebpf.map_mut("BACKENDS").unwrap().try_into().unwrap();
        map.set(self.slot, backend, 0).unwrap();
        self.slot += 1;
    }

    /// Makes `backends`, which must be sorted, with their weights the backends of `vip`, to be chosen by `scheduler`.
    pub(crate) fn scheduled(
        &mut self,
        vip: SocketAddr,
        protocol: u8,
        scheduler: Scheduler,
        backends: &[(SocketAddr, u32)],
    ) {
        let base = self.slot;
        let of = |(socket, weight): &(SocketAddr, u32)| Backend {
            address: Address::from(socket.ip()),
            port: socket.port(),
            flags: 0,
            weight: *weight,
            active_flows_slot: 0,
        };
        let backends: Vec<Backend> = backends.iter().map(of).collect();
        for backend in &backends {
            let counter = if scheduler.uses_active_flows() { COUNTER + self.slot - base } else { 0 };
            self.backend(Backend { active_flows_slot: counter, ..*backend });
        }
        let maglev = Maglev { size: TableSize::ALL[0], ..Maglev::default() };
        let table = tables::table(scheduler, maglev, &backends).unwrap_or_default();
        let mut map: Array<_, u32> = self.ebpf.map_mut("TABLES").unwrap().try_into().unwrap();
        (TABLE..).zip(&table).for_each(|(slot, place)| map.set(slot, place, 0).unwrap());
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        let record = Service {
            // One of its own, so that nothing is left of another case.
            id: self.slot + (u32::from(scheduler as u8) + 1) * 1000,
            backends_base: base,
            backends_count: self.slot - base,
            table_base: TABLE,
            table_count: u32::try_from(table.len()).unwrap(),
            scheduler: scheduler as u8,
            ..Service::zeroed()
        };
        self.record(&key, &record.sealed(&key));
    }

    /// Lets the service's backends, all with these flags, answer clients from outside directly.
    pub(crate) fn make_direct(&mut self, vip: SocketAddr, protocol: u8, flags: u16) {
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        let services: HashMap<_, ServiceKey, Service> =
            self.ebpf.map("SERVICES").unwrap().try_into().unwrap();
        let mut record = services.get(&key, 0).unwrap();
        record.flags |= service_flags::MASQUERADE | service_flags::DSR;
        let mut map: Array<_, Backend> = self.ebpf.map_mut("BACKENDS").unwrap().try_into().unwrap();
        for slot in record.backends_base..record.backends_base + record.backends_count {
            let backend = map.get(&slot, 0).unwrap();
            map.set(slot, Backend { flags, ..backend }, 0).unwrap();
        }
        self.record(&key, &record.sealed(&key));
    }

    /// How many flows are active, by backend of the last service whose scheduler counts.
    pub(crate) fn active(&self, backends: u32) -> Vec<i64> {
        let map: Array<_, i64> = self.ebpf.map("ACTIVE").unwrap().try_into().unwrap();
        (COUNTER..COUNTER + backends).map(|counter| map.get(&counter, 0).unwrap()).collect()
    }

    /// Starts to count from here.
    pub(crate) fn set_active(&mut self, counts: &[i64]) {
        let mut map: Array<_, i64> = self.ebpf.map_mut("ACTIVE").unwrap().try_into().unwrap();
        (COUNTER..).zip(counts).for_each(|(counter, count)| map.set(counter, count, 0).unwrap());
    }

    /// Where a client's flow goes.
    pub(crate) fn backend_of(&self, sent: &Packet) -> SocketAddr {
        let map: HashMap<_, Tuple, Flow> = self.ebpf.map("CONNTRACK").unwrap().try_into().unwrap();
        let to = map.get(&sent.tuple(), 0).unwrap().to;
        SocketAddr::new(to.destination.into(), to.destination_port)
    }

    /// What holds for every packet from now on.
    pub(crate) fn settings(&mut self, settings: &Settings) {
        let mut map: Array<_, Settings> = self.ebpf.map_mut("SETTINGS").unwrap().try_into().unwrap();
        map.set(0, settings, 0).unwrap();
    }

    pub(crate) fn vip(&mut self, address: IpAddr, flags: u32) {
        let mut map: HashMap<_, Address, Vip> = self.ebpf.map_mut("VIPS").unwrap().try_into().unwrap();
        map.insert(Address::from(address), Vip { flags }, 0).unwrap();
    }

    /// Makes the device one of those between which packets may pass, with XDP.
    pub(crate) fn wire(&mut self, index: u32, mtu: u32) {
        let mut map: HashMap<_, u32, DeviceInfo> = self.ebpf.map_mut("DEVICES").unwrap().try_into().unwrap();
        map.insert(
            index,
            DeviceInfo { mtu, flags: device_flags::WIRE | device_flags::XDP_REDIRECT_TARGET },
            0,
        )
        .unwrap();
    }

    /// Makes the device no such device any more.
    pub(crate) fn no_wire(&mut self, index: u32) {
        let mut map: HashMap<_, u32, DeviceInfo> = self.ebpf.map_mut("DEVICES").unwrap().try_into().unwrap();
        map.remove(&index).unwrap();
    }

    /// Makes whoever sends through the device of the test runs (`lo`) a client inside the cluster.
    pub(crate) fn inside_device(&mut self) {
        let mut map: HashMap<_, u32, u32> = self.ebpf.map_mut("INSIDE_DEVICES").unwrap().try_into().unwrap();
        map.insert(1, 1, 0).unwrap();
    }

    /// Lets `address/prefix` use the service.
    pub(crate) fn source_range(&mut self, service: u32, address: IpAddr, prefix: u8) {
        let SourceRangeKey { prefix_length, range } = SourceRangeKey::new(service, address.into(), prefix);
        let SourceRange { service_and_family, address } = range;
        let [a, b, c, d] = address.words();
        let data = [service_and_family, a, b, c, d];
        self.source_ranges().insert(&Key::new(prefix_length, data), 1, 0).unwrap();
    }

    fn source_ranges(&mut self) -> LpmTrie<&mut MapData, [u32; 5], u32> {
        self.ebpf.map_mut("SOURCE_RANGES").unwrap().try_into().unwrap()
    }

    /// Writes a record of `SERVICES` as it is.
    pub(crate) fn record(&mut self, key: &ServiceKey, record: &Service) {
        let mut map: HashMap<_, ServiceKey, Service> =
            self.ebpf.map_mut("SERVICES").unwrap().try_into().unwrap();
        map.insert(key, record, 0).unwrap();
    }

    pub(crate) fn conntrack(&mut self) -> HashMap<&mut MapData, Tuple, Flow> {
        self.ebpf.map_mut("CONNTRACK").unwrap().try_into().unwrap()
    }

    pub(crate) fn flows(&self) -> BTreeMap<Tuple, Flow> {
        let map: HashMap<_, Tuple, Flow> = self.ebpf.map("CONNTRACK").unwrap().try_into().unwrap();
        map.iter().map(Result::unwrap).collect()
    }

    pub(crate) fn counters(&self) -> Vec<u64> {
        let stats: PerCpuArray<_, u64> = self.ebpf.map("STATS").unwrap().try_into().unwrap();
        let total = |outcome: Outcome| stats.get(&(outcome as u32), 0).unwrap().iter().sum();
        Outcome::ALL.into_iter().map(total).collect()
    }

    /// Has exactly these flows in the map.
    pub(crate) fn restore(&mut self, flows: &BTreeMap<Tuple, Flow>) {
        self.forget_flows();
        let mut map = self.conntrack();
        for (key, flow) in flows {
            map.insert(key, flow, 0).unwrap();
        }
    }

    /// Lets the ways be asked for anew, as they are after about a second.
    pub(crate) fn forget_hops(&mut self) {
        let mut flows = self.flows();
        flows.values_mut().for_each(|flow| flow.next_hop.resolved_at = Tick(0));
        self.restore(&flows);
    }

    /// Services may be written anew, from the first slot on.
    pub(crate) const fn reuse_slots(&mut self) {
        self.slot = 0;
    }

    /// The counters that have moved, by how much.
    pub(crate) fn moved_since(&self, before: &[u64]) -> Vec<(Outcome, u64)> {
        let moved = Outcome::ALL.into_iter().zip(before.iter().zip(self.counters()));
        let moved = moved.map(|(outcome, (before, after))| (outcome, after - before));
        moved.filter(|(_, difference)| *difference != 0).collect()
    }

    pub(crate) fn map(&self, name: &str) -> &aya::maps::Map {
        self.ebpf.map(name).unwrap()
    }

    /// Writes an element of an array.
    pub(crate) fn put<V: aya::Pod>(&mut self, map: &str, slot: u32, value: V) {
        let mut map: Array<_, V> = self.ebpf.map_mut(map).unwrap().try_into().unwrap();
        map.set(slot, value, 0).unwrap();
    }

    /// Loses one of the entries of flows: the `nth` of all, if there are so many.
    pub(crate) fn forget_one_flow(&mut self, nth: usize) {
        let key = self.flows().into_keys().nth(nth);
        key.into_iter().for_each(|key| self.conntrack().remove(&key).unwrap());
    }

    pub(crate) fn program(&self, name: &str) -> &Program {
        self.ebpf.program(name).unwrap()
    }

    /// Goes on to the next step; where that is.
    pub(crate) fn next_step(&mut self) -> String {
        self.step += 1;
        self.place()
    }

    /// Whether `CONNTRACK` holds just this many flows, two entries each.
    #[track_caller]
    pub(crate) fn assert_flows(&self, count: usize) {
        let flows = self.flows();
        assert_eq!(flows.len(), 2 * count, "{}: {flows:#?}", self.place());
    }

    /// Whether both entries are there for the flow in which `sent` becomes `translated`, and in this phase.
    #[track_caller]
    pub(crate) fn assert_flow(&self, sent: &Packet, translated: &Packet, phase: Phase) {
        let flows = self.flows();
        let (from, to) = (sent.tuple(), translated.tuple());
        let context = format!("{}: {from:?} -> {to:?} in {flows:#?}", self.place());
        let (Some(forward), Some(reply)) = (flows.get(&from), flows.get(&to.reversed())) else {
            panic!("{context}");
        };
        assert_eq!(forward.to, to, "{context}");
        assert_eq!(reply.to, from.reversed(), "{context}");
        let hairpin = to.source == from.destination;
        let (sends, answers) = if hairpin {
            (flow_flags::HAIRPIN, flow_flags::REPLY | flow_flags::HAIRPIN)
        } else {
            (0, flow_flags::REPLY | flow_flags::AT_EGRESS)
        };
        assert_eq!((forward.flags, reply.flags), (sends, answers), "{context}");
        assert_eq!(Phase::of(forward, reply), phase, "{context}");
    }
}

/// Listening.
impl Bench {
    /// Lets the programs make events for so many ticks from now on.
    pub(crate) fn watch(&mut self, ticks: u32) {
        let until = lb_datapath::Conntrack::now().0 + ticks;
        self.monitor().set(monitor::UNTIL, u64::from(until), 0).unwrap();
    }

    pub(crate) fn unwatch(&mut self) {
        self.monitor().set(monitor::UNTIL, 0, 0).unwrap();
    }

    /// The events since this was last asked.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut ring: RingBuf<_> = self.ebpf.map_mut("EVENTS").unwrap().try_into().unwrap();
        let mut events = Vec::new();
        while let Some(octets) = ring.next() {
            events.push(bytemuck::pod_read_unaligned(&octets));
        }
        events
    }

    /// How many events there was no room for.
    pub(crate) fn lost_events(&mut self) -> u64 {
        self.monitor().get(&monitor::LOST, 0).unwrap()
    }

    fn monitor(&mut self) -> Array<&mut MapData, u64> {
        self.ebpf.map_mut("MONITOR").unwrap().try_into().unwrap()
    }
}

/// Running.
impl Bench {
    /// Runs a packet through the program of this hook.
    #[track_caller]
    pub(crate) fn send(&mut self, hook: Hook, packet: &Packet) -> Sent {
        let packet = self.on_device(packet);
        self.run(hook, &packet.bytes())
    }

    /// Runs any octets, the first 14 of them an Ethernet header, which is taken off for a bare device.
    #[track_caller]
    pub(crate) fn send_octets(&mut self, hook: Hook, octets: &[u8]) -> Sent {
        let from = if self.device == Device::Bare { 14 } else { 0 };
        self.run(hook, &octets[from..])
    }

    fn on_device(&self, packet: &Packet) -> Packet {
        if self.device == Device::Bare { packet.clone().bare() } else { packet.clone() }
    }

    /// Runs any octets as they are.
    #[track_caller]
    pub(crate) fn run(&mut self, hook: Hook, input: &[u8]) -> Sent {
        let program = self.device.program(hook);
        let case = format!("{} ({program})", self.next_step());
        let before = self.counters();
        let mut output = vec![0; input.len() + 512];
        let flags = if self.device == Device::EthernetWithSum { test_run::CHECKSUM_COMPLETE } else { 0 };
        let result = test_run(self.program(program).fd().unwrap(), input, &mut output, &[], flags);
        let (action, length) = result.unwrap_or_else(|error| panic!("{case}: {error}"));
        let action = action.cast_signed();
        output.truncate(length);
        let moved = self.moved_since(&before);
        Sent { case, device: self.device, input: input.to_vec(), output, action, moved }
    }

    fn can_sum(&self) -> bool {
        let program = self.program("tc_ingress").fd().unwrap();
        test_run(program, &[0; 64], &mut [0; 64], &[], test_run::CHECKSUM_COMPLETE).is_ok()
    }
}

/// What became of a packet. It does nothing until it is compared.
#[must_use]
pub(crate) struct Sent {
    case: String,
    device: Device,
    input: Vec<u8>,
    pub(crate) output: Vec<u8>,
    action: i32,
    pub(crate) moved: Vec<(Outcome, u64)>,
}

impl Sent {
    /// It goes on, as `expected`.
    #[track_caller]
    pub(crate) fn passes(self, outcome: Outcome, expected: &Packet) {
        self.check(-1, outcome);
        self.compare(expected);
    }

    /// It goes on as it is.
    #[track_caller]
    pub(crate) fn passes_untouched(self, outcome: Outcome) {
        self.check(-1, outcome);
        self.compare_octets(&self.input);
    }

    /// It goes on as it is, whatever the outcome.
    #[track_caller]
    pub(crate) fn passes_unchanged(self) {
        assert_eq!(action_name(self.action), action_name(-1), "{}: {:?}", self.case, self.moved);
        self.compare_octets(&self.input);
    }

    /// It goes back through the device, as `expected`.
    #[track_caller]
    pub(crate) fn bounces(self, outcome: Outcome, expected: &Packet) {
        self.check(7, outcome);
        self.compare(expected);
    }

    /// It goes back through the device; what it has become is compared elsewhere.
    #[track_caller]
    pub(crate) fn turns_around(self, outcome: Outcome) {
        self.check(7, outcome);
    }

    /// It goes on; what it has become is compared elsewhere.
    #[track_caller]
    pub(crate) fn goes_on(self, outcome: Outcome) {
        self.check(-1, outcome);
    }

    /// It is dropped.
    #[track_caller]
    pub(crate) fn drops(self, outcome: Outcome) {
        self.check(2, outcome);
    }

    #[track_caller]
    fn check(&self, action: i32, outcome: Outcome) {
        let (found, wanted) = (action_name(self.action), action_name(action));
        let moved = &self.moved;
        assert_eq!(found, wanted, "{}: the program returns this; counted: {moved:?}", self.case);
        assert_eq!(*moved, [(outcome, 1)], "{}: these counters have moved", self.case);
    }

    #[track_caller]
    fn compare(&self, expected: &Packet) {
        let expected = if self.device == Device::Bare { expected.clone().bare() } else { expected.clone() };
        self.compare_octets(&expected.bytes());
    }

    #[track_caller]
    fn compare_octets(&self, expected: &[u8]) {
        let ethernet = self.device != Device::Bare;
        assert_same_packet(&self.case, ethernet, &self.input, &self.output, expected);
    }
}
