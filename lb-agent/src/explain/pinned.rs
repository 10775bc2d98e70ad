//! Reads the input of `lb-agent explain` from the pinned maps and the routes of this network namespace.

use std::cell::RefCell;

use lb_common::{
    Address, Affinity, Backend, ConnectionLimits, DeviceInfo, DnsIntercept, Service, ServiceClient,
    ServiceKey, Settings, SourceRange, SourceRangeKey, Vip,
    conntrack::{Flow, Tuple},
    handover::OVER,
};

use super::{step::TraceStep, tables::Tables};
use lb_datapath::{DatapathError, Globals, Pinned, ProgramView, Route, Routes};

/// The pinned maps, and the routes that packets from one device take.
#[derive(Debug)]
pub struct PinnedTables {
    maps: ProgramView,
    routes: RefCell<Routes>,
    device: u32,
}

impl PinnedTables {
    /// Opens the tables of a data plane, for packets of the device with this interface index.
    ///
    /// # Errors
    /// The maps or the routes cannot be opened.
    pub fn open(pinned: &Pinned, device: u32) -> Result<Self, DatapathError> {
        Ok(Self { maps: pinned.program_view()?, routes: RefCell::new(Routes::open()?), device })
    }

    /// A step that says which values the explanation assumes because they cannot be read; `None` if there are none. The
    /// explanation is wrong if the agent uses other values.
    pub fn assumed(&self) -> Option<TraceStep> {
        self.maps.globals_error.as_ref().map(|error| TraceStep::Assumed { error: error.to_string() })
    }
}

impl Tables for PinnedTables {
    fn flow(&self, tuple: &Tuple) -> Result<Option<Flow>, DatapathError> {
        self.maps.flows.get(tuple)
    }

    fn free_conntrack_entries(&self) -> Result<usize, DatapathError> {
        // The programs drop new flows only if the map `CONNTRACK`, which takes the overflow of `FLOWS`, is full.
        let flows = &self.maps.flows;
        Ok((flows.capacity() as usize).saturating_sub(flows.overflowed()))
    }

    fn service(&self, key: &ServiceKey) -> Result<Option<Service>, DatapathError> {
        self.maps.service_maps.services().get(key)
    }

    fn backends(&self, base: u32, count: u32) -> Result<Vec<Backend>, DatapathError> {
        self.maps.service_maps.backends().read_range(base, count)
    }

    fn table_entries(&self, base: u32, count: u32) -> Result<Vec<u32>, DatapathError> {
        self.maps.service_maps.tables().read_range(base, count)
    }

    fn active_flows(&self, slot: u32) -> i64 {
        self.maps.active_flows.get(slot)
    }

    fn affinity(&self, key: &ServiceClient) -> Result<Option<Affinity>, DatapathError> {
        self.maps.affinity.get(key)
    }

    fn vip(&self, address: &Address) -> Result<Option<Vip>, DatapathError> {
        self.maps.service_maps.vips().get(address)
    }

    fn is_in_source_range(&self, service: u32, client: &Address) -> Result<bool, DatapathError> {
        let range = SourceRange::new(service, *client);
        let key = SourceRangeKey { prefix_length: SourceRange::BITS, range };
        Ok(self.maps.service_maps.source_ranges().get(&key)?.is_some())
    }

    fn is_node(&self, address: &Address) -> Result<bool, DatapathError> {
        Ok(self.maps.peers.get(address)?.is_some())
    }

    fn limits(&self, service: u32) -> Result<Option<ConnectionLimits>, DatapathError> {
        self.maps.service_maps.limits().get(&service)
    }

    fn limit_bucket(&self, key: &ServiceClient) -> Result<Option<u64>, DatapathError> {
        self.maps.limit_buckets.get(key)
    }

    fn dns_intercept(&self, key: &ServiceKey) -> Result<Option<DnsIntercept>, DatapathError> {
        self.maps.dns_intercepts.get(key)
    }

    fn nanos(&self) -> u64 {
        lb_datapath::monotonic_nanoseconds()
    }

    fn is_internal_device(&self, device: u32) -> Result<bool, DatapathError> {
        Ok(self.maps.internal_devices.get(&device)?.is_some())
    }

    fn device(&self, device: u32) -> Result<Option<DeviceInfo>, DatapathError> {
        self.maps.devices.get(&device)
    }

    fn settings(&self) -> Result<Settings, DatapathError> {
        Ok(self.maps.settings)
    }

    fn handover(&self) -> Result<u32, DatapathError> {
        Ok(self.maps.handover.get(&0)?.unwrap_or(OVER))
    }

    fn globals(&self) -> Globals {
        self.maps.globals
    }

    fn route(&self, to: &Address) -> Result<Option<Route>, DatapathError> {
        self.routes.borrow_mut().look_up(self.device, (*to).into())
    }

    fn device_name(&self, device: u32) -> Option<String> {
        self.routes.borrow().name(device).map(str::to_owned)
    }

    fn service_name(&self, id: u32) -> Result<Option<String>, DatapathError> {
        self.maps.service_maps.service_name(id)
    }

    fn pod_name(&self, address: &Address) -> Result<Option<String>, DatapathError> {
        self.maps.service_maps.pod_name(address)
    }
}
