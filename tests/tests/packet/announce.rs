//! `tc_announce`: the ARP requests and neighbour solicitations that it answers, and the packets that end an
//! announcement.

use etherparse::{
    ArpEthIpv4Packet, ArpOperation, ArpPacket, EtherType, Ethernet2Header, Icmpv6Header, Icmpv6Type,
    IpNumber, Ipv6Header, icmpv6::NeighborAdvertisementHeader,
};
use lb_common::{Address, AnnounceKey, Announcement, Heard};
use lb_datapath::Announcements;

use super::{
    packets::{NODE, PEER},
    test_run::{CHECKSUM_COMPLETE, test_run},
    testbed::{ANNOUNCE_PROGRAM, Device, Testbed},
};

const PASS: u32 = u32::MAX;
const REDIRECT: u32 = 7;
/// `BPF_PROG_TEST_RUN` gives packets the loopback device.
const DEVICE: u32 = 1;
const BROADCAST: [u8; 6] = [0xff; 6];
const VIP: [u8; 4] = [192, 0, 2, 10];
const CLIENT: [u8; 4] = [192, 0, 2, 99];
const VIP6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xaa, 0xbb, 0xcc];
const CLIENT6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
const GROUP: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xaa, 0xbb, 0xcc];
const GROUP_MAC: [u8; 6] = [0x33, 0x33, 0xff, 0xaa, 0xbb, 0xcc];
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const SECOND: u64 = 1_000_000_000;

/// The testbed, which announces both addresses.
fn bed(case: &str, device: Device) -> Option<Testbed> {
    let mut bed = Testbed::new();
    if !bed.start(case, device) {
        return None;
    }
    for address in addresses() {
        announce(&mut bed, address, Announcements::now() + 3_600 * SECOND);
    }
    Some(bed)
}

fn addresses() -> [Address; 2] {
    [Address::from_v4(VIP), Address::from_v6(VIP6)]
}

fn announce(bed: &mut Testbed, address: Address, deadline: u64) {
    let key = AnnounceKey { address, device: DEVICE };
    let record = Announcement { deadline, since: Announcements::now(), mac: NODE, reserved: [0; 2] };
    bed.insert("ANNOUNCED", key, record);
    bed.insert("ANNOUNCE_HEARD", key, Heard::default());
}

fn heard(bed: &Testbed, address: Address) -> Heard {
    bed.read("ANNOUNCE_HEARD", AnnounceKey { address, device: DEVICE }).unwrap()
}

/// Runs the program on a frame; returns its return code and the frame afterwards.
#[track_caller]
fn run(bed: &Testbed, frame: &[u8]) -> (u32, Vec<u8>) {
    let mut output = vec![0; frame.len() + 256];
    let flags = if bed.device() == Device::EthernetWithSum { CHECKSUM_COMPLETE } else { 0 };
    let program = bed.program(ANNOUNCE_PROGRAM).fd().unwrap();
    let (action, length) = test_run(program, frame, &mut output, (&[], &mut []), flags).unwrap();
    output.truncate(length);
    (action, output)
}

#[track_caller]
fn answers(bed: &Testbed, frame: &[u8], answer: &[u8]) {
    assert_eq!(run(bed, frame), (REDIRECT, answer.to_vec()));
}

#[track_caller]
fn passes(bed: &Testbed, frame: &[u8]) {
    assert_eq!(run(bed, frame), (PASS, frame.to_vec()));
}

fn arp(
    (to, from): ([u8; 6], [u8; 6]),
    operation: ArpOperation,
    (sender_mac, sender_ipv4): ([u8; 6], [u8; 4]),
    (target_mac, target_ipv4): ([u8; 6], [u8; 4]),
) -> Vec<u8> {
    let link = Ethernet2Header { source: from, destination: to, ether_type: EtherType::ARP };
    let packet = ArpEthIpv4Packet { operation, sender_mac, sender_ipv4, target_mac, target_ipv4 };
    [&link.to_bytes()[..], &ArpPacket::from(packet).to_bytes()].concat()
}

fn request(to: [u8; 6], sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    arp((to, PEER), ArpOperation::REQUEST, (PEER, sender), ([0; 6], target))
}

