//! Datagrams in parts: only the first one has ports, the others must go the same way.

use std::net::SocketAddr;

use etherparse::IpNumber;
use lb_common::Outcome::*;

use super::{
    bench::{Hook, UDP},
    packets::{Packet, fragments},
    stage::{Family, each},
};

const PAYLOAD: [u8; 301] = [0xa5; 301];

#[test]
fn a_datagram_in_three_parts_each_way() {
    each("fragments", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let parts = fragments(&sent, 77, 128).into_iter().zip(fragments(&sent.clone().to(backend), 77, 128));
        for ((part, translated), outcome) in parts.zip([NewFlow, Forward, Forward]) {
            bench.send(Hook::Ingress, &part).passes(outcome, &translated);
        }
        let answer = Packet::udp(backend, client, &PAYLOAD);
        let parts =
            fragments(&answer, 78, 128).into_iter().zip(fragments(&answer.clone().from(vip), 78, 128));
        for (part, translated) in parts {
            bench.send(Hook::Egress, &part).passes(Reply, &translated);
        }
        bench.assert_flows(1);
    });
}

/// What comes before the first fragment cannot be known, what comes after it can, in any order and again.
#[test]
fn out_of_order() {
    each("fragments out of order", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        bench.send(Hook::Ingress, &parts[1]).passes_untouched(UnknownFragment);
        bench.assert_flows(0);
        bench.send(Hook::Ingress, &parts[0]).passes(NewFlow, &translated[0]);
        for index in [2, 1, 2, 0] {
            bench.send(Hook::Ingress, &parts[index]).passes(Forward, &translated[index]);
        }
    });
}

/// Identifications of two hosts, and of two datagrams of one host, do not mix.
#[test]
fn interleaved_datagrams() {
    each("interleaved fragments", |bench, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let other_backend = family.other_backend();
        bench.service(vip, UDP, &[backend]);
        bench.service(family.other_vip(), UDP, &[other_backend]);
        let one = Packet::udp(client, vip, &PAYLOAD);
        let two = Packet::udp(client, family.other_vip(), &PAYLOAD);
        let three = Packet::udp(family.stranger(), vip, &PAYLOAD);
        let datagrams = [(one, 77, backend), (two, 77, other_backend), (three, 77, backend)];
        for index in 0..3 {
            for (sent, identification, backend) in &datagrams {
                let part = &fragments(sent, *identification, 128)[index];
                let translated = &fragments(&sent.clone().to(*backend), *identification, 128)[index];
                let outcome = if index == 0 { NewFlow } else { Forward };
                bench.send(Hook::Ingress, part).passes(outcome, translated);
            }
        }
        let unknown = &fragments(&datagrams[0].0, 78, 128)[1];
        bench.send(Hook::Ingress, unknown).passes_untouched(UnknownFragment);
    });
}

/// A datagram that is not for a service leaves no trace.
#[test]
fn fragments_of_others() {
    each("fragments of others", |bench, family| {
        bench.service(family.vip(), UDP, &[family.backend()]);
        let parts = fragments(&Packet::udp(family.client(), family.stranger(), &PAYLOAD), 77, 128);
        bench.send(Hook::Ingress, &parts[0]).passes_untouched(NoService);
        bench.send(Hook::Ingress, &parts[1]).passes_untouched(UnknownFragment);
        bench.assert_flows(0);
    });
}

/// Behind options, only the first fragment of IPv6 tells what the datagram is: the header of every fragment tells the
/// options.
#[test]
fn fragments_of_options_and_a_datagram() {
    each("fragments with options", |bench, family| {
        if family == Family::V4 {
            return;
        }
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let with_options = |to: SocketAddr| {
            let datagram = Packet::udp(client, to, &PAYLOAD).network().split_off(40);
            // UDP comes next; padding.
            let octets = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &datagram].concat();
            fragments(
                &Packet::raw(client.ip(), to.ip(), IpNumber::IPV6_DESTINATION_OPTIONS, &octets),
                77,
                128,
            )
        };
        let parts = with_options(vip).into_iter().zip(with_options(backend));
        for ((part, translated), outcome) in parts.zip([NewFlow, Forward, Forward]) {
            bench.send(Hook::Ingress, &part).passes(outcome, &translated);
        }
    });
}
