//! The input of an explanation: maps and routes, behind a trait, so that tests can replace them.

use lb_common::{
    Address, Affinity, Backend, ConnectionLimits, DeviceInfo, DnsIntercept, Service, ServiceClient,
    ServiceKey, Settings, Vip,
    conntrack::{Flow, Tuple},
};

use lb_datapath::{DatapathError, Globals, Route};

/// The maps of the data plane and the routes of the node. No call changes the kernel's state.
#[expect(clippy::missing_errors_doc, reason = "all fail only where the kernel does not answer")]
pub trait Tables {
    /// The entry of the flow table (`FLOWS` or its overflow `CONNTRACK`) for a tuple.
    fn flow(&self, tuple: &Tuple) -> Result<Option<Flow>, DatapathError>;
    /// How many more entries `CONNTRACK`, the overflow of `FLOWS`, can hold. The programs drop a new flow only if
    /// `CONNTRACK` is full.
    fn free_conntrack_entries(&self) -> Result<usize, DatapathError>;
    /// The record of a frontend in `SERVICES`.
    fn service(&self, key: &ServiceKey) -> Result<Option<Service>, DatapathError>;
    /// `count` backends from slot `base` of `BACKENDS` on; fewer if the map ends before.
    fn backends(&self, base: u32, count: u32) -> Result<Vec<Backend>, DatapathError>;
    /// `count` entries from slot `base` of `TABLES` on; fewer if the map ends before.
    fn table_entries(&self, base: u32, count: u32) -> Result<Vec<u32>, DatapathError>;
    /// The number of active flows in a slot of `ACTIVE`.
    fn active_flows(&self, slot: u32) -> i64;
    /// The entry of `AFFINITY` for a client of a service.
    fn affinity(&self, key: &ServiceClient) -> Result<Option<Affinity>, DatapathError>;
    /// The entry of `VIPS` for an address.
    fn vip(&self, address: &Address) -> Result<Option<Vip>, DatapathError>;
    /// Whether a source range of the service (`SOURCE_RANGES`) contains the client.
    fn is_in_source_range(&self, service: u32, client: &Address) -> Result<bool, DatapathError>;
    /// The limits of the service in `LIMITS`.
    fn limits(&self, service: u32) -> Result<Option<ConnectionLimits>, DatapathError>;
    /// The entry of `LIMIT_BUCKETS` for a client of a service: when the bucket will be full again.
    fn limit_bucket(&self, key: &ServiceClient) -> Result<Option<u64>, DatapathError>;
    /// The entry of `DNS_INTERCEPT` for an address, port and protocol.
    fn dns_intercept(&self, key: &ServiceKey) -> Result<Option<DnsIntercept>, DatapathError>;
    /// The current time in ns of `CLOCK_MONOTONIC`, the clock of `LIMIT_BUCKETS` and `DNS_INTERCEPT`.
    fn nanos(&self) -> u64;
    /// Whether the address is that of another node: whether `PEERS` contains it.
    fn is_node(&self, address: &Address) -> Result<bool, DatapathError>;
    /// Whether `INSIDE_DEVICES` contains the device: if so, packets that enter through it come from internal clients.
    fn is_internal_device(&self, device: u32) -> Result<bool, DatapathError>;
    /// The entry of `DEVICES` for an interface index.
    fn device(&self, device: u32) -> Result<Option<DeviceInfo>, DatapathError>;
    /// The settings of the node, from the map `SETTINGS`.
    fn settings(&self) -> Result<Settings, DatapathError>;
    /// The element of `HANDOVER`: which programs create flows while those of an earlier map layout are still attached
    /// ([`lb_common::handover`]).
    fn handover(&self) -> Result<u32, DatapathError>;
    /// The constants that were set when the programs were loaded.
    fn globals(&self) -> Globals;
    /// The kernel's route to this address; `None` if there is none.
    fn route(&self, to: &Address) -> Result<Option<Route>, DatapathError>;
    /// The name of the interface with this index; `None` if there is none.
    fn device_name(&self, device: u32) -> Option<String>;
    /// The name of the service port with this id; `None` if the id is unknown.
    fn service_name(&self, id: u32) -> Result<Option<String>, DatapathError>;
    /// The name of the pod with this address; `None` if unknown.
    fn pod_name(&self, address: &Address) -> Result<Option<String>, DatapathError>;
}
