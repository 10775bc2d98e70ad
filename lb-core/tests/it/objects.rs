//! Objects that several tests begin with.

use lb_core::model::Endpoint;

/// The endpoint `10.0.0.LAST`, which is ready.
pub(crate) fn endpoint(last: u8) -> Endpoint {
    Endpoint {
        address: [10, 0, 0, last].into(),
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        zone: None,
        pod: None,
        hints: None,
    }
}

/// The endpoint while it terminates and still serves.
pub(crate) fn terminating(endpoint: Endpoint) -> Endpoint {
    Endpoint { ready: false, terminating: true, ..endpoint }
}
