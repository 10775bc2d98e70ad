//! The testbed: the loaded maps and programs, which one case at a time uses to run packets through a program.
//!
//! ```text
//! object    loads the object, or takes a spare one      services  writes Services, backends and settings
//! flows     reads and changes flows and counters        events    reads the event ring
//! table     the flow table                              namespace a device with a MAC address
//! early     fragments that wait                         run       runs a packet and compares the result
//! ```

mod early;
mod events;
mod flows;
mod namespace;
mod object;
mod run;
mod services;
mod table;

use std::os::fd::AsFd as _;

use aya::{
    maps::{Array, HashMap, Map},
    programs::Program,
};
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Affinity, AnnounceKey, Announcement, ConnectionLimits, DeviceInfo, DnsIntercept, Endpoint,
    EndpointName, FragmentKey, FragmentedDatagram, Heard, Service, ServiceClient, ServiceKey, Settings, Vip,
    monitor,
};
use lb_datapath::{FilterMemory, Globals};
use lb_tests::skip;

use self::object::Object;

pub(crate) use lb_common::protocol::{SCTP, TCP, UDP};

pub(crate) use self::early::PLACES;
pub(crate) use self::object::{ANNOUNCE_PROGRAM, PROGRAMS, XDP_PROGRAMS};
pub(crate) use self::run::Sent;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    pub(crate) const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];
}

/// The kind of device that the packet arrives on or leaves through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Ethernet,
    /// The device has computed the checksum of the whole packet (`CHECKSUM_COMPLETE`). The kernel fails the run if that
    /// sum is wrong afterwards. Needs Linux 6.17.
    EthernetWithSum,
    /// A device without link-layer header.
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

/// The maps and programs, used by one case at a time.
pub(crate) struct Testbed {
    object: Object,
    /// The filter. The programs check it, unless a case deactivates it.
    filter: FilterMemory,
    device: Device,
    case: String,
    /// The current part of the case.
    label: String,
    step: u32,
    /// The next free slot of `BACKENDS`.
    slot: u32,
}

impl Testbed {
    pub(crate) fn new() -> Self {
        Self::with_size("SERVICES", 64)
    }

    /// A testbed whose programs cannot read `sk_buff::ip_summed`, as on an old kernel.
    pub(crate) fn unlinked() -> Self {
        Self::with_object(Object::unlinked())
    }

    /// A testbed with another size of one map.
    pub(crate) fn with_size(map: &str, entries: u32) -> Self {
        Self::create(map, entries, Globals::default())
    }

    /// A testbed whose programs choose another backend after this number of retransmissions of a SYN.
    pub(crate) fn with_syn_retries(syn_retries: u16) -> Self {
        Self::with_globals(Globals { syn_retries, ..Globals::default() })
    }

    /// A testbed with these constants in the programs.
    pub(crate) fn with_globals(globals: Globals) -> Self {
        Self::create("SERVICES", 64, globals)
    }

    /// Creates a testbed with a spare object if one fits, else with a new one.
    fn create(map: &str, entries: u32, globals: Globals) -> Self {
        Self::with_object(Object::take_or_load(map, entries, globals))
    }

    fn with_object(object: Object) -> Self {
        let Map::Array(map) = object.map("FILTER").unwrap() else { panic!("FILTER is no array") };
        let filter = FilterMemory::map(map.fd().as_fd()).unwrap();
        let (device, case, label) = (Device::Ethernet, String::new(), String::new());
        let mut bed = Self { object, filter, device, case, label, step: 0, slot: 0 };
        bed.clear_turns();
        bed.clear_maps();
        bed
    }

    /// Clears the state of earlier cases and starts a case; returns false if this kernel cannot run it.
    pub(crate) fn start(&mut self, case: &str, device: Device) -> bool {
        namespace::prepare();
        (self.case, self.device, self.slot) = (case.to_owned(), device, 0);
        self.label("");
        self.clear_maps();
        let runs = device != Device::EthernetWithSum || self.has_checksum_complete();
        self.clear_counters();
        if !runs {
            skip::part(
                "packets with CHECKSUM_COMPLETE: `bpf_prog_test_run` cannot make them before Linux 6.17",
            );
        }
        runs
    }

