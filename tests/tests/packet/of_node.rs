//! Sockets of the node that connect to the backend of a masqueraded client from the client's masquerade port. At egress
//! the programs give these connections another source port; they change no other packets of the node.

use std::net::SocketAddr;

use lb_common::Outcome::*;

use super::{
    icmp::port_unreachable,
    masquerade::{each_without_routes, masqueraded, source_of, there},
    packets::{Packet, QINQ, VLAN},
    stage::Family,
    testbed::{Device, Hook, Testbed, UDP},
};

/// Begins the flow of a masqueraded client; returns the address and port of the node that the backend sees as the
/// flow's source.
fn flow_of_client(bed: &mut Testbed, family: Family) -> SocketAddr {
    masqueraded(bed, family, UDP, 20_000);
    source_of(&there(bed, family, &Packet::udp(family.client(), family.vip(), b"?"), true))
}

/// Begins a connection of the node from this source; returns the source from which the backend receives it.
fn flow_of_node(bed: &mut Testbed, family: Family, source: SocketAddr) -> SocketAddr {
    let packet = Packet::udp(source, family.backend(), b"?");
    let sent = bed.send_from_node(&packet);
    let seen = (source.ip(), bed.flows()[&packet.tuple()].to.source_port).into();
    sent.passes(Masquerade, &packet.clone().from(seen));
    assert_ne!(seen, source);
    seen
}

/// The programs of the VLAN device have already given the connection another port, and restore its own port at ingress.
#[test]
fn packets_of_the_node_get_no_second_port_below_a_vlan_device() {
    const TAGS: [&[(u16, u16)]; 3] = [&[(VLAN, 5)], &[(VLAN, 0xe005)], &[(QINQ, 6), (VLAN, 5)]];
    each_without_routes("the node in a VLAN", |bed, family| {
        if bed.device() == Device::Bare {
            return;
        }
        let source = flow_of_client(bed, family);
        let packet = Packet::udp(source, family.backend(), b"?");
        let tagged = |tags: &[(u16, u16)]| packet.clone().with(|packet| *packet.tags() = tags.to_vec());
        for tags in TAGS {
            bed.send_from_node(&tagged(tags)).passes_untouched(NoService);
        }
        flow_of_node(bed, family, source);
        for tags in TAGS {
            bed.send_from_node(&tagged(tags)).passes_untouched(OtherHook);
        }
    });
}

/// The errors quote an answer to the port that the masqueraded flow and the socket share. An error that another machine
/// sends is about the masqueraded flow, and the programs have already translated its quote. Only an error that the node
/// itself sends is about the connection of its socket.
#[test]
fn icmp_errors_about_a_masqueraded_flow_are_not_delivered_to_the_socket_with_its_port() {
    each_without_routes("errors about the port's flow", |bed, family| {
        let (source, backend) = (flow_of_client(bed, family), family.backend());
        let seen = flow_of_node(bed, family, source);
        let error = |to| {
            let answer = Packet::udp(backend, to, b"!");
            port_unreachable(family, source.ip(), backend.ip(), &answer.network())
        };
        bed.send(Hook::Egress, &error(source)).passes_untouched(OtherHook);
        bed.send_from_node(&error(source)).passes(IcmpError, &error(seen));
    });
}
