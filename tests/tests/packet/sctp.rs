//! SCTP flows. Unlike the checksums of TCP and UDP, the checksum of SCTP covers no addresses, only the bytes from the
//! ports on. A checksum of 0 means that the device is to compute it.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{
    Address,
    Outcome::*,
    Service, Settings,
    conntrack::{Phase, chunk},
    service_flags,
};

use super::{
    packets::Packet,
    reject::our_own,
    stage::{Family, each, each_on},
    testbed::{Device, Hook, SCTP, Testbed},
};

const DATA: u8 = 0;
const COOKIE_ECHO: u8 = 10;
/// Verification tags of the client's packets after the first one, and of the backend's.
const TAGS: (u32, u32) = (0x5e4e_0001, 0xc11e_0001);

fn init(from: SocketAddr, to: SocketAddr) -> Packet {
    Packet::sctp(from, to, 0, chunk::INIT, &[7; 16])
}

#[test]
fn association_is_tracked_from_init_to_shutdown() {
    each("SCTP", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, SCTP, &[backend]);
        let sent = init(client, vip);
        let there = |bed: &mut Testbed, packet: &Packet, outcome| {
            bed.send(Hook::Ingress, packet).passes(outcome, &packet.clone().to(backend));
        };
        let back = |bed: &mut Testbed, kind, data: &[u8]| {
            let packet = Packet::sctp(backend, client, TAGS.1, kind, data);
            bed.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
        };
        let phase = |bed: &Testbed, phase| bed.assert_flow(&sent, &sent.clone().to(backend), phase);
        there(bed, &sent, NewFlow);
        phase(bed, Phase::Opening);
        // The client retransmits the INIT.
        there(bed, &sent, Forward);
        back(bed, chunk::INIT_ACK, &[9; 40]);
        phase(bed, Phase::Accepted);
        // The backend discards a wrong cookie silently.
        there(bed, &Packet::sctp(client, vip, 0xbad, COOKIE_ECHO, &[0; 40]), Forward);
        phase(bed, Phase::Accepted);
        for length in [1, 2, 3, 4, 500, 1400] {
            there(bed, &Packet::sctp(client, vip, TAGS.0, DATA, &vec![0xa5; length]), Forward);
            back(bed, DATA, &vec![0x5a; length]);
        }
        phase(bed, Phase::Established);
        there(bed, &Packet::sctp(client, vip, TAGS.0, chunk::SHUTDOWN, &[0; 4]), Forward);
        phase(bed, Phase::HalfClosed);
        back(bed, chunk::SHUTDOWN_ACK, &[]);
        phase(bed, Phase::TimeWait);
        // The client begins a second association from the same port.
        there(bed, &sent, NewFlow);
        phase(bed, Phase::Opening);
    });
}

#[test]
fn abort_ends_an_association_only_with_the_right_tag() {
    each("SCTP ABORT", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, SCTP, &[backend]);
        let sent = init(client, vip);
        bed.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let reply = |tag, kind| Packet::sctp(backend, client, tag, kind, b"");
        let packet = reply(TAGS.1, chunk::INIT_ACK);
        bed.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
        let data = Packet::sctp(client, vip, TAGS.0, DATA, b"x");
        bed.send(Hook::Ingress, &data).passes(Forward, &data.clone().to(backend));
        let packet = reply(TAGS.1, DATA);
        bed.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
        for (tag, phase) in [(0xbad, Phase::Established), (TAGS.1, Phase::Closed)] {
            let packet = reply(tag, chunk::ABORT);
            bed.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
            bed.assert_flow(&sent, &sent.clone().to(backend), phase);
        }
        let stray = Packet::sctp(family.stranger(), vip, 1, chunk::ABORT, b"");
        bed.send(Hook::Ingress, &stray).drops(StrayReset);
    });
}

/// If the sender has offloaded the checksum to its device, the field is 0 and stays 0.
#[test]
fn checksum_left_to_the_device_stays_zero() {
    each("SCTP without checksum", |bed, family| {
        bed.service(family.vip(), SCTP, &[family.backend()]);
        let without = |packet: &Packet| {
            let mut bytes = packet.bytes();
            let at = bytes.len() - packet.payload.len() - 4;
            bytes[at..at + 4].fill(0);
            bytes
        };
        let packet = init(family.client(), family.vip());
        let sent = bed.send_bytes(Hook::Ingress, &without(&packet));
        let expected = without(&packet.clone().to(family.backend()));
        let from = if bed.device() == Device::Bare { 14 } else { 0 };
        assert_eq!(sent.output, expected[from..]);
        sent.passes_any(NewFlow);
    });
}

#[test]
fn association_is_masqueraded() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("masqueraded SCTP", |bed, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bed.service_with(family.vip(), SCTP, &[family.backend()], record);
        bed.settings(&Settings {
            source_v4: Address::from(Family::V4.node()),
            source_v6: Address::from(Family::V6.node()),
            first_port: 10_000,
            ports: 1,
            ..Settings::zeroed()
        });
        let packet = init(family.client(), family.vip());
        let between = packet.clone().from((family.client().ip(), 10_000).into()).to(family.backend());
        bed.send(Hook::Ingress, &packet).passes(NewFlow, &between);
        let outside = between.clone().from((family.node(), 10_000).into());
        bed.send(Hook::Egress, &between).passes(Masquerade, &outside);
    });
}

#[test]
fn association_without_backends_is_rejected() {
    each_on(&[Device::Ethernet, Device::Bare], "reject SCTP", |bed, family| {
        bed.service(family.empty_vip(), SCTP, &[]);
        let packet = init(family.client(), family.empty_vip());
        let (kind, quote) = if family == Family::V4 { ([3, 3], 28) } else { ([1, 4], 48) };
        let (from, to) = (family.empty_vip().ip(), family.client().ip());
        let answer = our_own(Packet::icmp(from, to, kind, [0; 4], &packet.network()[..quote]));
        bed.send(Hook::Ingress, &packet).redirects(RejectUdp, &answer);
    });
}
