//! How packets of a new flow get to their backend.

use lb_common::{
    Address, Backend, DeviceInfo, Scheduler, Service, backend_flags,
    conntrack::{flow_flags, next_hop_flags},
    device_flags, service_flags,
};

/// How the node sends packets of a new flow to their backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Forwarding {
    /// Packets keep the client's own address.
    Plain = 0,
    /// The backend has an address of this node, so packets keep the client's own address although the service
    /// masquerades.
    PlainOnNode = 1,
    /// Client and backend have the same address: a pod, or another node with a host-network endpoint, reaches itself
    /// through the VIP. Packets go back with the VIP as source, because replies of that client to its own address would
    /// never leave it.
    Hairpin = 2,
    /// Packets go through a tunnel to the backend's node, with their own addresses and ports.
    Tunnel = 3,
    /// Packets get an address of this node as source.
    Masquerade = 4,
    /// The client's device has no programs. Packets get the VIP as source, so that the replies of the backend, which is
    /// on this node, come back to the catch device.
    Caught = 5,
    /// As [`Self::Caught`], but the backend is on another node, so packets get an address of this node as source when
    /// they leave the node.
    CaughtAndMasquerade = 6,
}

/// How packets from `client` reach `backend`. `caught` is whether the flow [is caught](is_caught). `masquerade` is
/// whether the service masquerades the client. `dsr` is whether backends on other nodes answer the client directly.
/// `may_tunnel` is whether this node has an address to tunnel from, and the client is no node.
#[inline(always)]
pub fn forwarding(
    client: &Address,
    backend: &Backend,
    masquerade: bool,
    dsr: bool,
    caught: bool,
    may_tunnel: impl FnOnce() -> bool,
) -> Forwarding {
    let has = |flag| backend.flags & flag != 0;
    if caught {
        let on_node = has(backend_flags::LOCAL | backend_flags::HOST);
        return if on_node { Forwarding::Caught } else { Forwarding::CaughtAndMasquerade };
    }
    if backend.address == *client {
        return Forwarding::Hairpin;
    }
    if dsr && has(backend_flags::PEER) && may_tunnel() {
        return Forwarding::Tunnel;
    }
    // Replies of a backend on this node pass this node even if the client is not masqueraded.
    if !masquerade || dsr && has(backend_flags::LOCAL) {
        Forwarding::Plain
    } else if has(backend_flags::HOST) {
        Forwarding::PlainOnNode
    } else {
        Forwarding::Masquerade
    }
}

/// The bits of [`flow_flags`] that say how packets of the flow get to the backend. `is_routed` is whether a masqueraded
/// flow is [routed](is_routed). A tunnel may also have [`flow_flags::GUE`].
#[inline(always)]
pub const fn flags_of(forwarding: Forwarding, is_routed: bool) -> u8 {
    match forwarding {
        Forwarding::Plain | Forwarding::PlainOnNode => 0,
        Forwarding::Hairpin => flow_flags::HAIRPIN,
        Forwarding::Tunnel => flow_flags::ROUTED | flow_flags::TUNNEL,
        Forwarding::Masquerade if is_routed => flow_flags::ROUTED,
        Forwarding::Masquerade => flow_flags::MASQUERADED,
        Forwarding::Caught => flow_flags::CAUGHT,
        Forwarding::CaughtAndMasquerade => flow_flags::CAUGHT | flow_flags::MASQUERADED,
    }
}

/// Whether packets of a flow are sent on although there is no room for its entry. True for tunnelled flows of a service
/// with Maglev: no reply passes this node, and the Maglev table chooses the same backend for each packet of a
/// connection until the backends change. Exception: false if only a SYN begins a flow of the service, because without
/// an entry the packets after the SYN would not be forwarded.
#[inline(always)]
pub const fn needs_no_entry(is_tunnelled: bool, service: &Service) -> bool {
    is_tunnelled && service.scheduler == Scheduler::Maglev as u8 && !service.requires_syn()
}

/// The bits of [`flow_flags`] that all flows of the service have, however their packets get to the backend.
#[inline(always)]
pub const fn flags_of_service(service: &Service) -> u8 {
    if service.flags & service_flags::PROXY_PROTOCOL != 0 { flow_flags::PROXY_PROTOCOL } else { 0 }
}

