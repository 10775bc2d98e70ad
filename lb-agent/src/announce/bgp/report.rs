//! What `status` and `announce routes` show of BGP.

use serde::{Deserialize, Serialize};

/// What the agent announces by BGP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpReport {
    /// The kernel's table.
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
    /// The destination.
    pub route: String,
    /// `namespace/name` of the Services that it leads to.
    pub services: Vec<String>,
    /// `namespace/name` of the advertisements that ask for it.
    pub advertisements: Vec<String>,
}
