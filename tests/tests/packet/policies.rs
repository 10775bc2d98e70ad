//! Traffic policies and source ranges: which clients are served, and by which backends.

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Service, ServiceKey, Settings, service_flags,
};

use super::{
    packets::Packet,
    stage::{Family, each},
    testbed::{Hook, TCP, Testbed, UDP},
};

/// Makes `client()` an internal client; `stranger()` stays an external one.
fn clients_are_internal(bed: &mut Testbed, family: Family) {
    let network =
        Network::new(Address::from(family.client().ip()), if family == Family::V4 { 32 } else { 128 });
    bed.settings(&Settings { internal: Networks::new([network]), ports: 1, ..Settings::zeroed() });
}

fn key(family: Family, protocol: u8) -> ServiceKey {
    ServiceKey::new(Address::from(family.vip().ip()), family.vip().port(), protocol)
}

/// Writes a Service with `externalTrafficPolicy: Local`, with a backend on this node (if `local`), and one on another
/// node for internal clients only.
fn external_local(bed: &mut Testbed, family: Family, local: bool) {
    let outside: &[_] = if local { &[family.backend()] } else { &[] };
    let (backends_base, backends_count) = bed.slice(outside, 0);
    let (internal_base, internal_count) = bed.slice(&[family.other_backend()], 0);
    let drop = if local { 0 } else { service_flags::DROP_WITHOUT_BACKENDS };
    let flags = service_flags::SHORT_CIRCUIT | drop;
    for protocol in [TCP, UDP] {
        let key = key(family, protocol);
        let record = Service { id: 1, flags, ..Service::zeroed() };
        let record = Service { backends_base, backends_count, internal_base, internal_count, ..record };
        bed.record(&key, &record.sealed(&key));
    }
}

fn syn(family: Family) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1000, b"").syn()
}

#[test]
fn external_clients_get_local_backends_and_internal_ones_all() {
    each("short circuit", |bed, family| {
        external_local(bed, family, true);
        clients_are_internal(bed, family);
        let inside = syn(family);
        bed.send(Hook::Ingress, &inside).passes(NewFlow, &inside.clone().to(family.other_backend()));
        let outside = syn(family).from(family.stranger());
        bed.send(Hook::Ingress, &outside).passes(NewFlow, &outside.clone().to(family.backend()));
        // A retransmission keeps the backend that serves this kind of client.
        bed.send(Hook::Ingress, &inside).passes(Forward, &inside.clone().to(family.other_backend()));
        bed.send(Hook::Ingress, &outside).passes(Forward, &outside.clone().to(family.backend()));
    });
}

#[test]
fn external_clients_are_dropped_without_local_backends() {
    each("no local backend", |bed, family| {
        external_local(bed, family, false);
        clients_are_internal(bed, family);
        for packet in [syn(family), Packet::udp(family.client(), family.vip(), b"x")] {
            let outside = packet.clone().from(family.stranger());
            bed.send(Hook::Ingress, &outside).drops(NoLocalBackend);
            let to = family.other_backend();
            bed.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(to));
        }
    });
}

#[test]
fn client_on_a_workload_device_is_internal() {
    each("inside by device", |bed, family| {
        external_local(bed, family, false);
        let packet = syn(family);
        bed.send(Hook::Ingress, &packet).drops(NoLocalBackend);
        bed.make_clients_internal();
        bed.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.other_backend()));
    });
}

#[test]
fn cluster_ip_without_local_backends_drops_silently() {
    each("internal policy Local", |bed, family| {
        let record = Service { id: 1, flags: service_flags::DROP_WITHOUT_BACKENDS, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[], record);
        clients_are_internal(bed, family);
        bed.send(Hook::Ingress, &syn(family)).drops(NoLocalBackend);
        bed.send(Hook::Ingress, &syn(family).from(family.stranger())).drops(NoLocalBackend);
    });
}

