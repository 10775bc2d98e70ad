//! Traffic policies and source ranges: who is served, and with which backends.

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Network, Networks,
    Outcome::{self, *},
    Service, ServiceKey, Settings, service_flags,
};

use super::{
    bench::{Bench, Hook, TCP, UDP},
    packets::Packet,
    stage::{Family, each},
};

/// `client()` is inside the cluster, `stranger()` is not.
fn clients_are_inside(bench: &mut Bench, family: Family) {
    let network =
        Network::new(Address::from(family.client().ip()), if family == Family::V4 { 32 } else { 128 });
    bench.settings(&Settings { internal: Networks::new([network]), ports: 1, ..Settings::zeroed() });
}

fn key(family: Family, protocol: u8) -> ServiceKey {
    ServiceKey::new(Address::from(family.vip().ip()), family.vip().port(), protocol)
}

/// `externalTrafficPolicy: Local` with a backend here (if `local`), and one elsewhere that only clients inside get.
fn external_local(bench: &mut Bench, family: Family, local: bool) {
    let outside: &[_] = if local { &[family.backend()] } else { &[] };
    let (backends_base, backends_count) = bench.slice(outside, 0);
    let (internal_base, internal_count) = bench.slice(&[family.other_backend()], 0);
    let drop = if local { 0 } else { service_flags::DROP_WITHOUT_BACKENDS };
    let flags = service_flags::SHORT_CIRCUIT | drop;
    for protocol in [TCP, UDP] {
        let key = key(family, protocol);
        let record = Service { id: 1, flags, ..Service::zeroed() };
        let record = Service { backends_base, backends_count, internal_base, internal_count, ..record };
        bench.record(&key, &record.sealed(&key));
    }
}

fn syn(family: Family) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1000, b"").syn()
}

#[test]
fn local_backends_are_for_clients_outside_all_backends_for_those_inside() {
    each("short circuit", |bench, family| {
        external_local(bench, family, true);
        clients_are_inside(bench, family);
        let inside = syn(family);
        bench.send(Hook::Ingress, &inside).passes(NewFlow, &inside.clone().to(family.other_backend()));
        let outside = syn(family).from(family.stranger());
        bench.send(Hook::Ingress, &outside).passes(NewFlow, &outside.clone().to(family.backend()));
        // A retransmission has its backend among those of its client.
        bench.send(Hook::Ingress, &inside).passes(Forward, &inside.clone().to(family.other_backend()));
        bench.send(Hook::Ingress, &outside).passes(Forward, &outside.clone().to(family.backend()));
    });
}

#[test]
fn without_local_backends_clients_outside_are_dropped() {
    each("no local backend", |bench, family| {
        external_local(bench, family, false);
        clients_are_inside(bench, family);
        for packet in [syn(family), Packet::udp(family.client(), family.vip(), b"x")] {
            let outside = packet.clone().from(family.stranger());
            bench.send(Hook::Ingress, &outside).drops(NoLocalBackend);
            let to = family.other_backend();
            bench.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(to));
        }
    });
}

#[test]
fn whoever_sends_through_a_device_of_pods_is_inside() {
    each("inside by device", |bench, family| {
        external_local(bench, family, false);
        let packet = syn(family);
        bench.send(Hook::Ingress, &packet).drops(NoLocalBackend);
        bench.inside_device();
        bench.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.other_backend()));
    });
}

#[test]
fn a_cluster_ip_without_local_backends_is_silent() {
    each("internal policy Local", |bench, family| {
        let record = Service { id: 1, flags: service_flags::DROP_WITHOUT_BACKENDS, ..Service::zeroed() };
        bench.service_with(family.vip(), TCP, &[], record);
        clients_are_inside(bench, family);
        bench.send(Hook::Ingress, &syn(family)).drops(NoLocalBackend);
        bench.send(Hook::Ingress, &syn(family).from(family.stranger())).drops(NoLocalBackend);
    });
}

fn with_ranges(bench: &mut Bench, family: Family, prefix: u8) {
    let record = Service { id: 9, flags: service_flags::SOURCE_RANGES, ..Service::zeroed() };
    bench.service_with(family.vip(), TCP, &[family.backend()], record);
    bench.source_range(9, family.client().ip(), prefix);
}

#[track_caller]
fn knock(bench: &mut Bench, packet: &Packet, family: Family, outcome: Outcome) {
    let sent = bench.send(Hook::Ingress, packet);
    if outcome == SourceNotAllowed {
        sent.drops(outcome);
    } else {
        sent.passes(outcome, &packet.clone().to(family.backend()));
    }
}

#[test]
fn only_source_ranges_are_served() {
    each("source ranges", |bench, family| {
        let whole = if family == Family::V4 { 32 } else { 128 };
        with_ranges(bench, family, whole);
        knock(bench, &syn(family), family, NewFlow);
        knock(bench, &syn(family).from(family.stranger()), family, SourceNotAllowed);
        // The stranger is in the same /24, /64.
        with_ranges(bench, family, if family == Family::V4 { 24 } else { 64 });
        knock(bench, &syn(family).from(family.stranger()), family, NewFlow);
    });
}

#[test]
fn source_ranges_are_those_of_the_service_and_family() {
    each("source ranges of others", |bench, family| {
        let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
        let record = Service { id: 9, flags: service_flags::SOURCE_RANGES, ..Service::zeroed() };
        bench.service_with(family.vip(), TCP, &[family.backend()], record);
        bench.source_range(8, family.client().ip(), 0);
        bench.source_range(9, other.client().ip(), 0);
        knock(bench, &syn(family), family, SourceNotAllowed);
        bench.source_range(9, family.client().ip(), 0);
        knock(bench, &syn(family), family, NewFlow);
    });
}

/// A packet to a loopback address comes from nobody honest: the stack drops it, as if there were no service.
#[test]
fn frontends_for_sockets_take_no_packets() {
    each("sockets only", |bench, family| {
        let record = Service { id: 9, flags: service_flags::SOCKETS_ONLY, ..Service::zeroed() };
        bench.service_with(family.vip(), TCP, &[family.backend()], record);
        bench.send(Hook::Ingress, &syn(family)).passes_untouched(NoService);
        bench.assert_flows(0);
    });
}
