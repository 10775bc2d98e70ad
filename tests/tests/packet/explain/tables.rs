//! The maps of a testbed as input of `explain`.

use std::cell::RefCell;

use aya::maps::{
    Array, HashMap,
    lpm_trie::{Key, LpmTrie},
};
use lb_agent::explain::Tables;
use lb_common::{
    Address, Affinity, Backend, ConnectionLimits, DeviceInfo, DnsIntercept, Service, ServiceClient,
    ServiceKey, Settings, SourceRange, Vip,
    conntrack::{Flow, Tuple},
};
use lb_datapath::{DatapathError, Globals, Route, Routes};

use super::super::testbed::Testbed;

/// The maps of a testbed, for packets of one device.
pub(super) struct TestbedTables<'a> {
    pub(super) bed: &'a Testbed,
    pub(super) routes: RefCell<Routes>,
    pub(super) device: u32,
    pub(super) globals: Globals,
}

impl TestbedTables<'_> {
    fn get<K: aya::Pod, V: aya::Pod>(&self, map: &str, key: &K) -> Option<V> {
        let map: HashMap<_, K, V> = self.bed.map(map).try_into().unwrap();
        map.get(key, 0).ok()
    }

    fn slice<V: aya::Pod>(&self, map: &str, base: u32, count: u32) -> Vec<V> {
        let map: Array<_, V> = self.bed.map(map).try_into().unwrap();
        (base..base + count).map_while(|slot| map.get(&slot, 0).ok()).collect()
    }

    fn is_allowed(&self, service: u32, client: &Address) -> bool {
        let map: LpmTrie<_, [u32; 5], u32> = self.bed.map("SOURCE_RANGES").try_into().unwrap();
        let SourceRange { service_and_family, address } = SourceRange::new(service, *client);
        let [a, b, c, d] = address.words();
        map.get(&Key::new(SourceRange::BITS, [service_and_family, a, b, c, d]), 0).is_ok()
    }
}

impl Tables for TestbedTables<'_> {
    fn flow(&self, tuple: &Tuple) -> Result<Option<Flow>, DatapathError> {
        Ok(self.bed.flow(tuple))
    }

    fn free_conntrack_entries(&self) -> Result<usize, DatapathError> {
        Ok(if self.bed.header().takes_all == 0 { usize::MAX } else { 256 - self.bed.flows().len() })
    }

    fn service(&self, key: &ServiceKey) -> Result<Option<Service>, DatapathError> {
        Ok(self.get("SERVICES", key))
    }

    fn backends(&self, base: u32, count: u32) -> Result<Vec<Backend>, DatapathError> {
        Ok(self.slice("BACKENDS", base, count))
    }

    fn table_entries(&self, base: u32, count: u32) -> Result<Vec<u32>, DatapathError> {
        Ok(self.slice("TABLES", base, count))
    }

    fn active_flows(&self, slot: u32) -> i64 {
        self.slice::<i64>("ACTIVE", slot, 1)[0]
    }

    fn affinity(&self, key: &ServiceClient) -> Result<Option<Affinity>, DatapathError> {
        Ok(self.get("AFFINITY", key))
    }

    fn vip(&self, address: &Address) -> Result<Option<Vip>, DatapathError> {
        Ok(self.get("VIPS", address))
    }

    fn is_in_source_range(&self, service: u32, client: &Address) -> Result<bool, DatapathError> {
        Ok(self.is_allowed(service, client))
    }

    fn is_node(&self, address: &Address) -> Result<bool, DatapathError> {
        Ok(self.get::<_, u32>("PEERS", address).is_some())
    }

    fn limits(&self, service: u32) -> Result<Option<ConnectionLimits>, DatapathError> {
        Ok(self.get("LIMITS", &service))
    }

    fn limit_bucket(&self, key: &ServiceClient) -> Result<Option<u64>, DatapathError> {
        Ok(self.get("LIMIT_BUCKETS", key))
    }

    fn dns_intercept(&self, key: &ServiceKey) -> Result<Option<DnsIntercept>, DatapathError> {
        Ok(self.get("DNS_INTERCEPT", key))
    }

    fn nanos(&self) -> u64 {
        lb_datapath::monotonic_nanoseconds()
    }

    fn is_internal_device(&self, device: u32) -> Result<bool, DatapathError> {
        Ok(self.get::<u32, u32>("INSIDE_DEVICES", &device).is_some())
    }

    fn device(&self, device: u32) -> Result<Option<DeviceInfo>, DatapathError> {
        Ok(self.get("DEVICES", &device))
    }

    fn settings(&self) -> Result<Settings, DatapathError> {
        Ok(self.slice("SETTINGS", 0, 1)[0])
    }

    fn handover(&self) -> Result<u32, DatapathError> {
        Ok(self.slice("HANDOVER", 0, 1)[0])
    }

    fn globals(&self) -> Globals {
        self.globals
    }

    fn route(&self, to: &Address) -> Result<Option<Route>, DatapathError> {
        self.routes.borrow_mut().look_up(self.device, (*to).into())
    }

    fn device_name(&self, _: u32) -> Option<String> {
        None
    }

    fn service_name(&self, _: u32) -> Result<Option<String>, DatapathError> {
        Ok(None)
    }

    fn pod_name(&self, _: &Address) -> Result<Option<String>, DatapathError> {
        Ok(None)
    }
}