fn with_ranges(bed: &mut Testbed, family: Family, prefix: u8) {
    let record = Service { id: 9, flags: service_flags::SOURCE_RANGES, ..Service::zeroed() };
    bed.service_with(family.vip(), TCP, &[family.backend()], record);
    bed.allow_source_range(9, family.client().ip(), prefix);
}

#[track_caller]
fn knock(bed: &mut Testbed, packet: &Packet, family: Family, outcome: Outcome) {
    let sent = bed.send(Hook::Ingress, packet);
    if outcome == SourceNotAllowed {
        sent.drops(outcome);
    } else {
        sent.passes(outcome, &packet.clone().to(family.backend()));
    }
}

#[test]
fn clients_outside_the_source_ranges_are_dropped() {
    each("source ranges", |bed, family| {
        let whole = if family == Family::V4 { 32 } else { 128 };
        with_ranges(bed, family, whole);
        knock(bed, &syn(family), family, NewFlow);
        knock(bed, &syn(family).from(family.stranger()), family, SourceNotAllowed);
        // The stranger is in the same /24 and /64.
        with_ranges(bed, family, if family == Family::V4 { 24 } else { 64 });
        knock(bed, &syn(family).from(family.stranger()), family, NewFlow);
    });
}

#[test]
fn source_ranges_apply_per_service_and_family() {
    each("source ranges of others", |bed, family| {
        let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
        let record = Service { id: 9, flags: service_flags::SOURCE_RANGES, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[family.backend()], record);
        bed.allow_source_range(8, family.client().ip(), 0);
        bed.allow_source_range(9, other.client().ip(), 0);
        knock(bed, &syn(family), family, SourceNotAllowed);
        bed.allow_source_range(9, family.client().ip(), 0);
        knock(bed, &syn(family), family, NewFlow);
    });
}

/// A packet to a loopback address is invalid on the wire: the programs leave it to the stack, which drops it.
#[test]
fn packets_to_loopback_node_ports_are_not_translated() {
    each("sockets only", |bed, family| {
        let record = Service { id: 9, flags: service_flags::SOCKETS_ONLY, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[family.backend()], record);
        bed.send(Hook::Ingress, &syn(family)).passes_untouched(NoService);
        bed.assert_flows(0);
    });
}

/// External clients in a network of `--deny-source` are denied.
#[test]
fn denied_external_clients_begin_no_flow_and_internal_ones_do() {
    each("denied sources", |bed, family| {
        let prefix = if family == Family::V4 { 32 } else { 128 };
        let network = |ip| Network::new(Address::from(ip), prefix);
        let (client, stranger) = (family.client(), family.stranger());
        let settings = Settings {
            internal: Networks::new([network(client.ip())]),
            denied: Networks::new([network(client.ip()), network(stranger.ip())]),
            ports: 1,
            ..Settings::zeroed()
        };
        for (vip, protocol) in [(family.vip(), TCP), (family.vip(), UDP)] {
            bed.service(vip, protocol, &[family.backend()]);
        }
        bed.service(family.empty_vip(), TCP, &[]);
        bed.settings(&Settings { denied: Networks::new([]), ..settings });
        let established = syn(family).from(stranger);
        let reaches = established.clone().to(family.backend());
        bed.send(Hook::Ingress, &established).passes(NewFlow, &reaches);
        bed.settings(&settings);
        bed.send(Hook::Ingress, &established).passes(Forward, &reaches);
        for packet in [
            syn(family),
            Packet::udp(client, family.vip(), b"x"),
            Packet::tcp(client, family.empty_vip(), 1000, b"").syn(),
        ] {
            let mut other = stranger;
            other.set_port(stranger.port() + 1);
            bed.send(Hook::Ingress, &packet.clone().from(other)).drops(SourceNotAllowed);
        }
        for packet in [syn(family), Packet::udp(client, family.vip(), b"x")] {
            bed.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.backend()));
        }
    });
}