/// Whether a masqueraded flow with these [`flags_of_service`] may be routed: not with a PROXY protocol header, because
/// the programs shift sequence numbers only in packets that go through the stack.
/// ([`Flow::may_bypass_stack`](lb_common::conntrack::Flow::may_bypass_stack) is the rule for flows that are not
/// routed.)
#[inline(always)]
pub const fn may_be_routed(flags_of_service: u8) -> bool {
    flags_of_service & flow_flags::PROXY_PROTOCOL == 0
}

/// Whether this is a wire device (it leads to other machines) on which packets may bypass the stack.
#[inline(always)]
pub const fn is_wire(device: &DeviceInfo) -> bool {
    device.flags & device_flags::WIRE != 0
}

/// Whether packets that the node receives on the device come from a pod of the node.
#[inline(always)]
pub const fn is_workload(device: &DeviceInfo) -> bool {
    device.flags & device_flags::WORKLOAD != 0
}

/// Whether the device gets the packets to cluster IPs that no program has translated.
#[inline(always)]
pub const fn is_catch(device: &DeviceInfo) -> bool {
    device.flags & device_flags::CATCH != 0
}

/// Whether the client's own device has no programs, so that a flow that begins at `device` is caught. `is_cluster_ip`
/// is whether the node routes packets for the VIP to the catch device.
#[inline(always)]
pub fn is_caught(device: &DeviceInfo, is_cluster_ip: impl FnOnce() -> bool) -> bool {
    is_catch(device) || device.flags & device_flags::BRIDGES_PODS != 0 && is_cluster_ip()
}

/// Whether a masqueraded flow that enters and leaves through these devices is routed in one step. Both must be wire
/// devices, and every reply that fits `exit` must fit `entrance`. (For the opposite direction, the caller's route
/// lookup has checked the MTU.)
#[inline(always)]
pub const fn is_routed(entrance: &DeviceInfo, exit: &DeviceInfo) -> bool {
    is_wire(entrance) && is_wire(exit) && exit.mtu <= entrance.mtu
}

/// Whether this node must not forward a packet with this many hops left (TTL, hop limit; RFC 1812 §5.3.1, RFC 8200 §3).
/// As a router does, tc answers such a packet with an ICMP error "time exceeded", within a rate limit, but drops an
/// ICMP error without an answer (RFC 1122 §3.2.2).
#[inline(always)]
pub const fn is_last_hop(hops_left: u8) -> bool {
    hops_left <= 1
}

/// The bits of [`next_hop_flags`] that a next hop behind a device with these [`device_flags`] has.
#[inline(always)]
pub const fn next_hop_flags_of(device_flags: u32) -> u16 {
    let mut flags = 0;
    if device_flags & device_flags::XDP_REDIRECT_TARGET != 0 {
        flags |= next_hop_flags::XDP_REDIRECT_TARGET;
    }
    if device_flags & device_flags::XDP_TX != 0 {
        flags |= next_hop_flags::XDP_TX;
    }
    if device_flags & device_flags::REDIRECT_PEER != 0 {
        flags |= next_hop_flags::REDIRECT_PEER;
    }
    flags
}

