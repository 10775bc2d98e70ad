//! What `status` and `announce routes` show of BGP.

use serde::{Deserialize, Serialize};

/// What the agent announces by BGP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpReport {
    /// Number of the kernel's routing table that has the routes (`--announce-table`).
    pub table: u32,
    /// Whether a fence runs.
    pub fence: bool,
    /// The routes that the agent wants in the table. (`status` lists those that the kernel refuses.)
    pub routes: Vec<RouteReport>,
    /// The configuration of BIRD, without passwords.
    pub bird_config: String,
}

/// A route that the agent wants in the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteReport {
    /// The destination of the route, as a prefix.
    pub route: String,
    /// `namespace/name` of the Services whose load balancer's address the route covers.
    pub services: Vec<String>,
    /// `namespace/name` of the BGPAdvertisements that ask for the route.
    pub advertisements: Vec<String>,
}