fn reply(target: [u8; 4]) -> Vec<u8> {
    arp((PEER, NODE), ArpOperation::REPLY, (NODE, VIP), (PEER, target))
}

fn icmp(
    (to, from): ([u8; 6], [u8; 6]),
    (source, destination): ([u8; 16], [u8; 16]),
    kind: Icmpv6Type,
    options: &[u8],
) -> Vec<u8> {
    let payload = [&VIP6[..], options].concat();
    let header = Icmpv6Header::with_checksum(kind, source, destination, &payload).unwrap();
    let ip = Ipv6Header {
        payload_length: u16::try_from(header.header_len() + payload.len()).unwrap(),
        next_header: IpNumber::IPV6_ICMP,
        hop_limit: 255,
        source,
        destination,
        ..Ipv6Header::default()
    };
    let link = Ethernet2Header { source: from, destination: to, ether_type: EtherType::IPV6 };
    [&link.to_bytes()[..], &ip.to_bytes(), &header.to_bytes(), &payload].concat()
}

fn solicitation(source: [u8; 16], options: &[u8]) -> Vec<u8> {
    icmp((GROUP_MAC, PEER), (source, GROUP), Icmpv6Type::NeighborSolicitation, options)
}

fn advertisement((to, from): ([u8; 6], [u8; 6]), destination: [u8; 16], solicited: bool) -> Vec<u8> {
    let flags = NeighborAdvertisementHeader { router: false, solicited, r#override: true };
    let option = [&[2, 1], &from[..]].concat();
    icmp((to, from), (VIP6, destination), Icmpv6Type::NeighborAdvertisement(flags), &option)
}

/// The option with the client's link-layer address, and the nonce of enhanced duplicate address detection (RFC 7527).
const LINK: [u8; 8] = [1, 1, PEER[0], PEER[1], PEER[2], PEER[3], PEER[4], PEER[5]];
const NONCE: [u8; 8] = [14, 1, 1, 2, 3, 4, 5, 6];

#[test]
fn announced_addresses_are_answered() {
    for device in [Device::Ethernet, Device::EthernetWithSum] {
        let Some(bed) = bed("answers", device) else { continue };
        answers(&bed, &request(BROADCAST, CLIENT, VIP), &reply(CLIENT));
        answers(&bed, &request(NODE, CLIENT, VIP), &reply(CLIENT));
        answers(&bed, &request(BROADCAST, [0; 4], VIP), &reply([0; 4]));
        let padded = [request(BROADCAST, CLIENT, VIP), vec![0; 18]].concat();
        answers(&bed, &padded, &[reply(CLIENT), vec![0; 18]].concat());
        assert_eq!(heard(&bed, addresses()[0]), Heard { answers: 4, ..Heard::default() });

        let to_client = advertisement((PEER, NODE), CLIENT6, true);
        answers(&bed, &solicitation(CLIENT6, &LINK), &to_client);
        answers(&bed, &solicitation(CLIENT6, &[LINK, NONCE].concat()), &to_client);
        let unicast = icmp((NODE, PEER), (CLIENT6, VIP6), Icmpv6Type::NeighborSolicitation, &[]);
        answers(&bed, &unicast, &to_client);
        let to_all = advertisement(([0x33, 0x33, 0, 0, 0, 1], NODE), ALL_NODES, false);
        answers(&bed, &solicitation([0; 16], &NONCE), &to_all);
        assert_eq!(heard(&bed, addresses()[1]), Heard { answers: 4, ..Heard::default() });
    }
}

#[test]
fn everything_else_passes_untouched() {
    let Some(bed) = bed("other packets", Device::Ethernet) else { return };
    passes(&bed, &request(BROADCAST, CLIENT, [192, 0, 2, 11]));
    passes(&bed, &request([2; 6], CLIENT, VIP));
    passes(&bed, &arp((NODE, PEER), ArpOperation::REPLY, (PEER, CLIENT), (NODE, VIP)));
    passes(&bed, &request(BROADCAST, CLIENT, VIP)[..41]);
    let mut other_target = solicitation(CLIENT6, &LINK);
    other_target[54 + 23] ^= 1;
    passes(&bed, &other_target);
    let mut wrong_sum = solicitation(CLIENT6, &LINK);
    wrong_sum[57] ^= 1;
    passes(&bed, &wrong_sum);
    passes(&bed, &solicitation(CLIENT6, &LINK)[..80]);
    let tagged = |frame: Vec<u8>| [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat();
    passes(&bed, &tagged(request(BROADCAST, CLIENT, VIP)));
    passes(&bed, &tagged(solicitation(CLIENT6, &LINK)));
    for address in addresses() {
        assert_eq!(heard(&bed, address), Heard::default());
    }
}

#[test]
fn record_answers_until_its_deadline_and_on_its_device_only() {
    let Some(mut bed) = bed("deadline", Device::Ethernet) else { return };
    let questions = [request(BROADCAST, CLIENT, VIP), solicitation(CLIENT6, &LINK)];
    for address in addresses() {
        announce(&mut bed, address, Announcements::now());
    }
    questions.iter().for_each(|question| passes(&bed, question));
    for address in addresses() {
        announce(&mut bed, address, Announcements::now() + 60 * SECOND);
    }
    questions.iter().for_each(|question| assert_eq!(run(&bed, question).0, REDIRECT));
    let mut elsewhere = Testbed::new();
    assert!(elsewhere.start("another device", Device::Ethernet));
    for address in addresses() {
        let key = AnnounceKey { address, device: DEVICE + 1 };
        let record = Announcement { deadline: Announcement::NEVER, since: 1, mac: NODE, reserved: [0; 2] };
        elsewhere.insert("ANNOUNCED", key, record);
        elsewhere.insert("ANNOUNCE_HEARD", key, Heard::default());
    }
    questions.iter().for_each(|question| passes(&elsewhere, question));
}

#[test]
fn claim_of_another_machine_ends_the_announcement() {
    let gratuitous = |operation| arp((BROADCAST, PEER), operation, (PEER, VIP), ([0; 6], VIP));
    let (questions, all_nodes) =
        ([request(BROADCAST, CLIENT, VIP), solicitation(CLIENT6, &LINK)], [0x33, 0x33, 0, 0, 0, 1]);
    for (name, claim, about) in [
        ("announcement", gratuitous(ArpOperation::REQUEST), 0),
        ("gratuitous reply", gratuitous(ArpOperation::REPLY), 0),
        ("request from the address", request(BROADCAST, VIP, CLIENT), 0),
        ("unsolicited advertisement", advertisement((all_nodes, PEER), ALL_NODES, false), 1),
        ("solicited advertisement", advertisement((NODE, PEER), CLIENT6, true), 1),
    ] {
        let Some(mut bed) = bed(name, Device::Ethernet) else { return };
        let address = addresses()[about];
        let before = Announcements::now();
        passes(&bed, &claim);
        let noted = heard(&bed, address);
        assert!((before..=Announcements::now()).contains(&noted.conflict_at), "{name}: {noted:?}");
        assert_eq!((noted.conflicts, noted.conflict_mac, noted.answers), (1, PEER, 0), "{name}");
        passes(&bed, &questions[about]);
        // A node that no longer answers counts no further conflict: later claims come from the owner.
        passes(&bed, &claim);
        assert_eq!(heard(&bed, address), noted, "{name}");
        // If the agent only extends the announcement, the program stays silent. It answers again once an announcement
        // has begun after the conflict.
        let key = AnnounceKey { address, device: DEVICE };
        let old: Announcement = bed.read("ANNOUNCED", key).unwrap();
        bed.insert("ANNOUNCED", key, Announcement { deadline: old.deadline + SECOND, ..old });
        passes(&bed, &questions[about]);
        bed.insert("ANNOUNCED", key, Announcement { since: Announcements::now(), ..old });
        assert_eq!(run(&bed, &questions[about]).0, REDIRECT, "{name}");
    }
}

#[test]
fn own_announcement_is_no_conflict() {
    let Some(bed) = bed("own frames", Device::Ethernet) else { return };
    passes(&bed, &arp((BROADCAST, NODE), ArpOperation::REQUEST, (NODE, VIP), ([0; 6], VIP)));
    passes(&bed, &advertisement(([0x33, 0x33, 0, 0, 0, 1], NODE), ALL_NODES, false));
    for address in addresses() {
        assert_eq!(heard(&bed, address), Heard::default());
    }
}