/// Whether the XDP program can send a frame to a next hop with these [`next_hop_flags`]. If the frame goes `back`
/// through the device that it came from, the program returns `XDP_TX`; otherwise it redirects the frame.
#[inline(always)]
pub const fn leaves_at_xdp(next_hop_flags: u16, back: bool) -> bool {
    let needed = if back { next_hop_flags::XDP_TX } else { next_hop_flags::XDP_REDIRECT_TARGET };
    next_hop_flags & needed != 0
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    #[test]
    fn only_connections_that_any_packet_may_begin_need_no_entry() {
        let service =
            |scheduler: Scheduler, flags| Service { scheduler: scheduler as u8, flags, ..Service::zeroed() };
        let syn_only = service_flags::SYN_ONLY;
        for (is_tunnelled, scheduler, flags, expected) in [
            (true, Scheduler::Maglev, 0, true),
            (false, Scheduler::Maglev, 0, false),
            (true, Scheduler::Random, 0, false),
            (true, Scheduler::Maglev, syn_only, false),
        ] {
            assert_eq!(
                needs_no_entry(is_tunnelled, &service(scheduler, flags)),
                expected,
                "{scheduler:?} {flags}"
            );
        }
        let node_port =
            Service { kind: lb_common::FrontendKind::NodePort as u8, ..service(Scheduler::Maglev, 0) };
        assert!(!needs_no_entry(true, &node_port));
    }

    #[test]
    fn packet_with_one_hop_left_is_not_forwarded() {
        assert_eq!([0, 1, 2, 255].map(is_last_hop), [true, true, false, false]);
    }

    #[test]
    fn ways_to_a_backend() {
        use Forwarding::{Caught, CaughtAndMasquerade, Hairpin, Masquerade, Plain, PlainOnNode, Tunnel};
        use backend_flags::{HOST, LOCAL, PEER};
        let (client, pod) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 1, 0, 1]));
        for (address, flags, masquerade, dsr, may_tunnel, expected) in [
            (pod, 0, false, false, true, Plain),
            (pod, LOCAL, true, false, true, Masquerade),
            (pod, 0, true, false, true, Masquerade),
            (pod, LOCAL | HOST, true, false, true, PlainOnNode),
            (pod, LOCAL | HOST, false, false, true, Plain),
            (pod, PEER, true, true, true, Tunnel),
            (pod, PEER, true, true, false, Masquerade),
            (pod, PEER, true, false, true, Masquerade),
            (pod, LOCAL, true, true, true, Plain),
            (pod, LOCAL | HOST, true, true, true, Plain),
            (client, LOCAL, true, true, true, Hairpin),
            (client, PEER, true, true, true, Hairpin),
        ] {
            let backend = Backend { address, flags, ..Backend::zeroed() };
            let found = forwarding(&client, &backend, masquerade, dsr, false, || may_tunnel);
            assert_eq!(found, expected, "flags {flags}, masquerade {masquerade}, dsr {dsr}");
            let on_node = flags & (LOCAL | HOST) != 0;
            let caught = forwarding(&client, &backend, masquerade, dsr, true, || may_tunnel);
            assert_eq!(caught, if on_node { Caught } else { CaughtAndMasquerade }, "flags {flags}");
        }
    }

    #[test]
    fn flows_are_caught_where_the_device_of_the_client_has_no_programs() {
        for (flags, is_cluster_ip, expected) in [
            (device_flags::CATCH, false, true),
            (device_flags::BRIDGES_PODS, true, true),
            (device_flags::BRIDGES_PODS, false, false),
            (device_flags::WIRE, true, false),
        ] {
            let device = DeviceInfo { flags, ..DeviceInfo::UNKNOWN };
            assert_eq!(is_caught(&device, || is_cluster_ip), expected, "{flags}, {is_cluster_ip}");
        }
    }

    #[test]
    fn flows_with_a_proxy_protocol_header_are_not_routed() {
        for (flags, expected) in
            [(0, true), (service_flags::PROXY_PROTOCOL, false), (service_flags::DSR, true)]
        {
            let service = Service { flags, ..Service::zeroed() };
            assert_eq!(may_be_routed(flags_of_service(&service)), expected, "{flags}");
        }
    }

    #[test]
    fn frames_leave_at_xdp_through_devices_that_transmit_them() {
        use device_flags::{REDIRECT_PEER, WIRE, XDP_REDIRECT_TARGET, XDP_TX};
        for (flags, back, onward) in [
            (WIRE, false, false),
            (WIRE | XDP_TX, true, false),
            (WIRE | XDP_REDIRECT_TARGET, false, true),
            (XDP_TX | XDP_REDIRECT_TARGET, true, true),
            (REDIRECT_PEER, false, false),
        ] {
            let found = next_hop_flags_of(flags);
            assert_eq!((leaves_at_xdp(found, true), leaves_at_xdp(found, false)), (back, onward), "{flags}");
            assert_eq!(found & next_hop_flags::REDIRECT_PEER != 0, flags == REDIRECT_PEER, "{flags}");
        }
    }

    #[test]
    fn flows_between_wires_are_routed_if_replies_fit() {
        let device = |flags, mtu| DeviceInfo { flags, mtu, ..DeviceInfo::UNKNOWN };
        let wire = device_flags::WIRE;
        for (entrance, exit, expected) in [
            (device(wire, 1500), device(wire, 1500), true),
            (device(wire, 1500), device(wire, 1400), true),
            (device(wire, 1400), device(wire, 1500), false),
            (device(wire, 1500), device(0, 1500), false),
            (device(0, 1500), device(wire, 1500), false),
        ] {
            assert_eq!(is_routed(&entrance, &exit), expected, "{entrance:?} to {exit:?}");
        }
    }
}
