//! Devices, addresses, routes and ports of a network namespace: reads and watches them, adds the agent's own routes,
//! rules, catch device and port reservations, and sends announcements of addresses.

pub(crate) mod announce_socket;
pub(crate) mod announced_routes;
pub(crate) mod announced_rule;
pub(crate) mod attribute;
pub(crate) mod catch;
pub(crate) mod devices;
pub(crate) mod ethtool;
pub(crate) mod netlink;
pub(crate) mod network;
pub(crate) mod our_routes;
pub(crate) mod ports;
pub(crate) mod route;
pub(crate) mod routing;
pub(crate) mod unreachable;
pub(crate) mod watch;
pub(crate) mod xdp_features;
pub(crate) mod xfrm;
