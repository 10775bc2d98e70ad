//! The key of an endpoint, unique among the endpoints of a service port.

use lb_common::Address;

/// Address and port of an endpoint.
pub type EndpointKey = (Address, u16);
