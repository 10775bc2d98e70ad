//! Internal and external clients.

use lb_common::{Service, service_flags};

/// Whether a client is internal to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ClientSide {
    /// The client is external.
    External = 0,
    /// The client is internal: its address is in the networks of internal clients.
    InternalByAddress = 1,
    /// The client is internal: its packets enter through a device of internal clients.
    InternalByDevice = 2,
}

impl ClientSide {
    /// Whether the client is treated as internal.
    #[inline(always)]
    pub fn is_internal(self) -> bool {
        self != Self::External
    }
}

/// Decides whether the client is internal. (Apart from [denied sources](super::admission::source), only services that
/// [depend](Service::depends_on_client) on the client treat internal and external clients differently.)
#[inline(always)]
pub fn side(by_address: impl FnOnce() -> bool, by_device: impl FnOnce() -> bool) -> ClientSide {
    if by_address() {
        ClientSide::InternalByAddress
    } else if by_device() {
        ClientSide::InternalByDevice
    } else {
        ClientSide::External
    }
}

/// The record of the service for a client, and whether the client is internal. If the service treats all clients alike,
/// the function does not call `is_internal`, and the client counts as external.
#[inline(always)]
pub fn for_client(service: Service, is_internal: impl FnOnce() -> bool) -> (Service, bool) {
    let internal = service.depends_on_client() && is_internal();
    (service.for_client(internal), internal)
}

/// Whether backends on other nodes answer the client directly (direct server return).
#[inline(always)]
pub const fn uses_dsr(service: &Service, internal: bool) -> bool {
    !internal && service.flags & service_flags::DSR != 0
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    #[test]
    fn client_side_follows_from_networks_and_device() {
        use ClientSide::{External, InternalByAddress, InternalByDevice};
        for (by_address, by_device, expected, internal) in [
            (true, true, InternalByAddress, true),
            (true, false, InternalByAddress, true),
            (false, true, InternalByDevice, true),
            (false, false, External, false),
        ] {
            let found = side(|| by_address, || by_device);
            assert_eq!((found, found.is_internal()), (expected, internal));
        }
    }

    #[test]
    fn clients_are_looked_at_only_for_services_that_depend_on_them() {
        use service_flags::{DSR, MASQUERADE, MASQUERADE_EXTERNAL, SHORT_CIRCUIT};
        let service = |flags| Service { flags, backends_count: 1, internal_count: 2, ..Service::zeroed() };
        for (flags, internal, backends) in [
            (SHORT_CIRCUIT, true, 2),
            (SHORT_CIRCUIT, false, 1),
            (MASQUERADE_EXTERNAL, true, 1),
            (DSR, true, 1),
        ] {
            let (record, found) = for_client(service(flags), || internal);
            assert_eq!((record.backends_count, found), (backends, internal), "{flags} {internal}");
        }
        let (record, internal) = for_client(service(MASQUERADE), || unreachable!());
        assert_eq!((record.backends_count, internal), (1, false));
    }

    #[test]
    fn only_external_clients_use_dsr() {
        for (flags, internal, expected) in [
            (service_flags::DSR, false, true),
            (service_flags::DSR, true, false),
            (service_flags::MASQUERADE, false, false),
        ] {
            assert_eq!(uses_dsr(&Service { flags, ..Service::zeroed() }, internal), expected);
        }
    }
}
