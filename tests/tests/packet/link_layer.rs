//! The link layer: the programs leave frames for other MAC addresses and frames with a VLAN tag untouched, as well as
//! tunnels from devices of pods.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{Outcome::*, Service, backend_flags, service_flags};

use super::{
    packets::{Packet, QINQ, VLAN},
    stage::{Family, each_ethernet},
    testbed::{Hook, TCP, Testbed, UDP},
    tunnel, wire,
    wire::{Mode, each_on_wires},
};

/// Destination MAC addresses other than the node's own.
const OTHER_HOSTS: [(&str, [u8; 6]); 3] = [
    ("another host", [0, 0, 0x5e, 0, 0x53, 9]),
    ("every host", [0xff; 6]),
    ("a group", [1, 0, 0x5e, 0, 0, 1]),
];

fn to_mac(packet: &Packet, mac: [u8; 6]) -> Packet {
    packet.clone().with(|packet| packet.ethernet.as_mut().unwrap().destination = mac)
}

/// Asserts that frames with this change pass as they are and begin no flow: frames to a Service, frames to a Service
/// without backends, and frames of an existing flow.
fn pass_untouched(bed: &mut Testbed, family: Family, change: impl Fn(&Packet) -> Packet) {
    let (client, vip, backend) = (family.client(), family.vip(), family.backend());
    for protocol in [TCP, UDP] {
        bed.service(vip, protocol, &[backend]);
        bed.service(family.empty_vip(), protocol, &[]);
        let packet = |to: SocketAddr| match protocol {
            TCP => Packet::tcp(client, to, 1000, b"").syn(),
            _ => Packet::udp(client, to, b"?"),
        };
        bed.send(Hook::Ingress, &change(&packet(vip))).passes_untouched(OtherHost);
        bed.assert_flows(0);
        bed.send(Hook::Ingress, &change(&packet(family.empty_vip()))).passes_untouched(OtherHost);
        let first = packet(vip);
        bed.send(Hook::Ingress, &first).passes(NewFlow, &first.clone().to(backend));
        let further = match protocol {
            TCP => Packet::tcp(client, vip, 1001, b"data").ack(5001),
            _ => Packet::udp(client, vip, b"again"),
        };
        bed.send(Hook::Ingress, &change(&further)).passes_untouched(OtherHost);
        bed.clear_flows();
    }
}

#[test]
fn frames_for_other_hosts_pass_untouched() {
    each_ethernet("other hosts", |bed, family| {
        for (name, mac) in OTHER_HOSTS {
            bed.label(name);
            pass_untouched(bed, family, |packet| to_mac(packet, mac));
        }
    });
}

#[test]
fn xdp_leaves_frames_for_other_hosts_to_tc() {
    each_on_wires("other hosts at XDP", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            super::xdp::service(bed, family.vip(), TCP, &[family.backend()]);
            let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
            for (name, mac) in OTHER_HOSTS {
                bed.label(name);
                bed.arrive(mode, &to_mac(&syn, mac)).stays_for_tc();
            }
            bed.assert_flows(0);
            assert_eq!(bed.arrive(mode, &syn).action, wire::XDP_TX);
            for (name, mac) in OTHER_HOSTS {
                bed.label(name);
                let data = Packet::tcp(family.client(), family.vip(), 1001, b"data").ack(5001);
                bed.arrive(mode, &to_mac(&data, mac)).stays_for_tc();
            }
        }
    });
}

/// The VLAN device that is stacked on this one gets the frames without their tag. If there is no such device, the stack
/// drops them.
#[test]
fn tagged_frames_pass_untouched() {
    const TAGS: [(&str, &[(u16, u16)]); 4] = [
        ("VLAN", &[(VLAN, 5)]),
        ("VLAN with priority", &[(VLAN, 0xe005)]),
        ("QinQ", &[(QINQ, 6), (VLAN, 5)]),
        ("two VLAN tags", &[(VLAN, 6), (VLAN, 5)]),
    ];
    each_ethernet("tagged", |bed, family| {
        for (name, tags) in TAGS {
            bed.label(name);
            pass_untouched(bed, family, |packet| {
                packet.clone().with(|packet| *packet.tags() = tags.to_vec())
            });
        }
    });
}

/// A pod can forge tunnelled packets of a peer, with any source address.
#[test]
fn tunnels_from_workload_devices_pass_untouched() {
    each_ethernet("tunnels of pods", |bed, family| {
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        for kind in tunnel::Kind::BOTH {
            bed.label(&format!("{kind:?}"));
            bed.settings(&tunnel::settings(kind));
            tunnel::service(bed, family.vip(), TCP, &[family.backend()], backend_flags::LOCAL);
            let peer = family.other_backend().ip();
            let outer = tunnel::in_tunnel(kind, 50_001, peer, family.backend().ip(), &syn).swapped_macs();
            bed.send(Hook::Ingress, &outer).passes_unchanged();
            bed.assert_flows(0);
        }
    });
}

/// The node of the backend checks the client again: the first node may have other source ranges, or none.
#[test]
fn source_ranges_apply_after_decapsulation() {
    each_ethernet("source ranges inside a tunnel", |bed, family| {
        for kind in tunnel::Kind::BOTH {
            bed.label(&format!("{kind:?}"));
            bed.clear_flows();
            bed.settings(&tunnel::settings(kind));
            bed.end_tunnels();
            let record = Service { id: 9, ..Service::zeroed() };
            let backends = [family.backend()];
            tunnel::service_of(bed, family.vip(), TCP, &backends, backend_flags::LOCAL, record);
            bed.add_flags(family.vip(), TCP, service_flags::SOURCE_RANGES);
            let whole = if family == Family::V4 { 32 } else { 128 };
            bed.allow_source_range(9, family.client().ip(), whole);
            let arrives = |client| {
                let syn = Packet::tcp(client, family.vip(), 1000, b"").syn();
                let peer = family.other_backend().ip();
                tunnel::in_tunnel(kind, 50_001, peer, family.backend().ip(), &syn).swapped_macs()
            };
            bed.send(Hook::Ingress, &arrives(family.stranger())).drops(SourceNotAllowed);
            bed.assert_flows(0);
            bed.send(Hook::Ingress, &arrives(family.client())).passes_any(NewFlow);
        }
    });
}
