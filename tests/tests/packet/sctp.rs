//! SCTP: the same flows, another checksum. It is left to a device by a field of zeros, and covers ports but no addresses.

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
    bench::{Bench, Device, Hook, SCTP},
    packets::Packet,
    reject::our_own,
    stage::{Family, each, each_on},
};

const DATA: u8 = 0;
/// What the client sends in every packet after the first, and the backend.
const TAGS: (u32, u32) = (0x5e4e_0001, 0xc11e_0001);

fn init(from: SocketAddr, to: SocketAddr) -> Packet {
    Packet::sctp(from, to, 0, chunk::INIT, &[7; 16])
}

#[test]
fn an_association_from_init_to_shutdown() {
    each("SCTP", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, SCTP, &[backend]);
        let sent = init(client, vip);
        let there = |bench: &mut Bench, packet: &Packet, outcome| {
            bench.send(Hook::Ingress, packet).passes(outcome, &packet.clone().to(backend));
        };
        let back = |bench: &mut Bench, kind, data: &[u8]| {
            let packet = Packet::sctp(backend, client, TAGS.1, kind, data);
            bench.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
        };
        let phase = |bench: &Bench, phase| bench.assert_flow(&sent, &sent.clone().to(backend), phase);
        there(bench, &sent, NewFlow);
        phase(bench, Phase::Opening);
        // A retransmission.
        there(bench, &sent, Forward);
        back(bench, chunk::INIT_ACK, &[9; 40]);
        phase(bench, Phase::Accepted);
        for length in [1, 2, 3, 4, 500, 1400] {
            there(bench, &Packet::sctp(client, vip, TAGS.0, DATA, &vec![0xa5; length]), Forward);
            back(bench, DATA, &vec![0x5a; length]);
        }
        phase(bench, Phase::Established);
        there(bench, &Packet::sctp(client, vip, TAGS.0, chunk::SHUTDOWN, &[0; 4]), Forward);
        phase(bench, Phase::HalfClosed);
        back(bench, chunk::SHUTDOWN_ACK, &[]);
        phase(bench, Phase::TimeWait);
        // Another association from the same port.
        there(bench, &sent, NewFlow);
        phase(bench, Phase::Opening);
    });
}

#[test]
fn only_an_abort_with_the_right_tag_ends_it() {
    each("SCTP ABORT", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, SCTP, &[backend]);
        let sent = init(client, vip);
        bench.send(Hook::Ingress, &sent).passes(NewFlow, &sent.clone().to(backend));
        let reply = |tag, kind| Packet::sctp(backend, client, tag, kind, b"");
        let packet = reply(TAGS.1, chunk::INIT_ACK);
        bench.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
        let data = Packet::sctp(client, vip, TAGS.0, DATA, b"x");
        bench.send(Hook::Ingress, &data).passes(Forward, &data.clone().to(backend));
        for (tag, phase) in [(0xbad, Phase::Established), (TAGS.1, Phase::Closed)] {
            let packet = reply(tag, chunk::ABORT);
            bench.send(Hook::Egress, &packet).passes(Reply, &packet.clone().from(vip));
            bench.assert_flow(&sent, &sent.clone().to(backend), phase);
        }
        let stray = Packet::sctp(family.stranger(), vip, 1, chunk::ABORT, b"");
        bench.send(Hook::Ingress, &stray).drops(StrayReset);
    });
}

/// Where the sender left the checksum to its device, the field is 0 and stays so.
#[test]
fn a_checksum_that_is_left_to_the_device_stays_so() {
    each("SCTP without checksum", |bench, family| {
        bench.service(family.vip(), SCTP, &[family.backend()]);
        let without = |packet: &Packet| {
            let mut octets = packet.bytes();
            let at = octets.len() - packet.payload.len() - 4;
            octets[at..at + 4].fill(0);
            octets
        };
        let packet = init(family.client(), family.vip());
        let sent = bench.send_octets(Hook::Ingress, &without(&packet));
        let expected = without(&packet.clone().to(family.backend()));
        let from = if bench.device() == Device::Bare { 14 } else { 0 };
        assert_eq!(sent.output, expected[from..]);
        sent.goes_on(NewFlow);
    });
}

#[test]
fn masqueraded() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("masqueraded SCTP", |bench, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bench.service_with(family.vip(), SCTP, &[family.backend()], record);
        bench.settings(&Settings {
            source_v4: Address::from(Family::V4.node()),
            source_v6: Address::from(Family::V6.node()),
            first_port: 10_000,
            ports: 1,
            ..Settings::zeroed()
        });
        let packet = init(family.client(), family.vip());
        let between = packet.clone().from((family.client().ip(), 10_000).into()).to(family.backend());
        bench.send(Hook::Ingress, &packet).passes(NewFlow, &between);
        let outside = between.clone().from((family.node(), 10_000).into());
        bench.send(Hook::Egress, &between).passes(Masquerade, &outside);
    });
}

#[test]
fn without_backends_it_is_rejected() {
    each_on(&[Device::Ethernet, Device::Bare], "reject SCTP", |bench, family| {
        bench.service(family.empty_vip(), SCTP, &[]);
        let packet = init(family.client(), family.empty_vip());
        let (kind, quote) = if family == Family::V4 { ([3, 3], 28) } else { ([1, 4], 48) };
        let (from, to) = (family.empty_vip().ip(), family.client().ip());
        let answer = our_own(Packet::icmp(from, to, kind, [0; 4], &packet.network()[..quote]));
        bench.send(Hook::Ingress, &packet).bounces(RejectUdp, &answer);
    });
}
