//! The maps and constants that the programs use. `lb-agent explain` follows a packet with them, one lookup at a time.

use std::sync::Arc;

use lb_common::{
    Address, Affinity, DeviceInfo, DnsIntercept, ServiceClient, ServiceKey, Settings, from_fixed,
};

use crate::{
    bpf::{bpffs::Folder, globals::Globals, layout, table::Table},
    error::DatapathError,
    state::{
        active_flows::ActiveFlows, filter::Filter, flow_table::FlowTable, maps::ServiceMaps,
        settings::SettingsMap,
    },
};

/// The maps and constants by which a program decides about a packet. Lookups return the present contents of the maps;
/// settings and constants keep the values that they had when [`Pinned::program_view`](crate::Pinned::program_view) was
/// called.
#[derive(Debug)]
pub struct ProgramView {
    /// The maps that the control plane writes.
    pub service_maps: ServiceMaps,
    /// The flow table: `FLOWS` and its overflow `CONNTRACK`.
    pub flows: Arc<FlowTable>,
    /// Numbers of active flows: the map `ACTIVE`.
    pub active_flows: Arc<ActiveFlows>,
    /// Clients with session affinity: the map `AFFINITY`.
    pub affinity: Table<ServiceClient, Affinity>,
    /// Buckets of the limits on new connections: the map `LIMIT_BUCKETS`.
    pub limit_buckets: Table<ServiceClient, u64>,
    /// Addresses and ports of node-local DNS, for queries and for answers: the map `DNS_INTERCEPT`.
    pub dns_intercepts: Table<ServiceKey, DnsIntercept>,
    /// Addresses of other nodes that may send tunnelled packets: the map `PEERS`.
    pub peers: Table<Address, u32>,
    /// Devices of internal clients: the map `INSIDE_DEVICES`.
    pub internal_devices: Table<u32, u32>,
    /// Devices that programs know: the map `DEVICES`.
    pub devices: Table<u32, DeviceInfo>,
    /// Whether programs of an earlier map layout are still attached ([`lb_common::handover`]): the map `HANDOVER`.
    pub handover: Table<u32, u32>,
    /// The node's settings in force when the view was made.
    pub settings: Settings,
    /// The constants in the loaded programs; the defaults if there is a [`Self::globals_error`].
    pub globals: Globals,
    /// Why the constants could not be read; `None` if they were read. If the map of the constants is not pinned,
    /// reading it takes `CAP_SYS_ADMIN`.
    pub globals_error: Option<DatapathError>,
}

impl ProgramView {
    pub(crate) fn open(folder: &Folder, filter: &Arc<Filter>) -> Result<Self, DatapathError> {
        let (globals, globals_error) = match Globals::read(folder) {
            Ok(globals) => (globals, None),
            Err(error) => (Globals::default(), Some(error)),
        };
        Ok(Self {
            service_maps: ServiceMaps::open(folder, filter)?,
            flows: Arc::clone(filter.flows()),
            active_flows: Arc::new(ActiveFlows::open(folder)?),
            affinity: Table::open(&layout::AFFINITY, &folder.map("AFFINITY"))?,
            limit_buckets: Table::open(&layout::LIMIT_BUCKETS, &folder.map("LIMIT_BUCKETS"))?,
            dns_intercepts: Table::open(&layout::DNS_INTERCEPT, &folder.map("DNS_INTERCEPT"))?,
            peers: Table::open(&layout::PEERS, &folder.map("PEERS"))?,
            internal_devices: Table::open(&layout::INSIDE_DEVICES, &folder.map("INSIDE_DEVICES"))?,
            devices: Table::open(&layout::DEVICES, &folder.map("DEVICES"))?,
            handover: Table::open(&layout::HANDOVER, &folder.map("HANDOVER"))?,
            settings: SettingsMap::open(folder, filter)?.get()?,
            globals,
            globals_error,
        })
    }
}

impl ServiceMaps {
    /// Name of the service port with this id, such as `default/web:http`; `None` if unknown.
    pub fn service_name(&self, id: u32) -> Result<Option<String>, DatapathError> {
        Ok(self.labels_of(id)?.map(|labels| labels.name.without_protocol().to_string()))
    }

    /// Name of the pod with this endpoint address; `None` if unknown.
    pub fn pod_name(&self, address: &Address) -> Result<Option<String>, DatapathError> {
        let name = self.endpoint_names.get(address)?;
        let pod = name.map(|name| from_fixed(&name.pod).to_owned());
        Ok(pod.filter(|pod| !pod.is_empty()))
    }
}