    /// Clears all marks of the filter and activates it: it then excludes every packet for which no mark is set later.
    pub(crate) fn clear_filter(&mut self) {
        [0, 1].into_iter().for_each(|copy| self.filter.zero(copy));
        self.filter.activate(Some(0));
    }

    pub(crate) const fn filter(&self) -> &FilterMemory {
        &self.filter
    }

    fn clear_maps(&mut self) {
        self.clear::<ServiceKey, Service>("SERVICES");
        self.take_all_into_overflow(false);
        self.clear_flows();
        self.expire_next_hops();
        self.forget_exhausted_ports();
        self.clear_filter();
        self.clear::<FragmentKey, FragmentedDatagram>("FRAGMENTS");
        self.clear_held();
        self.clear::<Address, EndpointName>("ENDPOINT_NAMES");
        self.clear::<ServiceClient, Affinity>("AFFINITY");
        self.clear::<u32, ConnectionLimits>("LIMITS");
        self.clear::<ServiceClient, u64>("LIMIT_BUCKETS");
        self.clear::<Endpoint, u32>("UNANSWERED");
        self.clear::<Address, Vip>("VIPS");
        self.clear::<u32, u32>("INSIDE_DEVICES");
        self.clear::<Address, u32>("PEERS");
        self.clear::<u32, DeviceInfo>("DEVICES");
        self.clear::<ServiceKey, DnsIntercept>("DNS_INTERCEPT");
        self.clear_source_ranges();
        self.clear::<AnnounceKey, Announcement>("ANNOUNCED");
        self.clear::<AnnounceKey, Heard>("ANNOUNCE_HEARD");
        self.settings(&Settings::zeroed());
        self.clear_counters();
        self.disable_events();
        self.monitor().set(monitor::LOST, 0, 0).unwrap();
        self.events();
    }

    /// Sets the name of the next part of the case, and restarts the count of its steps.
    pub(crate) fn label(&mut self, label: &str) {
        label.clone_into(&mut self.label);
        self.step = 0;
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The case, its part and the step, for messages.
    fn context(&self) -> String {
        let Self { case, label, step, .. } = self;
        if label.is_empty() {
            format!("{case}, step {step}")
        } else {
            format!("{case}: {label}, step {step}")
        }
    }

    /// Begins the next step; returns its [`Self::context`].
    pub(crate) fn next_step(&mut self) -> String {
        self.step += 1;
        self.context()
    }

    pub(crate) fn map(&self, name: &str) -> &Map {
        self.object.map(name).unwrap()
    }

    pub(crate) fn program(&self, name: &str) -> &Program {
        self.object.program(name).unwrap()
    }

    /// Writes an element of a hash map.
    pub(crate) fn insert<K: aya::Pod, V: aya::Pod>(&mut self, map: &str, key: K, value: V) {
        let mut map: HashMap<_, K, V> = self.object.map_mut(map).unwrap().try_into().unwrap();
        map.insert(key, value, 0).unwrap();
    }

    /// Reads an element of a hash map.
    pub(crate) fn read<K: aya::Pod, V: aya::Pod>(&self, map: &str, key: K) -> Option<V> {
        let map: HashMap<_, K, V> = self.map(map).try_into().unwrap();
        map.get(&key, 0).ok()
    }

    /// Writes an element of an array.
    pub(crate) fn put<V: aya::Pod>(&mut self, map: &str, slot: u32, value: V) {
        let mut map: Array<_, V> = self.object.map_mut(map).unwrap().try_into().unwrap();
        map.set(slot, value, 0).unwrap();
    }

    /// Deletes all elements of a hash map.
    pub(crate) fn clear<K: aya::Pod, V: aya::Pod>(&mut self, map: &str) {
        let mut map: HashMap<_, K, V> = self.object.map_mut(map).unwrap().try_into().unwrap();
        let keys: Vec<K> = map.keys().map(Result::unwrap).collect();
        for key in keys {
            map.remove(&key).unwrap();
        }
    }
}
