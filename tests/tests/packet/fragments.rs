//! Fragments: only the first one has ports, and the others must reach the same backend.

use std::net::SocketAddr;

use etherparse::IpNumber;
use lb_common::Outcome::*;

use super::{
    packets::{Packet, fragments},
    stage::{Family, each},
    testbed::{Hook, UDP},
};

const PAYLOAD: [u8; 301] = [0xa5; 301];

#[test]
fn fragments_follow_the_first_one_in_both_directions() {
    each("fragments", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let parts = fragments(&sent, 77, 128).into_iter().zip(fragments(&sent.clone().to(backend), 77, 128));
        for ((part, translated), outcome) in parts.zip([NewFlow, Forward, Forward]) {
            bed.send(Hook::Ingress, &part).passes(outcome, &translated);
        }
        let answer = Packet::udp(backend, client, &PAYLOAD);
        let parts =
            fragments(&answer, 78, 128).into_iter().zip(fragments(&answer.clone().from(vip), 78, 128));
        for (part, translated) in parts {
            bed.send(Hook::Egress, &part).passes(Reply, &translated);
        }
        bed.assert_flows(1);
    });
}

/// A fragment that arrives before the first one is unknown. One that arrives after it is known, in any order and
/// repeatedly.
#[test]
fn fragments_before_the_first_one_are_unknown() {
    each("fragments out of order", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        bed.send(Hook::Ingress, &parts[1]).passes_untouched(UnknownFragment);
        bed.assert_flows(0);
        bed.send(Hook::Ingress, &parts[0]).passes(NewFlow, &translated[0]);
        for index in [2, 1, 2, 0] {
            bed.send(Hook::Ingress, &parts[index]).passes(Forward, &translated[index]);
        }
    });
}

/// Identifications of two hosts, and of two datagrams of one host, are kept apart.
#[test]
fn fragments_of_interleaved_datagrams_are_told_apart() {
    each("interleaved fragments", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let other_backend = family.other_backend();
        bed.service(vip, UDP, &[backend]);
        bed.service(family.other_vip(), UDP, &[other_backend]);
        let one = Packet::udp(client, vip, &PAYLOAD);
        let two = Packet::udp(client, family.other_vip(), &PAYLOAD);
        let three = Packet::udp(family.stranger(), vip, &PAYLOAD);
        let datagrams = [(one, 77, backend), (two, 77, other_backend), (three, 77, backend)];
        for index in 0..3 {
            for (sent, identification, backend) in &datagrams {
                let part = &fragments(sent, *identification, 128)[index];
                let translated = &fragments(&sent.clone().to(*backend), *identification, 128)[index];
                let outcome = if index == 0 { NewFlow } else { Forward };
                bed.send(Hook::Ingress, part).passes(outcome, translated);
            }
        }
        let unknown = &fragments(&datagrams[0].0, 78, 128)[1];
        bed.send(Hook::Ingress, unknown).passes_untouched(UnknownFragment);
    });
}

/// A datagram of no Service leaves no entry.
#[test]
fn fragments_of_no_service_pass_untouched() {
    each("fragments of others", |bed, family| {
        bed.service(family.vip(), UDP, &[family.backend()]);
        let parts = fragments(&Packet::udp(family.client(), family.stranger(), &PAYLOAD), 77, 128);
        bed.send(Hook::Ingress, &parts[0]).passes_untouched(NoService);
        bed.send(Hook::Ingress, &parts[1]).passes_untouched(UnknownFragment);
        bed.assert_flows(0);
    });
}

/// After IPv6 options, only the first fragment shows the transport protocol: every fragment header names the options.
#[test]
fn fragments_after_ipv6_options_are_translated() {
    each("fragments with options", |bed, family| {
        if family == Family::V4 {
            return;
        }
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let with_options = |to: SocketAddr| {
            let datagram = Packet::udp(client, to, &PAYLOAD).network().split_off(40);
            // Destination options in front of the datagram: the next header is UDP, then padding follows.
            let bytes = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &datagram].concat();
            fragments(&Packet::raw(client.ip(), to.ip(), IpNumber::IPV6_DESTINATION_OPTIONS, &bytes), 77, 128)
        };
        let parts = with_options(vip).into_iter().zip(with_options(backend));
        for ((part, translated), outcome) in parts.zip([NewFlow, Forward, Forward]) {
            bed.send(Hook::Ingress, &part).passes(outcome, &translated);
        }
    });
}
