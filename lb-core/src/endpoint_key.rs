//! What identifies an endpoint among those of a service port.

use lb_common::Address;

/// Address and port of an endpoint.
pub type EndpointKey = (Address, u16);
