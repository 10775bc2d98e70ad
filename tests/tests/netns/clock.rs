//! Tests that set the calendar clock under traffic; only in guests, because the clock belongs to the machine.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use lb_common::conntrack::Phase;
use lb_tests::{
    client::{Connection, any_address, ask_http, echo, udp_socket_from},
    guest,
    traffic::{Kind, Traffic},
    wait_for,
};
use nix::{
    sys::time::TimeSpec,
    time::{ClockId, clock_gettime, clock_settime},
};

use crate::bed::{Bed, WEB, ask_briefly, http, udp, vips};

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];
/// A jump of the clock that is longer than the timeout of any idle connection.
const DAY: Duration = Duration::from_secs(25 * 60 * 60);
/// A date in the middle of 1971, in seconds since 1970.
const OF_1971: Duration = Duration::from_secs(46_656_000);
/// How long to wait until the agent serves a new Service.
const SOON: Duration = Duration::from_secs(2);
/// Timeout of a UDP flow with one reply.
const REPLIED: Duration = Duration::from_secs(Phase::Replied.timeout_seconds() as u64);
/// How long to wait until a UDP flow with one reply has expired: its timeout, plus the 5 s between two GC runs.
const EXPIRY_LIMIT: Duration = Duration::from_secs(Phase::Replied.timeout_seconds() as u64 + 5);
/// Source port of the UDP flows with one reply, outside of the range of ephemeral ports.
const PORT: u16 = 20_000;
/// Maximum time after which the UDP flows with one reply have expired, also on an emulated machine under load.
const LATEST: Duration = Duration::from_secs(600);
const _: () = assert!(EXPIRY_LIMIT.as_secs() < LATEST.as_secs());

/// The calendar clock. Dropping this value sets the clock to the correct time, computed from the monotonic clock.
struct Calendar {
    began: Instant,
    at: TimeSpec,
}

impl Calendar {
    fn open() -> Self {
        Self { began: Instant::now(), at: clock_gettime(ClockId::CLOCK_REALTIME).unwrap() }
    }

    /// The time that the clock would show if the test had not set it.
    fn right(&self) -> TimeSpec {
        self.at + TimeSpec::from_duration(self.began.elapsed())
    }

    fn set(time: TimeSpec) {
        clock_settime(ClockId::CLOCK_REALTIME, time).unwrap();
    }
}

impl Drop for Calendar {
    fn drop(&mut self) {
        if let Err(error) = clock_settime(ClockId::CLOCK_REALTIME, self.right()) {
            eprintln!("the clock stays wrong: {error}");
        }
    }
}

/// Clients whose server must stay the same, because of a connection or of affinity.
struct Settled {
    connections: [(Connection, String); 2],
    affine: [(IpAddr, String); 2],
}

impl Settled {
    fn new(bed: &Bed, affine: [IpAddr; 2]) -> Self {
        let open = |vip| {
            let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
            let server = connection.ask().unwrap().server;
            (connection, server)
        };
        let ask = |vip| (vip, ask_http(&bed.cluster.client, http(vip)).unwrap().server);
        Self { connections: WEB.map(open), affine: affine.map(ask) }
    }

    #[track_caller]
    fn assert_stay(&mut self, bed: &Bed, when: &str) {
        for (connection, server) in &mut self.connections {
            assert_eq!(&connection.ask().unwrap().server, server, "{when}: a connection that was idle");
        }
        for (vip, server) in &self.affine {
            for _ in 0..4 {
                let again = ask_http(&bed.cluster.client, http(*vip)).unwrap().server;
                assert_eq!(&again, server, "{when}: affinity at {vip}");
            }
        }
    }
}

/// Source addresses of UDP flows that have carried one datagram and its reply.
struct Idle {
    clients: [SocketAddr; 2],
    since: Instant,
}

impl Idle {
    fn ask(bed: &Bed) -> Self {
        let ask = |vip| {
            let from = SocketAddr::new(any_address(vip), PORT);
            let socket = bed.cluster.client.run(|| udp_socket_from(from, udp(vip))).unwrap();
            echo(&socket, b"?").unwrap().local
        };
        Self { clients: WEB.map(ask), since: Instant::now() }
    }

