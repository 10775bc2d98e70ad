//! Fragments: only the first one has ports, and the others must reach the same backend.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use etherparse::IpNumber;
use lb_common::{Address, Network, Networks, Outcome::*, Settings};

use super::{
    packets::{Packet, fragments},
    stage::{Family, each, each_ethernet, each_on},
    testbed::{Device, Hook, PLACES, Sent, Testbed, UDP},
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

/// A later fragment to an address outside `VIPS` is unknown if it arrives before the first fragment. After the first
/// one, later fragments are translated, in any order and repeatedly.
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
        for index in [2, 2, 1, 0] {
            bed.send(Hook::Ingress, &parts[index]).passes(Forward, &translated[index]);
        }
    });
}

/// Datagrams with the same identification are kept apart by their source and destination, and datagrams of one client
/// to one address by their identification.
#[test]
fn fragments_of_interleaved_datagrams_are_distinguished() {
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

/// A test run does not show the fragments that the programs send into the node again: the kernel queues them at the
/// device.
#[test]
fn early_fragments_are_held_until_the_first_one_arrives() {
    // Runs without CHECKSUM_COMPLETE: to send the held fragments, the program resizes the frame. The kernel then drops
    // the sum over the frame, but the test run still verifies it.
    each_on(&[Device::Ethernet, Device::Bare], "early fragments", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        bed.add_vip(vip.ip(), 0);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        let others = fragments(&Packet::udp(family.stranger(), vip, &PAYLOAD), 77, 128);
        for part in [&parts[2], &others[1], &parts[1]] {
            bed.send(Hook::Ingress, part).drops(FragmentHeld);
        }
        assert_eq!(bed.held(), [&parts[2], &others[1], &parts[1]].map(|part| part.network()));
        bed.send(Hook::Ingress, &parts[0]).passes(NewFlow, &translated[0]);
        assert_eq!(bed.held(), [others[1].network()]);
        for index in [1, 2] {
            bed.send(Hook::Ingress, &parts[index]).passes(Forward, &translated[index]);
        }
    });
}

/// The limit keeps held fragments apart from a later datagram with the same identification.
#[test]
fn early_fragments_wait_no_longer_than_2_seconds() {
    each_on(&[Device::Ethernet, Device::Bare], "old fragments", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        bed.add_vip(vip.ip(), 0);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        bed.send(Hook::Ingress, &parts[2]).drops(FragmentHeld);
        bed.age_held(2);
        bed.send(Hook::Ingress, &parts[0]).passes(NewFlow, &translated[0]);
        assert_eq!(bed.held(), [parts[2].network()], "it is not sent into the node again");
    });
}

/// If a CPU is interrupted while other CPUs fill the whole ring, the place for the fragment of the interrupted CPU
/// already has a fragment with a newer ticket.
#[test]
fn fragment_with_an_older_ticket_replaces_no_newer_one() {
    each("interrupted CPU", |bed, family| {
        let vip = family.vip();
        bed.service(vip, UDP, &[family.backend()]);
        bed.add_vip(vip.ip(), 0);
        let parts = fragments(&Packet::udp(family.client(), vip, &PAYLOAD), 77, 128);
        bed.set_tickets(PLACES as u64);
        bed.send(Hook::Ingress, &parts[1]).drops(FragmentHeld);
        bed.set_tickets(0);
        bed.send(Hook::Ingress, &parts[2]).passes_untouched(UnknownFragment);
        assert_eq!(bed.held(), [parts[1].network()]);
    });
}

/// Asserts that the programs drop the later fragments of a datagram whose first fragment does not pass, and hold no
/// fragment that arrives after the first one. `first` asserts what happens to the first fragment.
fn assert_all_dropped(bed: &mut Testbed, datagram: &Packet, first: impl Fn(Sent)) {
    let parts = fragments(datagram, 77, 128);
    first(bed.send(Hook::Ingress, &parts[0]));
    for index in [1, 2, 1] {
        bed.send(Hook::Ingress, &parts[index]).drops(FragmentDropped);
    }
    let parts = fragments(datagram, 78, 128);
    bed.send(Hook::Ingress, &parts[2]).drops(FragmentHeld);
    first(bed.send(Hook::Ingress, &parts[0]));
    bed.send(Hook::Ingress, &parts[1]).drops(FragmentDropped);
    assert_eq!(bed.held(), [parts[2].network()], "it is not sent into the node again");
    bed.assert_flows(0);
}

#[test]
fn fragments_of_a_rejected_datagram_are_dropped() {
    // Runs without CHECKSUM_COMPLETE, as above: the program resizes the frame.
    each_on(&[Device::Ethernet, Device::Bare], "rejected datagram", |bed, family| {
        let vip = family.empty_vip();
        bed.service(vip, UDP, &[]);
        bed.add_vip(vip.ip(), 0);
        let datagram = Packet::udp(family.client(), vip, &PAYLOAD);
        assert_all_dropped(bed, &datagram, |sent| sent.redirects_any(RejectUdp));
    });
}

#[test]
fn fragments_of_a_dropped_datagram_are_dropped() {
    each("denied datagram", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        let prefix = if family == Family::V4 { 32 } else { 128 };
        let denied = Networks::new([Network::new(Address::from(client.ip()), prefix)]);
        bed.settings(&Settings { denied, ports: 1, ..Settings::zeroed() });
        bed.service(vip, UDP, &[family.backend()]);
        bed.add_vip(vip.ip(), 0);
        let datagram = Packet::udp(client, vip, &PAYLOAD);
        assert_all_dropped(bed, &datagram, |sent| sent.drops(SourceNotAllowed));
        bed.settings(&Settings { ports: 1, ..Settings::zeroed() });
        let parts = fragments(&datagram, 77, 128);
        bed.send(Hook::Ingress, &parts[0]).passes_any(NewFlow);
        bed.send(Hook::Ingress, &parts[1]).passes_any(Forward);
    });
}

