//! Writes Services, backends, virtual addresses, devices and settings, as the agent would.

use std::net::{IpAddr, SocketAddr};

use aya::maps::{
    Array, HashMap, MapData, PerCpuHashMap,
    lpm_trie::{Key, LpmTrie},
};
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Backend, DeviceInfo, EndpointName, Scheduler, Service, ServiceKey, Settings, SourceRange,
    SourceRangeKey, Vip, device_flags,
    filter::{Mark, ServiceRanges},
    service_flags,
};
use lb_core::tables::{self, Maglev, TableSize};

use super::{super::packets::NODE, Testbed};

/// First slot in `TABLES` of the lookup table, the same for every Service that has one.
const TABLE: u32 = 100;
/// Slot in `ACTIVE` that counts the flows of a Service's first backend, if the scheduler counts them.
pub(super) const COUNTER: u32 = 20;

impl Testbed {
    /// Writes a Service at `vip` with these backends, which must be sorted.
    pub(crate) fn service(&mut self, vip: SocketAddr, protocol: u8, backends: &[SocketAddr]) {
        self.service_with(vip, protocol, backends, Service { id: 1, ..Service::zeroed() });
    }

    /// Like [`Self::service`], with the fields of `record`, except `backends_base` and `backends_count`.
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

    /// Writes backends to the next free slots of `BACKENDS`; returns the first slot and their number.
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
        let mut map: Array<_, Backend> = self.object.map_mut("BACKENDS").unwrap().try_into().unwrap();
        map.set(self.slot, backend, 0).unwrap();
        self.slot += 1;
    }

    /// Writes a Service at `vip` with this scheduler, and with these backends, which must be sorted, and their weights.
    pub(crate) fn service_with_scheduler(
        &mut self,
        vip: SocketAddr,
        protocol: u8,
        scheduler: Scheduler,
        backends: &[(SocketAddr, u32)],
    ) {
        let base = self.slot;
        let record = |(socket, weight): &(SocketAddr, u32)| Backend {
            address: Address::from(socket.ip()),
            port: socket.port(),
            flags: 0,
            weight: *weight,
            active_flows_slot: 0,
        };
        let backends: Vec<Backend> = backends.iter().map(record).collect();
        for backend in &backends {
            let active_flows_slot =
                if scheduler.uses_active_flows() { COUNTER + self.slot - base } else { 0 };
            self.backend(Backend { active_flows_slot, ..*backend });
        }
        let maglev = Maglev { size: TableSize::ALL[0], ..Maglev::default() };
        let table = tables::table(scheduler, maglev, &backends).unwrap_or_default();
        let mut map: Array<_, u32> = self.object.map_mut("TABLES").unwrap().try_into().unwrap();
        (TABLE..).zip(&table).for_each(|(slot, entry)| map.set(slot, entry, 0).unwrap());
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        let record = Service {
            // The id differs by scheduler and slot, so that the Services of a case share no state.
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

    /// Turns on DSR for external clients of the Service; all its backends get `flags`.
    pub(crate) fn enable_dsr(&mut self, vip: SocketAddr, protocol: u8, flags: u16) {
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        let services: HashMap<_, ServiceKey, Service> =
            self.object.map("SERVICES").unwrap().try_into().unwrap();
        let mut record = services.get(&key, 0).unwrap();
        record.flags |= service_flags::MASQUERADE | service_flags::DSR;
        let mut map: Array<_, Backend> = self.object.map_mut("BACKENDS").unwrap().try_into().unwrap();
        for slot in record.backends_base..record.backends_base + record.backends_count {
            let backend = map.get(&slot, 0).unwrap();
            map.set(slot, Backend { flags, ..backend }, 0).unwrap();
        }
        self.record(&key, &record.sealed(&key));
    }

    /// Adds bits of [`service_flags`] to the record of a Service.
    pub(crate) fn add_flags(&mut self, vip: SocketAddr, protocol: u8, flags: u16) {
        let key = ServiceKey::new(Address::from(vip.ip()), vip.port(), protocol);
        let services: HashMap<_, ServiceKey, Service> =
            self.object.map("SERVICES").unwrap().try_into().unwrap();
        let mut record = services.get(&key, 0).unwrap();
        record.flags |= flags;
        self.record(&key, &record.sealed(&key));
    }

    /// Writes a record of `SERVICES` as it is, and sets the mark of the frontend in the filter.
    pub(crate) fn record(&mut self, key: &ServiceKey, record: &Service) {
        let mut map: HashMap<_, ServiceKey, Service> =
            self.object.map_mut("SERVICES").unwrap().try_into().unwrap();
        Mark::of_frontend(key).set(&self.filter);
        map.insert(key, record, 0).unwrap();
    }

    pub(crate) fn clear_services(&mut self) {
        self.clear::<ServiceKey, Service>("SERVICES");
    }

    /// Makes the next Service use the slots of `BACKENDS` again, from the first one on.
    pub(crate) const fn reuse_slots(&mut self) {
        self.slot = 0;
    }

    /// Writes the settings that apply to every packet.
    pub(crate) fn settings(&mut self, settings: &Settings) {
        self.filter.set_ranges(&ServiceRanges::covering(&settings.service_ranges));
        let mut map: Array<_, Settings> = self.object.map_mut("SETTINGS").unwrap().try_into().unwrap();
        map.set(0, settings, 0).unwrap();
    }

    /// Sets which programs create flows while those of another map layout are still attached ([`lb_common::handover`]).
    pub(crate) fn set_handover(&mut self, mode: u32) {
        let mut map: Array<_, u32> = self.object.map_mut("HANDOVER").unwrap().try_into().unwrap();
        map.set(0, mode, 0).unwrap();
    }

    pub(crate) fn add_vip(&mut self, address: IpAddr, flags: u32) {
        let mut map: HashMap<_, Address, Vip> = self.object.map_mut("VIPS").unwrap().try_into().unwrap();
        map.insert(Address::from(address), Vip { flags }, 0).unwrap();
    }

    /// Adds the address of an endpoint to `ENDPOINT_NAMES`, with an empty name.
    pub(crate) fn add_endpoint(&mut self, address: IpAddr) {
        let mut map: HashMap<_, Address, EndpointName> =
            self.object.map_mut("ENDPOINT_NAMES").unwrap().try_into().unwrap();
        map.insert(Address::from(address), EndpointName::zeroed(), 0).unwrap();
    }

    /// Marks the device as a wire, where tunnels of peers end; XDP may redirect packets between wires.
    pub(crate) fn add_wire(&mut self, index: u32, mtu: u32) {
        let mut map: HashMap<_, u32, DeviceInfo> =
            self.object.map_mut("DEVICES").unwrap().try_into().unwrap();
        map.insert(
            index,
            DeviceInfo {
                mtu,
                flags: device_flags::WIRE
                    | device_flags::TUNNELS
                    | device_flags::XDP_REDIRECT_TARGET
                    | device_flags::XDP_TX,
                mac: NODE,
                ..DeviceInfo::UNKNOWN
            },
            0,
        )
        .unwrap();
    }

    /// Makes tunnels of peers end at the loopback device, where packets of the test runs arrive.
    pub(crate) fn end_tunnels(&mut self) {
        let mut map: HashMap<_, u32, DeviceInfo> =
            self.object.map_mut("DEVICES").unwrap().try_into().unwrap();
        map.insert(1, DeviceInfo { flags: device_flags::TUNNELS, ..DeviceInfo::UNKNOWN }, 0).unwrap();
    }

    /// Undoes [`Self::add_wire`].
    pub(crate) fn remove_wire(&mut self, index: u32) {
        let mut map: HashMap<_, u32, DeviceInfo> =
            self.object.map_mut("DEVICES").unwrap().try_into().unwrap();
        map.remove(&index).unwrap();
    }

    /// Marks `lo`, on which the packets of the test runs arrive, as a device of internal clients.
    pub(crate) fn make_clients_internal(&mut self) {
        let mut map: HashMap<_, u32, u32> =
            self.object.map_mut("INSIDE_DEVICES").unwrap().try_into().unwrap();
        map.insert(1, 1, 0).unwrap();
    }

    /// Allows `address/prefix` to use the Service.
    pub(crate) fn allow_source_range(&mut self, service: u32, address: IpAddr, prefix: u8) {
        let SourceRangeKey { prefix_length, range } = SourceRangeKey::new(service, address.into(), prefix);
        let SourceRange { service_and_family, address } = range;
        let [a, b, c, d] = address.words();
        let data = [service_and_family, a, b, c, d];
        self.source_ranges().insert(&Key::new(prefix_length, data), 1, 0).unwrap();
    }

    fn source_ranges(&mut self) -> LpmTrie<&mut MapData, [u32; 5], u32> {
        self.object.map_mut("SOURCE_RANGES").unwrap().try_into().unwrap()
    }

    pub(super) fn clear_source_ranges(&mut self) {
        let mut map = self.source_ranges();
        let keys: Vec<_> = map.keys().map(Result::unwrap).collect();
        for key in keys {
            map.remove(&key).unwrap();
        }
    }

    pub(super) fn clear_turns(&mut self) {
        let mut turns: PerCpuHashMap<_, u32, u32> = self.object.map_mut("TURNS").unwrap().try_into().unwrap();
        let services: Vec<u32> = turns.keys().map(Result::unwrap).collect();
        services.iter().for_each(|service| turns.remove(service).unwrap());
    }
}