    fn are_known(&self, bed: &Bed) -> [bool; 2] {
        let flows = bed.json(&["conntrack", "list"]);
        let flows = flows.as_array().unwrap();
        self.clients.map(|client| flows.iter().any(|flow| flow["client"] == client.to_string()))
    }

    /// Asserts that the flows have not expired before their timeout. If their age followed the calendar clock, a
    /// forward jump of that clock would make them expire early.
    #[track_caller]
    fn assert_not_expired_early(&self, bed: &Bed, when: &str) {
        let known = self.are_known(bed);
        let idle = self.since.elapsed();
        println!("{when}: idle for {idle:?}, known: {known:?}");
        assert!(known == [true; 2] || idle > REPLIED, "{when}: expired after {idle:?}");
    }

    /// Waits until the flows have expired, which a backward jump of the clock would prevent if their age followed the
    /// calendar clock.
    #[track_caller]
    fn assert_expire(&self, bed: &Bed) {
        let gone = || (self.are_known(bed) == [false; 2]).then_some(());
        wait_for(EXPIRY_LIMIT, gone).expect("idle flows expire");
        let idle = self.since.elapsed();
        println!("idle for {idle:?}, expired");
        assert!(idle < LATEST, "expired after {idle:?}");
    }
}

/// Starts traffic of every kind from the external client, but only of two kinds from the node, so that an emulated
/// machine can keep up.
pub(crate) fn traffic(bed: &Bed) -> Traffic {
    let of_client = |vip| {
        let tcp = Kind::TCP.map(|kind| (&bed.cluster.client, kind, http(vip)));
        tcp.into_iter().chain(Kind::UDP.map(|kind| (&bed.cluster.client, kind, udp(vip))))
    };
    let of_node = [(Kind::Connection, http(WEB[0])), (Kind::Datagrams, udp(WEB[1]))];
    let of_node = of_node.map(|(kind, to)| (&bed.cluster.node1, kind, to));
    Traffic::start(WEB.into_iter().flat_map(of_client).chain(of_node)).unwrap()
}

#[test]
#[ignore = "only in a guest: `cargo xtask vm` runs it"]
fn clock_jumps_break_no_connections() {
    guest::only();
    let bed = Bed::with_web(&PODS);
    let mut affine = bed.service("affine", vips(20), &PODS);
    affine.exposure.affinity = Some(600);
    bed.cluster.manifests.put(&affine).unwrap();
    wait_for(SOON, || ask_briefly(&bed.cluster.client, vips(20)[1])).expect("it is served");
    let mut settled = Settled::new(&bed, vips(20));
    let traffic = traffic(&bed);
    let calendar = Calendar::open();
    let idle = Idle::ask(&bed);

    let day = TimeSpec::from_duration(DAY);
    let of_1971 = TimeSpec::from_duration(OF_1971);
    let times =
        [("a day on", calendar.right() + day), ("a day back", calendar.right() - day), ("1971", of_1971)];
    for (number, (when, time)) in (30..).zip(times) {
        Calendar::set(time);
        assert_undisturbed(&bed, &traffic, &mut settled, number, when);
        idle.assert_not_expired_early(&bed, when);
    }
    idle.assert_expire(&bed);

    drop(calendar);
    assert_undisturbed(&bed, &traffic, &mut settled, 33, "as it should be");
    traffic.stop().assert_unharmed();
}

/// Adds a Service, waits until it is served, and asserts that no other client was disturbed.
#[track_caller]
fn assert_undisturbed(bed: &Bed, traffic: &Traffic, settled: &mut Settled, number: u8, when: &str) {
    bed.put(&format!("new{number}"), vips(number), &["pod3"]);
    for vip in vips(number) {
        let served = wait_for(SOON, || ask_briefly(&bed.cluster.client, vip));
        assert_eq!(served.as_deref(), Some("pod3"), "{when}: the Service that was added");
    }
    settled.assert_stay(bed, when);
    traffic.progresses().unwrap();
}
