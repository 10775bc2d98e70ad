//! What a monitor is told of, and that nobody is told anything while none listens.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Choice, Event, EventHook,
    Outcome::{self, *},
    Scheduler, Service, Settings,
    conntrack::{Tuple, flow_flags},
    service_flags,
};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::Packet,
    stage::{Family, each},
    wire::{Mode, WIRE, each_on_wires},
};

/// Ticks that are longer than any test.
const LONG: u32 = 1000;

fn datagram(family: Family, port: u16) -> Packet {
    Packet::udp(SocketAddr::new(family.client().ip(), port), family.vip(), b"x")
}

/// The one event since the last look.
#[track_caller]
fn only(bench: &mut Bench) -> Event {
    let events = bench.events();
    assert_eq!(events.len(), 1, "{events:#?}");
    events[0]
}

/// The one event since the last look is about a packet without a backend.
#[track_caller]
fn refused(bench: &mut Bench, packet: &Packet, outcome: Outcome, hook: EventHook) {
    let event = only(bench);
    assert!(event.time > 0);
    let expected = Event {
        time: event.time,
        from: packet.tuple(),
        to: Tuple::zeroed(),
        service: 0,
        origin: event.origin,
        outcome: outcome as u8,
        choice: Choice::None as u8,
        scheduler: 0,
        hook: hook as u8,
        flags: 0,
        zeros: [0; 3],
    };
    assert_eq!(event, expected);
}

#[test]
fn the_first_packet_of_a_flow_is_told_of_with_its_backend_and_the_reason() {
    each("event of a new flow", |bench, family| {
        let sticky = Service { id: 7, affinity_seconds: 60, ..Service::zeroed() };
        bench.service_with(family.vip(), UDP, &[family.backend()], sticky);
        bench.watch(LONG);
        for (port, choice) in [(1000, Choice::Scheduler), (1001, Choice::Affinity)] {
            let packet = datagram(family, port);
            let translated = packet.clone().to(family.backend());
            bench.send(Hook::Ingress, &packet).passes(NewFlow, &translated);
            let event = only(bench);
            assert_eq!((event.from, event.to), (packet.tuple(), translated.tuple()));
            assert_eq!((event.service, event.origin), (7, 1));
            assert_eq!((event.outcome, event.choice), (NewFlow as u8, choice as u8));
            assert_eq!((event.hook, event.flags), (EventHook::Ingress as u8, 0));
            // What goes on is not told of, in either direction.
            bench.send(Hook::Ingress, &packet).passes(Forward, &translated);
            let client = SocketAddr::new(family.client().ip(), port);
            let answer = Packet::udp(family.backend(), client, b"y");
            bench.send(Hook::Egress, &answer).goes_on(Reply);
            assert_eq!(bench.events(), []);
        }
    });
}

#[test]
fn the_scheduler_is_told() {
    each("event with a scheduler", |bench, family| {
        bench.scheduled(family.vip(), UDP, Scheduler::Maglev, &[(family.backend(), 1)]);
        bench.watch(LONG);
        bench.send(Hook::Ingress, &datagram(family, 1000)).goes_on(NewFlow);
        assert_eq!(only(bench).scheduler, Scheduler::Maglev as u8);
    });
}

#[test]
fn another_try_is_told_as_such() {
    let mut bench = Bench::with_syn_retries(1);
    for family in Family::BOTH {
        assert!(bench.start(&format!("event of another try, {family:?}"), Device::Ethernet));
        bench.service(family.vip(), TCP, &[family.backend(), family.other_backend()]);
        bench.watch(LONG);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        for _ in 0..3 {
            let _sent = bench.send(Hook::Ingress, &syn);
        }
        let choices: Vec<u8> = bench.events().iter().map(|event| event.choice).collect();
        // By chance the scheduler itself may have chosen the other one.
        assert_eq!((choices.len(), choices[0]), (2, Choice::Scheduler as u8), "{choices:?}");
        assert!([Choice::Scheduler as u8, Choice::Retry as u8].contains(&choices[1]), "{choices:?}");
    }
}

#[test]
fn rejections_and_drops_are_told_of() {
    each("event of a refusal", |bench, family| {
        let is_resized = bench.device() == Device::EthernetWithSum;
        bench.watch(LONG);
        let local = Service { id: 1, flags: service_flags::DROP_WITHOUT_BACKENDS, ..Service::zeroed() };
        bench.service_with(family.other_vip(), TCP, &[], local);
        let (client, empty) = (family.client(), family.empty_vip());
        for protocol in [TCP, UDP] {
            bench.service(empty, protocol, &[]);
        }
        if !is_resized {
            let syn = Packet::tcp(client, empty, 1000, b"").syn();
            bench.send(Hook::Ingress, &syn).turns_around(RejectTcp);
            refused(bench, &syn, RejectTcp, EventHook::Ingress);
            let question = Packet::udp(client, empty, b"question");
            bench.send(Hook::Ingress, &question).turns_around(RejectUdp);
            refused(bench, &question, RejectUdp, EventHook::Ingress);
        }
        let syn = Packet::tcp(client, family.other_vip(), 1000, b"").syn();
        bench.send(Hook::Ingress, &syn).drops(NoLocalBackend);
        refused(bench, &syn, NoLocalBackend, EventHook::Ingress);
        let reset = Packet::tcp(client, empty, 1000, b"").rst();
        bench.send(Hook::Ingress, &reset).drops(StrayReset);
        refused(bench, &reset, StrayReset, EventHook::Ingress);
    });
}

