//! Next hops: the inputs of a lookup, the cache that flows share, its renewal, and two keys with one slot.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    thread::sleep,
    time::Duration,
};

use lb_common::{
    Outcome::*,
    Settings,
    conntrack::{NextHopKey, Tuple},
    settings_flags,
};
use lb_tests::skip;

use super::{
    clock::{tick, within_a_tick},
    packets::{PEER, Packet},
    stage::{Family, PORTS, masquerade_settings},
    test_run::stay_on_one_cpu,
    testbed::{Testbed, UDP},
    wire::{Mode, TC_ACT_REDIRECT, WIRE, XDP_REDIRECT, XDP_TX, each_on_wires, routed},
    xdp::{service, translated},
};

/// The new MAC address that the tests give the next hop.
const MOVED: [u8; 6] = [0, 0, 0x5e, 0, 0x53, 9];

/// Runs `ip` with these arguments.
fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
}

/// Gives the backend this MAC address.
fn set_neighbour(family: Family, mac: [u8; 6]) {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    ip(&format!("neighbour replace {} lladdr {mac} dev wire", family.backend().ip()));
}

/// The routers behind the devices `wire` and `other`. For IPv6, first configures the address and neighbour of `other`.
fn routers(family: Family) -> [&'static str; 2] {
    if family == Family::V4 {
        return ["198.51.100.254", "203.0.113.194"];
    }
    ip("address replace 2001:db8:d::fd/64 dev other nodad");
    ip("neighbour replace 2001:db8:d::1 lladdr 00:00:5e:00:53:01 dev other");
    ["2001:db8:b::fe", "2001:db8:d::1"]
}

/// Makes the router behind the device `other` the next hop of packets that match `rule`.
fn add_rule(family: Family, rule: &str) {
    let [_, other] = routers(family);
    let family = if family == Family::V4 { "-4" } else { "-6" };
    ip(&format!("{family} route replace default via {other} dev other table 100"));
    ip(&format!("{family} rule add {rule} lookup 100"));
}

/// The destination MAC address with which a packet of an existing flow leaves.
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
        let flags = settings_flags::ROUTES_BY_DESTINATION;
        bed.settings(&Settings { flags, ..masquerade_settings(PORTS) });
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

#[test]
fn policy_routing_by_source_selects_the_next_hop() {
    stay_on_one_cpu();
    each_on_wires("policy routing by source", |bed, family| {
        service(bed, family.vip(), UDP, &[family.backend()]);
        add_rule(family, &format!("from {}", family.stranger().ip()));
        for outcome in [NewRoutedFlow, Routed, Routed] {
            // One destination: neither client may get the next hop that was looked up for the other one.
            for (client, action) in [(family.client(), XDP_TX), (family.stranger(), XDP_REDIRECT)] {
                let packet = Packet::udp(client, family.vip(), b"?");
                let run = bed.arrive(Mode::Native, &packet);
                assert_eq!(run.action, action, "{client}");
                run.check(action, &[(outcome, 1)]);
            }
        }
    });
}

#[test]
fn policy_routing_by_port_selects_the_next_hop() {
    stay_on_one_cpu();
    each_on_wires("policy routing by port", |bed, family| {
        service(bed, family.vip(), UDP, &[family.backend()]);
        let (client, mut chosen) = (family.client(), family.client());
        chosen.set_port(50_000);
        add_rule(family, "ipproto udp sport 50000 dport 8080");
        for outcome in [NewRoutedFlow, Routed, Routed] {
            for (client, action) in [(client, XDP_TX), (chosen, XDP_REDIRECT)] {
                let packet = Packet::udp(client, family.vip(), b"?");
                bed.arrive(Mode::Native, &packet).check(action, &[(outcome, 1)]);
            }
        }
    });
}

/// `ip rule fwmark` applies to packets that another program has marked.
#[test]
fn policy_routing_by_mark_selects_the_next_hop() {
    if skip::is_older_than(6, 10) {
        return skip::whole("`bpf_fib_lookup` takes no mark before Linux 6.10");
    }
    each_on_wires("policy routing by mark", |bed, family| {
        service(bed, family.vip(), UDP, &[family.backend()]);
        add_rule(family, "fwmark 7");
        let source = |bed: &Testbed, packet: &Packet| IpAddr::from(bed.flows()[&packet.tuple()].to.source);
        let [plain, marked] =
            [family.client(), family.stranger()].map(|client| Packet::udp(client, family.vip(), b"?"));
        bed.arrive_at_tc_marked(&plain, 0).check(TC_ACT_REDIRECT, &[(NewRoutedFlow, 1)]);
        bed.arrive_at_tc_marked(&marked, 7).check(TC_ACT_REDIRECT, &[(NewRoutedFlow, 1)]);
        assert_eq!(source(bed, &plain), family.node());
        let of_other = if family == Family::V4 { "203.0.113.253" } else { "2001:db8:d::fd" };
        assert_eq!(source(bed, &marked).to_string(), of_other, "masqueraded by the address of its own route");
    });
}

#[test]
fn multipath_routes_spread_flows_and_keep_each_on_its_path() {
    stay_on_one_cpu();
    // Values of `fib_multipath_hash_policy`: 0 hashes addresses, 1 addresses and ports.
    for policy in ["0", "1"] {
        each_on_wires("multipath", |bed, family| {
            service(bed, family.vip(), UDP, &[family.backend()]);
            let (backend, [wire, other]) = (family.backend().ip(), routers(family));
            let version = if family == Family::V4 { 4 } else { 6 };
            fs::write(format!("/proc/sys/net/ipv{version}/fib_multipath_hash_policy"), policy).unwrap();
            ip(&format!("route replace {backend} nexthop via {wire} dev wire nexthop via {other} dev other"));
            let packets: Vec<Packet> = (1..=32)
                .map(|n| {
                    let mut client = family.client();
                    match policy {
                        "0" if family == Family::V4 => client.set_ip(IpAddr::from([192, 0, 2, n])),
                        "0" => client.set_ip(IpAddr::from([0x2001, 0xdb8, 0xc, 0, 0, 0, 0, u16::from(n)])),
                        _ => client.set_port(40_000 + u16::from(n)),
                    }
                    Packet::udp(client, family.vip(), b"?")
                })
                .collect();
            let round = |bed: &mut Testbed| -> Vec<u32> {
                packets.iter().map(|packet| bed.arrive(Mode::Native, packet).action).collect()
            };
            let first = round(bed);
            let used: BTreeSet<u32> = first.iter().copied().collect();
            assert_eq!(used, BTreeSet::from([XDP_TX, XDP_REDIRECT]), "policy {policy}, {family:?}");
            for _ in 0..2 {
                assert_eq!(round(bed), first, "policy {policy}, {family:?}");
            }
        });
    }
}
