//! Random flows against etherparse: the programs translate both directions correctly, and ICMP errors about the
//! client's packets.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::PoisonError,
};

use lb_common::Outcome::*;
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    packets::Packet,
    stage::TESTBED,
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

#[derive(Clone, Debug)]
struct Flow {
    client: SocketAddr,
    vip: SocketAddr,
    backend: SocketAddr,
    protocol: u8,
    payload: Vec<u8>,
    /// The most bytes of the transport header and payload that the ICMP error quotes.
    quote: usize,
}

fn flows() -> impl Strategy<Value = Flow> {
    // A test run reads bytes 12 and 13 of a bare packet as an EtherType, and the kernel refuses short packets with the
    // EtherType of IPv4 or IPv6. These bytes are part of the source address; the bit 0x10 excludes both values.
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

fn run(bed: &mut Testbed, device: Device, flow: &Flow) {
    let Flow { client, vip, backend, protocol, ref payload, quote } = *flow;
    if !bed.start(&format!("{flow:?}, {device:?}"), device) {
        return;
    }
    bed.service(vip, protocol, &[backend]);
    let packet = |from, to| match protocol {
        TCP => Packet::tcp(from, to, 1000, payload).ack(5000),
        _ => Packet::udp(from, to, payload),
    };
    let sent = packet(client, vip);
    let translated = sent.clone().to(backend);
    bed.send(Hook::Ingress, &sent).passes(NewFlow, &translated);
    bed.send(Hook::Ingress, &sent).passes(Forward, &translated);
    let reply = packet(backend, client);
    bed.send(Hook::Egress, &reply).passes(Reply, &reply.clone().from(vip));

    let length = if vip.is_ipv4() { 20 } else { 40 } + quote;
    let (original, seen) = super::icmp::quote(&sent, &translated, length);
    let kind = if vip.is_ipv4() { [3, 4] } else { [2, 0] };
    let error = Packet::icmp(backend.ip(), client.ip(), kind, [0, 0, 5, 0x78], &seen);
    let expected = Packet::icmp(vip.ip(), client.ip(), kind, [0, 0, 5, 0x78], &original);
    bed.send(Hook::Egress, &error).passes(IcmpError, &expected);
}

#[test]
fn random_flows_are_translated_in_both_directions() {
    let mut bed = TESTBED.lock().unwrap_or_else(PoisonError::into_inner);
    let bed = std::cell::RefCell::new(bed.get_or_insert_with(Testbed::new));
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&flows(), |flow| {
        for device in Device::ALL {
            run(&mut bed.borrow_mut(), device, &flow);
        }
        Ok(())
    });
    result.unwrap();
}

/// Random bytes: the programs return, and leave unknown packets unchanged.
#[test]
fn random_bytes_pass_unchanged() {
    let mut bed = TESTBED.lock().unwrap_or_else(PoisonError::into_inner);
    let bed = std::cell::RefCell::new(bed.get_or_insert_with(Testbed::new));
    bed.borrow_mut().start("random bytes", Device::Bare);
    let config = ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let bytes = proptest::collection::vec(any::<u8>(), 15..300);
    let versions = prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60)];
    let protocols =
        prop_oneof![Just(0u8), Just(1), Just(6), Just(17), Just(43), Just(44), Just(51), Just(58), Just(60)];
    let result = runner.run(&(bytes, versions, protocols), |(mut bytes, version, protocol)| {
        bytes[0] = version;
        bytes[12] |= 0x10;
        let place = if version == 0x60 { 6 } else { 9 };
        bytes[place] = protocol;
        let mut bed = bed.borrow_mut();
        for hook in Hook::BOTH {
            bed.run(hook, &bytes).passes_unchanged();
        }
        Ok(())
    });
    result.unwrap();
}
