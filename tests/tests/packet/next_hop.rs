//! The cache of next hops: what flows share, when a lookup renews it, and what happens if two keys have one slot.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    thread::sleep,
    time::Duration,
};

use lb_common::{
    Outcome::*,
    conntrack::{NextHopKey, Tuple},
};

use super::{
    clock::{tick, within_a_tick},
    packets::{PEER, Packet},
    stage::Family,
    test_run::stay_on_one_cpu,
    testbed::{Testbed, UDP},
    wire::{Mode, WIRE, XDP_REDIRECT, XDP_TX, each_on_wires, routed},
    xdp::{service, translated},
};

/// A MAC address that the next hop does not have at first.
const MOVED: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 9];

/// Gives the backend this MAC address.
fn set_neighbour(family: Family, mac: [u8; 6]) {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let arguments = format!("neighbour replace {} lladdr {mac} dev wire", family.backend().ip());
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
}

/// The MAC address that a packet of an existing flow leaves to.
#[track_caller]
fn next_hop(bed: &mut Testbed, packet: &Packet) -> [u8; 6] {
    let run = bed.arrive(Mode::Native, packet);
    run.check(XDP_TX, &[(Routed, 1)]);
    run.output[..6].try_into().unwrap()
}

#[test]
fn flows_to_one_destination_share_a_lookup_for_a_tick() {
    // Each CPU has its own cache.
    stay_on_one_cpu();
    each_on_wires("shared next hop", |bed, family| {
        service(bed, family.vip(), UDP, &[family.backend()]);
        let [one, other] =
            [family.client(), family.stranger()].map(|client| Packet::udp(client, family.vip(), b"?"));
        for packet in [&one, &other] {
            bed.arrive(Mode::Native, packet).check(XDP_TX, &[(NewRoutedFlow, 1)]);
        }
        let found = within_a_tick(|| {
            set_neighbour(family, PEER);
            bed.expire_next_hops();
            let first = next_hop(bed, &one);
            set_neighbour(family, MOVED);
            [first, next_hop(bed, &other), next_hop(bed, &one)]
        });
        assert_eq!(found, [PEER; 3], "one lookup, before the neighbour moved");
        let before = tick();
        while tick() == before {
            sleep(Duration::from_millis(1));
        }
        let found = [&one, &other].map(|packet| next_hop(bed, packet));
        assert_eq!(found, [MOVED; 2], "the next tick follows the change");
        set_neighbour(family, PEER);
    });
}

#[test]
fn destinations_with_one_slot_keep_their_own_next_hops() {
    stay_on_one_cpu();
    each_on_wires("colliding next hops", |bed, family| {
        if family == Family::V6 {
            return;
        }
        let slot = |ip: Ipv4Addr| {
            let address = IpAddr::from(ip).into();
            NextHopKey::new(&Tuple::new(address, address, 0, 0, UDP), WIRE).slot()
        };
        let near = Ipv4Addr::new(203, 0, 113, 194);
        let mut remote = (0..=u16::MAX).map(|host| {
            let [high, low] = host.to_be_bytes();
            Ipv4Addr::new(100, 64, high, low)
        });
        let far = remote.find(|ip| slot(*ip) == slot(near)).expect("65,536 addresses for 2,048 slots");
        let ways = [(family.vip(), near, XDP_REDIRECT), (family.other_vip(), far, XDP_TX)];
        for (vip, backend, _) in ways {
            service(bed, vip, UDP, &[SocketAddr::new(backend.into(), 8080)]);
        }
        for outcome in [NewRoutedFlow, Routed, Routed] {
            for (vip, _, action) in ways {
                let packet = Packet::udp(family.client(), vip, b"?");
                let run = bed.arrive(Mode::Native, &packet);
                let expected = routed(&translated(bed, &packet));
                run.leaves(action, outcome, &expected);
            }
        }
    });
}
