//! The filter: packets of flows and of frontends reach the lookups, and packets without a mark do not.
//!
//! The other packet tests run with the filter on, and [`Testbed::flows`] asserts the marks of all entries.

use lb_common::{Outcome::*, conntrack::flow_flags};

use super::{
    packets::Packet,
    stage::{Family, PORTS, each_ethernet, masquerade_settings},
    testbed::{Hook, TCP, Testbed, UDP},
    wire::{Mode, each_on_wires},
};

/// A datagram to the Service, and its reply.
fn packets(family: Family) -> (Packet, Packet) {
    let (client, vip, backend) = (family.client(), family.vip(), family.backend());
    (Packet::udp(client, vip, b"question"), Packet::udp(backend, client, b"answer"))
}

/// Opens the flow of [`packets`].
fn open(bed: &mut Testbed, family: Family) {
    let (request, reply) = packets(family);
    bed.service(family.vip(), UDP, &[family.backend()]);
    bed.send(Hook::Ingress, &request).passes(NewFlow, &request.clone().to(family.backend()));
    bed.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(family.vip()));
}

#[test]
fn packet_without_a_mark_never_reaches_the_lookups() {
    each_ethernet("filter: no mark", |bed, family| {
        open(bed, family);
        let (request, reply) = packets(family);
        bed.clear_filter();
        // The maps still have the entries and the frontend, but the empty filter keeps the programs from the lookups.
        bed.send(Hook::Ingress, &request).passes_untouched(NoService);
        bed.send(Hook::Egress, &reply).passes_untouched(NoService);
        // Without a filter in use the programs look up every packet.
        bed.filter().activate(None);
        bed.send(Hook::Ingress, &request).passes(Forward, &request.clone().to(family.backend()));
        bed.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(family.vip()));
    });
}

#[test]
fn frame_without_a_mark_never_reaches_the_lookups_of_xdp() {
    each_on_wires("filter: no mark, XDP", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
            bed.service(family.vip(), TCP, &[]);
            bed.clear_filter();
            let before = bed.counters();
            bed.arrive(mode, &syn).stays_for_tc();
            assert_eq!(bed.counters(), before);
            bed.assert_flows(0);
        }
    });
}

#[test]
fn either_copy_of_the_filter_has_every_mark() {
    each_ethernet("filter: both copies", |bed, family| {
        open(bed, family);
        let (request, reply) = packets(family);
        for copy in [1, 0] {
            bed.filter().activate(Some(copy));
            bed.filter().zero(1 - copy);
            bed.send(Hook::Ingress, &request).passes(Forward, &request.clone().to(family.backend()));
            bed.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(family.vip()));
            // A new flow adds its marks to both copies of the filter, so also to the zeroed copy, which the next round
            // uses.
            bed.clear_flows();
            open(bed, family);
        }
    });
}

#[test]
fn flow_of_a_deleted_service_keeps_its_marks() {
    each_ethernet("filter: deleted Service", |bed, family| {
        open(bed, family);
        let (request, reply) = packets(family);
        bed.clear_services();
        for _ in 0..2 {
            bed.send(Hook::Ingress, &request).passes(Forward, &request.clone().to(family.backend()));
            bed.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(family.vip()));
        }
    });
}

#[test]
fn masqueraded_flow_has_the_marks_of_all_four_entries() {
    each_ethernet("filter: masqueraded", |bed, family| {
        let service = lb_common::Service {
            id: 1,
            flags: lb_common::service_flags::MASQUERADE,
            ..bytemuck::Zeroable::zeroed()
        };
        bed.service_with(family.vip(), UDP, &[family.backend()], service);
        bed.settings(&masquerade_settings(PORTS));
        let (request, _) = packets(family);
        let _sent = bed.send(Hook::Ingress, &request);
        let flows = bed.flows();
        assert_eq!(flows.len(), 4, "{flows:#?}");
        assert!(flows.values().any(|flow| flow.flags & flow_flags::SECOND_OF_MASQUERADED != 0));
    });
}
