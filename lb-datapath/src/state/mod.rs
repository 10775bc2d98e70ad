//! Typed access to the pinned maps: Services, flows, affinity, sockets, settings, counters, events.

pub(crate) mod active_flows;
pub(crate) mod affinity;
pub(crate) mod announcements;
pub(crate) mod conntrack;
pub(crate) mod device_map;
pub(crate) mod dns_intercept;
pub(crate) mod filter;
pub(crate) mod flow_table;
pub(crate) mod handover;
pub(crate) mod key_set;
pub(crate) mod maps;
pub(crate) mod monitor;
pub(crate) mod node_sockets;
pub(crate) mod settings;
pub(crate) mod socket_counts;
pub(crate) mod stats;
