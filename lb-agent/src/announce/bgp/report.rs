//! The part of the agent's report about BGP, which `status` and `announce routes` show.

use serde::{Deserialize, Serialize};

/// The routes that the agent announces by BGP, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpReport {
    /// Number of the kernel's routing table that the agent writes the routes to.
    pub table: u32,
    /// Whether a fence process runs, which removes the routes if the agent's heartbeats stop.
    pub fence: bool,
    /// The routes that the agent wants in the table; `status` lists those that the kernel refuses.
    pub routes: Vec<RouteReport>,
    /// The text of BIRD's configuration, without passwords.
    pub bird_config: String,
}

/// A route that the agent wants in the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteReport {
    /// The destination network, such as `203.0.113.1/32`.
    pub route: String,
    /// `namespace/name` of the Services that the route leads to.
    pub services: Vec<String>,
    /// `namespace/name` of the BGPAdvertisements that ask for the route.
    pub advertisements: Vec<String>,
}