/// The programs release each held fragment in the buffer of the first fragment. If both are equally long, the kernel
/// keeps its sum over the frame, which must be right when the buffer carries the first fragment again.
#[test]
fn first_fragment_keeps_the_sum_over_its_frame() {
    each_ethernet("early fragment of the same length", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        bed.add_vip(vip.ip(), 0);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        bed.send(Hook::Ingress, &parts[1]).drops(FragmentHeld);
        bed.send(Hook::Ingress, &parts[0]).passes(NewFlow, &translated[0]);
        assert!(bed.held().is_empty());
    });
}

/// The address is in `VIPS`, so later fragments are held, but the datagram is for no Service.
#[test]
fn early_fragments_of_no_service_are_released() {
    each("early fragments of others", |bed, family| {
        bed.service(family.vip(), UDP, &[family.backend()]);
        bed.add_vip(family.stranger().ip(), 0);
        let parts = fragments(&Packet::udp(family.client(), family.stranger(), &PAYLOAD), 77, 128);
        bed.send(Hook::Ingress, &parts[2]).drops(FragmentHeld);
        bed.send(Hook::Ingress, &parts[0]).passes_untouched(NoService);
        assert!(bed.held().is_empty());
        for index in [2, 1] {
            bed.send(Hook::Ingress, &parts[index]).passes_untouched(UnknownFragment);
        }
    });
}

/// The programs translate a backend's packets at egress, but hold their fragments where they enter the node: at
/// ingress.
#[test]
fn early_fragments_of_answers_are_held_at_ingress() {
    each("early fragments of answers", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        bed.add_endpoint(backend.ip());
        bed.send(Hook::Ingress, &Packet::udp(client, vip, b"?")).passes_any(NewFlow);
        let answer = Packet::udp(backend, client, &PAYLOAD);
        let parts = fragments(&answer, 78, 128);
        let translated = fragments(&answer.from(vip), 78, 128);
        bed.send(Hook::Ingress, &parts[1]).drops(FragmentHeld);
        bed.send(Hook::Ingress, &parts[0]).passes_untouched(OtherHook);
        bed.send(Hook::Egress, &parts[0]).passes(Reply, &translated[0]);
        for index in [1, 2] {
            bed.send(Hook::Ingress, &parts[index]).passes_untouched(OtherHook);
            bed.send(Hook::Egress, &parts[index]).passes(Reply, &translated[index]);
        }
        bed.send(Hook::Egress, &fragments(&Packet::udp(backend, client, &PAYLOAD), 79, 128)[1])
            .passes_untouched(UnknownFragment);
    });
}

/// The entry of a datagram does not apply to another one with the same identification.
#[test]
fn fragment_after_a_complete_datagram_is_held_for_another_one() {
    each("complete datagrams", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        bed.add_vip(vip.ip(), 0);
        let sent = Packet::udp(client, vip, &PAYLOAD);
        let (parts, translated) = (fragments(&sent, 77, 128), fragments(&sent.clone().to(backend), 77, 128));
        for order in [[0, 1, 2], [0, 2, 1]] {
            for (index, outcome) in order.into_iter().zip([Forward; 3]) {
                let first_of_all = index == 0 && order[1] == 1;
                let outcome = if first_of_all { NewFlow } else { outcome };
                bed.send(Hook::Ingress, &parts[index]).passes(outcome, &translated[index]);
            }
        }
        bed.send(Hook::Ingress, &parts[1]).drops(FragmentHeld);
    });
}

#[test]
fn early_fragments_too_large_to_hold_pass_untouched() {
    each("large early fragments", |bed, family| {
        let (client, vip) = (family.client(), family.vip());
        bed.service(vip, UDP, &[family.backend()]);
        bed.add_vip(vip.ip(), 0);
        let headers = if family == Family::V4 { 20 } else { 48 };
        let largest = (1984 - headers) / 8 * 8;
        let parts = |size| fragments(&Packet::udp(client, vip, &[0xa5; 5000]), 77, size);
        bed.send(Hook::Ingress, &parts(largest + 8)[1]).passes_untouched(UnknownFragment);
        bed.send(Hook::Ingress, &parts(largest)[1]).drops(FragmentHeld);
    });
}

#[test]
fn early_fragments_displace_the_oldest_ones_only() {
    each("many early fragments", |bed, family| {
        let vip = family.vip();
        bed.service(vip, UDP, &[family.backend()]);
        bed.add_vip(vip.ip(), 0);
        let part = |number: u16| {
            let client = SocketAddr::new(family.client().ip(), 1);
            fragments(&Packet::udp(client, vip, &PAYLOAD), u32::from(number), 128).remove(1)
        };
        let places = u16::try_from(PLACES).unwrap();
        for number in 0..places + 3 {
            bed.send(Hook::Ingress, &part(number)).drops(FragmentHeld);
        }
        let held = bed.held();
        assert_eq!((held.len(), &held[0]), (PLACES, &part(3).network()));
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

/// If IPv6 options follow the fragment header, only the first fragment contains the transport protocol: every fragment
/// header names the options.
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
