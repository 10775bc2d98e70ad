//! The input of an explanation.

use lb_common::{
    Address, Affinity, AffinityKey, Backend, DeviceInfo, Service, ServiceKey, Settings, Vip,
    conntrack::{Flow, Tuple},
};

use lb_datapath::{DatapathError, Globals, Route};

/// The maps of the data plane and the routes of the node. Each call reads the kernel's current state; none changes it.
#[expect(clippy::missing_errors_doc, reason = "all fail only where the kernel does not answer")]
pub trait Tables {
    /// An entry of the flow table: of `FLOWS` or `CONNTRACK`.
    fn flow(&self, tuple: &Tuple) -> Result<Option<Flow>, DatapathError>;
    /// How many more entries `CONNTRACK`, the overflow of `FLOWS`, can hold. The programs drop a new flow only if
    /// `CONNTRACK` is full.
    fn free_conntrack_entries(&self) -> Result<usize, DatapathError>;
    /// An entry of `SERVICES`.
    fn service(&self, key: &ServiceKey) -> Result<Option<Service>, DatapathError>;
    /// A slice of `BACKENDS`; shorter if the map ends before.
    fn backends(&self, base: u32, count: u32) -> Result<Vec<Backend>, DatapathError>;
    /// A slice of `TABLES`; shorter if the map ends before.
    fn table_entries(&self, base: u32, count: u32) -> Result<Vec<u32>, DatapathError>;
    /// The number of active flows in a slot of `ACTIVE`.
    fn active_flows(&self, slot: u32) -> i64;
    /// An entry of `AFFINITY`.
    fn affinity(&self, key: &AffinityKey) -> Result<Option<Affinity>, DatapathError>;
    /// An entry of `VIPS`.
    fn vip(&self, address: &Address) -> Result<Option<Vip>, DatapathError>;
    /// Whether `SOURCE_RANGES` lets the client use the service.
    fn is_in_source_range(&self, service: u32, client: &Address) -> Result<bool, DatapathError>;
    /// Whether the device is in `INSIDE_DEVICES`.
    fn is_internal_device(&self, device: u32) -> Result<bool, DatapathError>;
    /// An entry of `DEVICES`.
    fn device(&self, device: u32) -> Result<Option<DeviceInfo>, DatapathError>;
    /// The settings of the node.
    fn settings(&self) -> Result<Settings, DatapathError>;
    /// The constants of the loaded programs.
    fn globals(&self) -> Globals;
    /// The route to this address.
    fn route(&self, to: &Address) -> Result<Option<Route>, DatapathError>;
    /// The name of a device; `None` if no device has this interface index.
    fn device_name(&self, device: u32) -> Option<String>;
    /// The name of a service port; `None` for an unknown id.
    fn service_name(&self, id: u32) -> Result<Option<String>, DatapathError>;
    /// The name of an endpoint's pod; `None` if it is unknown.
    fn pod_name(&self, address: &Address) -> Result<Option<String>, DatapathError>;
}
