//! The programs emit events for `monitor`, and none while no monitor runs.

use std::net::SocketAddr;

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Choice, Event, EventHook,
    Outcome::{self, *},
    Scheduler, Service,
    conntrack::{Tuple, flow_flags},
    service_flags,
};

use super::{
    packets::Packet,
    stage::{Family, each, masquerade_settings},
    testbed::{Device, Hook, TCP, Testbed, UDP},
    wire::{Mode, WIRE, each_on_wires},
};

/// A time in ticks that is longer than any test.
const LONG: u32 = 1000;

fn datagram(family: Family, port: u16) -> Packet {
    Packet::udp(SocketAddr::new(family.client().ip(), port), family.vip(), b"x")
}

/// The only event since the last call; fails if there is none or more than one.
#[track_caller]
fn only(bed: &mut Testbed) -> Event {
    let events = bed.events();
    assert_eq!(events.len(), 1, "{events:#?}");
    events[0]
}

/// Asserts that the only event since the last call reports a packet without a backend.
#[track_caller]
fn reports_refusal(bed: &mut Testbed, packet: &Packet, outcome: Outcome, hook: EventHook) {
    let event = only(bed);
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
fn first_packet_of_a_flow_is_reported_with_backend_and_reason() {
    each("event of a new flow", |bed, family| {
        let sticky = Service { id: 7, affinity_seconds: 60, ..Service::zeroed() };
        bed.service_with(family.vip(), UDP, &[family.backend()], sticky);
        bed.enable_events(LONG);
        for (port, choice) in [(1000, Choice::Scheduler), (1001, Choice::Affinity)] {
            let packet = datagram(family, port);
            let translated = packet.clone().to(family.backend());
            bed.send(Hook::Ingress, &packet).passes(NewFlow, &translated);
            let event = only(bed);
            assert_eq!((event.from, event.to), (packet.tuple(), translated.tuple()));
            assert_eq!((event.service, event.origin), (7, 1));
            assert_eq!((event.outcome, event.choice), (NewFlow as u8, choice as u8));
            assert_eq!((event.hook, event.flags), (EventHook::Ingress as u8, 0));
            // Later packets emit no events, in either direction.
            bed.send(Hook::Ingress, &packet).passes(Forward, &translated);
            let client = SocketAddr::new(family.client().ip(), port);
            let answer = Packet::udp(family.backend(), client, b"y");
            bed.send(Hook::Egress, &answer).passes_any(Reply);
            assert_eq!(bed.events(), []);
        }
    });
}

#[test]
fn event_names_the_scheduler() {
    each("event with a scheduler", |bed, family| {
        bed.service_with_scheduler(family.vip(), UDP, Scheduler::Maglev, &[(family.backend(), 1)]);
        bed.enable_events(LONG);
        bed.send(Hook::Ingress, &datagram(family, 1000)).passes_any(NewFlow);
        assert_eq!(only(bed).scheduler, Scheduler::Maglev as u8);
    });
}

#[test]
fn event_marks_a_retry() {
    let mut bed = Testbed::with_syn_retries(1);
    for family in Family::BOTH {
        assert!(bed.start(&format!("event of another try, {family:?}"), Device::Ethernet));
        bed.service(family.vip(), TCP, &[family.backend(), family.other_backend()]);
        bed.enable_events(LONG);
        let syn = Packet::tcp(family.client(), family.vip(), 1000, b"").syn();
        for _ in 0..3 {
            let _sent = bed.send(Hook::Ingress, &syn);
        }
        let choices: Vec<u8> = bed.events().iter().map(|event| event.choice).collect();
        // The retry gets the other backend. The event marks this choice as a retry only if the random scheduler has
        // first chosen the silent backend again.
        assert_eq!((choices.len(), choices[0]), (2, Choice::Scheduler as u8), "{choices:?}");
        assert!([Choice::Scheduler as u8, Choice::Retry as u8].contains(&choices[1]), "{choices:?}");
    }
}

#[test]
fn rejections_and_drops_are_reported() {
    each("event of a refusal", |bed, family| {
        let is_resized = bed.device() == Device::EthernetWithSum;
        bed.enable_events(LONG);
        let local = Service { id: 1, flags: service_flags::DROP_WITHOUT_BACKENDS, ..Service::zeroed() };
        bed.service_with(family.other_vip(), TCP, &[], local);
        let (client, empty) = (family.client(), family.empty_vip());
        for protocol in [TCP, UDP] {
            bed.service(empty, protocol, &[]);
        }
        if !is_resized {
            let syn = Packet::tcp(client, empty, 1000, b"").syn();
            bed.send(Hook::Ingress, &syn).redirects_any(RejectTcp);
            reports_refusal(bed, &syn, RejectTcp, EventHook::Ingress);
            let question = Packet::udp(client, empty, b"question");
            bed.send(Hook::Ingress, &question).redirects_any(RejectUdp);
            reports_refusal(bed, &question, RejectUdp, EventHook::Ingress);
        }
        let syn = Packet::tcp(client, family.other_vip(), 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).drops(NoLocalBackend);
        reports_refusal(bed, &syn, NoLocalBackend, EventHook::Ingress);
        let reset = Packet::tcp(client, empty, 1000, b"").rst();
        bed.send(Hook::Ingress, &reset).drops(StrayReset);
        reports_refusal(bed, &reset, StrayReset, EventHook::Ingress);
    });
}

/// There is one source port for all masqueraded clients, so the second client gets none.
#[test]
fn masquerade_and_its_failure_are_reported() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    each("event of a masquerade", |bed, family| {
        let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
        bed.service_with(family.vip(), TCP, &[family.backend()], record);
        bed.settings(&masquerade_settings(1));
        bed.enable_events(LONG);
        bed.send(Hook::Ingress, &Packet::tcp(family.client(), family.vip(), 1, b"").syn())
            .passes_any(NewFlow);
        let event = only(bed);
        assert_eq!((event.to.source, event.to.source_port), (Address::from(family.node()), 10_000));
        assert_eq!(event.to.destination, Address::from(family.backend().ip()));
        assert_eq!(event.flags, flow_flags::MASQUERADED);
        let other = Packet::tcp(family.stranger(), family.vip(), 1, b"").syn();
        bed.send(Hook::Ingress, &other).drops(NoSourcePort);
        reports_refusal(bed, &other, NoSourcePort, EventHook::Ingress);
    });
}

