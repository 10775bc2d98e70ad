//! Random flows against etherparse: whatever the addresses, ports and payload, both directions come out right, and so
//! do errors about them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::PoisonError,
};

use lb_common::Outcome::*;
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::Packet,
    stage::BENCH,
};

#[derive(Clone, Debug)]
struct Flow {
    client: SocketAddr,
    vip: SocketAddr,
    backend: SocketAddr,
    protocol: u8,
    payload: Vec<u8>,
    /// Octets of the quoted transport.
    quote: usize,
}

fn flows() -> impl Strategy<Value = Flow> {
    // The bit keeps the octets 12 and 13 of a bare packet, which the test run takes for an EtherType, from saying IP: it
    // refuses short packets that do.
    let v4 = |mut ip: [u8; 4]| {
        ip[0] |= 0x10;
        IpAddr::V4(Ipv4Addr::from(ip))
    };
    let v6 = |mut ip: [u8; 16]| {
        ip[4] |= 0x10;
        IpAddr::V6(Ipv6Addr::from(ip))
    };
    let v4 = any::<[[u8; 4]; 3]>().prop_map(move |ips| ips.map(v4));
    let v6 = any::<[[u8; 16]; 3]>().prop_map(move |ips| ips.map(v6));
    let payload = proptest::collection::vec(any::<u8>(), 0..200);
    let distinct = |[a, b, c]: &[IpAddr; 3]| a != b && a != c && b != c;
    let addresses = prop_oneof![v4, v6].prop_filter("three different addresses", distinct);
    (addresses, any::<[u16; 3]>(), prop_oneof![Just(TCP), Just(UDP)], payload, 8..300usize).prop_map(
        |([client, vip, backend], ports, protocol, payload, quote)| Flow {
            client: SocketAddr::new(client, ports[0]),
            vip: SocketAddr::new(vip, ports[1]),
            backend: SocketAddr::new(backend, ports[2]),
            protocol,
            payload,
            quote,
        },
    )
}

fn run(bench: &mut Bench, device: Device, flow: &Flow) {
    let Flow { client, vip, backend, protocol, ref payload, quote } = *flow;
    if !bench.start(&format!("{flow:?}, {device:?}"), device) {
        return;
    }
    bench.service(vip, protocol, &[backend]);
    let packet = |from, to| match protocol {
        TCP => Packet::tcp(from, to, 1000, payload).ack(5000),
        _ => Packet::udp(from, to, payload),
    };
    let sent = packet(client, vip);
    let translated = sent.clone().to(backend);
    bench.send(Hook::Ingress, &sent).passes(NewFlow, &translated);
    bench.send(Hook::Ingress, &sent).passes(Forward, &translated);
    let reply = packet(backend, client);
    bench.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(vip));

    let length = if vip.is_ipv4() { 20 } else { 40 } + quote;
    let (original, seen) = super::icmp::quote(&sent, &translated, length);
    let kind = if vip.is_ipv4() { [3, 4] } else { [2, 0] };
    let error = Packet::icmp(backend.ip(), client.ip(), kind, [0, 0, 5, 0x78], &seen);
    let expected = Packet::icmp(vip.ip(), client.ip(), kind, [0, 0, 5, 0x78], &original);
    bench.send(Hook::Egress, &error).passes(IcmpError, &expected);
}

#[test]
fn random_flows() {
    let mut bench = BENCH.lock().unwrap_or_else(PoisonError::into_inner);
    let bench = std::cell::RefCell::new(bench.get_or_insert_with(Bench::new));
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&flows(), |flow| {
        for device in Device::ALL {
            run(&mut bench.borrow_mut(), device, &flow);
        }
        Ok(())
    });
    result.unwrap();
}

/// Any octets at all: whatever they are, the programs come to an end and leave what they do not know as it is.
#[test]
fn random_octets() {
    let mut bench = BENCH.lock().unwrap_or_else(PoisonError::into_inner);
    let bench = std::cell::RefCell::new(bench.get_or_insert_with(Bench::new));
    bench.borrow_mut().start("random octets", Device::Bare);
    let config = ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let octets = proptest::collection::vec(any::<u8>(), 15..300);
    let versions = prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60)];
    let protocols =
        prop_oneof![Just(0u8), Just(1), Just(6), Just(17), Just(43), Just(44), Just(51), Just(58), Just(60)];
    let result = runner.run(&(octets, versions, protocols), |(mut octets, version, protocol)| {
        octets[0] = version;
        octets[12] |= 0x10;
        let place = if version == 0x60 { 6 } else { 9 };
        octets[place] = protocol;
        let mut bench = bench.borrow_mut();
        for hook in Hook::BOTH {
            bench.run(hook, &octets).passes_unchanged();
        }
        Ok(())
    });
    result.unwrap();
}