/// All clients are masqueraded with one port: the second one gets none.
#[test]
fn masquerading_and_its_failure_are_told_of() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("event of a masquerade", |bench, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bench.service_with(family.vip(), TCP, &[family.backend()], record);
        bench.settings(&one_port());
        bench.watch(LONG);
        bench.send(Hook::Ingress, &Packet::tcp(family.client(), family.vip(), 1, b"").syn()).goes_on(NewFlow);
        let event = only(bench);
        assert_eq!((event.to.source, event.to.source_port), (Address::from(family.node()), 10_000));
        assert_eq!(event.to.destination, Address::from(family.backend().ip()));
        assert_eq!(event.flags, flow_flags::MASQUERADED);
        let other = Packet::tcp(family.stranger(), family.vip(), 1, b"").syn();
        bench.send(Hook::Ingress, &other).drops(NoSourcePort);
        refused(bench, &other, NoSourcePort, EventHook::Ingress);
    });
}

fn one_port() -> Settings {
    Settings {
        source_v4: Address::from(Family::V4.node()),
        source_v6: Address::from(Family::V6.node()),
        first_port: 10_000,
        ports: 1,
        ..Settings::zeroed()
    }
}

#[test]
fn xdp_tells_of_flows_and_drops_and_leaves_rejections_to_tc() {
    each_on_wires("event of XDP", |bench, family| {
        for mode in Mode::BOTH {
            bench.forget_flows();
            let record = Service { id: 3, flags: service_flags::MASQUERADE, ..Service::zeroed() };
            bench.service_with(family.vip(), TCP, &[family.backend()], record);
            bench.service(family.empty_vip(), TCP, &[]);
            bench.settings(&one_port());
            bench.watch(LONG);
            let syn = Packet::tcp(family.client(), family.vip(), 1, b"").syn();
            let _run = bench.arrive(mode, &syn);
            let event = only(bench);
            assert_eq!((event.from, event.service, event.origin), (syn.tuple(), 3, WIRE));
            assert_eq!((event.outcome, event.hook), (NewRoutedFlow as u8, EventHook::Xdp as u8));
            assert_eq!((event.to.source, event.to.source_port), (Address::from(family.node()), 10_000));
            let other = Packet::tcp(family.stranger(), family.vip(), 1, b"").syn();
            bench.arrive(mode, &other).drops(NoSourcePort);
            refused(bench, &other, NoSourcePort, EventHook::Xdp);
            let refusal = Packet::tcp(family.client(), family.empty_vip(), 1, b"").syn();
            bench.arrive(mode, &refusal).stays_for_tc();
            assert_eq!(bench.events(), []);
        }
    });
}

/// A monitor that was killed has said until when it listens.
#[test]
fn nothing_is_told_when_nobody_listens_any_more() {
    each("no event", |bench, family| {
        bench.service(family.vip(), UDP, &[family.backend()]);
        bench.service(family.empty_vip(), UDP, &[]);
        bench.unwatch();
        bench.send(Hook::Ingress, &datagram(family, 1000)).goes_on(NewFlow);
        // The present tick is over for it.
        bench.watch(0);
        bench.send(Hook::Ingress, &datagram(family, 1001)).goes_on(NewFlow);
        let reset = Packet::tcp(family.client(), family.vip(), 1, b"").rst();
        bench.service(family.vip(), TCP, &[family.backend()]);
        bench.send(Hook::Ingress, &reset).drops(StrayReset);
        assert_eq!((bench.events(), bench.lost_events()), (Vec::new(), 0));
    });
}

#[test]
fn what_finds_no_room_is_counted() {
    const SENT: u16 = 60;
    let mut bench = Bench::with_size("EVENTS", 4096);
    assert!(bench.start("lost events", Device::Ethernet));
    let family = Family::V4;
    bench.service(family.vip(), UDP, &[family.backend()]);
    bench.watch(LONG);
    for port in 1..=SENT {
        bench.send(Hook::Ingress, &datagram(family, port)).goes_on(NewFlow);
    }
    let told = bench.events().len();
    assert!((30..usize::from(SENT)).contains(&told), "{told}");
    assert_eq!(told + usize::try_from(bench.lost_events()).unwrap(), usize::from(SENT));
}