#[test]
fn xdp_reports_flows_and_drops_and_leaves_rejections_to_tc() {
    each_on_wires("event of XDP", |bed, family| {
        for mode in Mode::BOTH {
            bed.clear_flows();
            let record = Service { id: 3, flags: service_flags::MASQUERADE, ..Service::zeroed() };
            bed.service_with(family.vip(), TCP, &[family.backend()], record);
            bed.service(family.empty_vip(), TCP, &[]);
            bed.settings(&masquerade_settings(1));
            bed.enable_events(LONG);
            let syn = Packet::tcp(family.client(), family.vip(), 1, b"").syn();
            let _run = bed.arrive(mode, &syn);
            let event = only(bed);
            assert_eq!((event.from, event.service, event.origin), (syn.tuple(), 3, WIRE));
            assert_eq!((event.outcome, event.hook), (NewRoutedFlow as u8, EventHook::Xdp as u8));
            assert_eq!((event.to.source, event.to.source_port), (Address::from(family.node()), 10_000));
            let other = Packet::tcp(family.stranger(), family.vip(), 1, b"").syn();
            bed.arrive(mode, &other).drops(NoSourcePort);
            reports_refusal(bed, &other, NoSourcePort, EventHook::Xdp);
            let refusal = Packet::tcp(family.client(), family.empty_vip(), 1, b"").syn();
            bed.arrive(mode, &refusal).stays_for_tc();
            assert_eq!(bed.events(), []);
        }
    });
}

/// Events stop at the tick that the last monitor has set, even if it was killed.
#[test]
fn no_event_is_emitted_without_a_monitor() {
    each("no event", |bed, family| {
        bed.service(family.vip(), UDP, &[family.backend()]);
        bed.service(family.empty_vip(), UDP, &[]);
        bed.disable_events();
        bed.send(Hook::Ingress, &datagram(family, 1000)).passes_any(NewFlow);
        // Events end with the present tick.
        bed.enable_events(0);
        bed.send(Hook::Ingress, &datagram(family, 1001)).passes_any(NewFlow);
        let reset = Packet::tcp(family.client(), family.vip(), 1, b"").rst();
        bed.service(family.vip(), TCP, &[family.backend()]);
        bed.send(Hook::Ingress, &reset).drops(StrayReset);
        assert_eq!((bed.events(), bed.lost_events()), (Vec::new(), 0));
    });
}

#[test]
fn events_without_room_are_counted_as_lost() {
    const SENT: u16 = 60;
    let mut bed = Testbed::with_size("EVENTS", 4096);
    assert!(bed.start("lost events", Device::Ethernet));
    let family = Family::V4;
    bed.service(family.vip(), UDP, &[family.backend()]);
    bed.enable_events(LONG);
    for port in 1..=SENT {
        bed.send(Hook::Ingress, &datagram(family, port)).passes_any(NewFlow);
    }
    let reported = bed.events().len();
    assert!((30..usize::from(SENT)).contains(&reported), "{reported}");
    assert_eq!(reported + usize::try_from(bed.lost_events()).unwrap(), usize::from(SENT));
}
