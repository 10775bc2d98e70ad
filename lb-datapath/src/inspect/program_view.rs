//! The maps and constants that the programs use, one lookup at a time: `lb-agent explain` follows a packet with them.

use std::sync::Arc;

use lb_common::{Address, Affinity, AffinityKey, DeviceInfo, Settings, from_fixed};

use crate::{
    bpf::{bpffs::Folder, globals::Globals, layout, table::Table},
    error::DatapathError,
    state::{
        active_flows::ActiveFlows, filter::Filter, flow_table::FlowTable, maps::ServiceMaps,
        settings::SettingsMap,
    },
};

/// The maps and constants by which a program decides about a packet. Lookups return the present contents of the maps;
/// settings and constants are those at the call of [`Pinned::program_view`](crate::Pinned::program_view).
#[derive(Debug)]
pub struct ProgramView {
    /// Services, backends, tables and their names.
    pub service_maps: ServiceMaps,
    /// Entries of `FLOWS` and `CONNTRACK`.
    pub flows: Arc<FlowTable>,
    /// Numbers of active flows, by slot of `ACTIVE`.
    pub active_flows: Arc<ActiveFlows>,
    /// Entries of `AFFINITY`.
    pub affinity: Table<AffinityKey, Affinity>,
    /// Devices of internal clients, `INSIDE_DEVICES`.
    pub internal_devices: Table<u32, u32>,
    /// Entries of `DEVICES`.
    pub devices: Table<u32, DeviceInfo>,
    /// The settings in force.
    pub settings: Settings,
    /// The constants of the loaded programs; the defaults if there is a [`Self::globals_error`].
    pub globals: Globals,
    /// Why the constants could not be read. Reading them takes `CAP_SYS_ADMIN`; the rest of the view does not.
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
            internal_devices: Table::open(&layout::INSIDE_DEVICES, &folder.map("INSIDE_DEVICES"))?,
            devices: Table::open(&layout::DEVICES, &folder.map("DEVICES"))?,
            settings: SettingsMap::open(folder, filter)?.get()?,
            globals,
            globals_error,
        })
    }
}

impl ServiceMaps {
    /// The name of a service port, such as `default/web:http`.
    pub fn service_name(&self, id: u32) -> Result<Option<String>, DatapathError> {
        Ok(self.labels_of(id)?.map(|labels| labels.name.without_protocol().to_string()))
    }

    /// The name of an endpoint's pod; `None` if it is unknown.
    pub fn pod_name(&self, address: &Address) -> Result<Option<String>, DatapathError> {
        let name = self.endpoint_names.get(address)?;
        let pod = name.map(|name| from_fixed(&name.pod).to_owned());
        Ok(pod.filter(|pod| !pod.is_empty()))
    }
}
