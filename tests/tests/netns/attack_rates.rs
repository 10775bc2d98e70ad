//! Measures the rates of forged packets at which new clients are still served, with the default size of the flow table.
//! (The tests of attacks use a small table, so that a short flood fills it.)

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{StopOnDrop, client::Connection, netns::Netns};

use crate::{
    attack::{bed, counted, time_to_be_served},
    bed::{WEB, http, udp},
    flood::{self, Forged},
};

/// The sender works in steps of this length.
const TICK: Duration = Duration::from_millis(10);
/// Number of forged flows that fill the flow table before the measurement: more than the default of
/// `--max-connections` on two CPUs, 131,072.
const FILL: u32 = 200_000;
/// Forged flows per second while the table fills.
const FILL_RATE: u32 = 20_000;
/// How long clients ask under the flood, and how often.
const MEASURED: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(500);
/// Forged flows per second under which clients ask.
const RATES: [u32; 4] = [1_000, 5_000, 20_000, 100_000];

/// Outcomes of the first packet of a forged flow: tracked, no room in the flow table, no source port.
const OUTCOMES: [&str; 3] = ["new_flow", "conntrack_full", "no_source_port"];

struct Attack {
    name: &'static str,
    to: SocketAddr,
    /// The packets of one forged flow, and how many ticks after the flow's first packet each is sent.
    packets: &'static [(Forged, u32)],
    /// Additional arguments of the agent.
    arguments: &'static [&'static str],
}

fn attacks() -> [Attack; 4] {
    let to = http(WEB[0]);
    let syn_and_fin = &[(Forged::Syn, 0), (Forged::BareFin, 1)];
    [
        Attack { name: "SYNs", to, packets: &[(Forged::Syn, 0)], arguments: &[] },
        Attack { name: "SYNs with FINs", to, packets: syn_and_fin, arguments: &[] },
        // Towards the one backend there are the 20,000 source ports of the default of `--masquerade-ports`.
        Attack {
            name: "SYNs with FINs, masqueraded",
            to,
            packets: syn_and_fin,
            arguments: &["--masquerade-all"],
        },
        // The second datagram makes a stream of the flow if the backend has answered the first.
        Attack {
            name: "two datagrams 3 s apart",
            to: udp(WEB[0]),
            packets: &[(Forged::Datagram, 0), (Forged::Datagram, 300)],
            arguments: &[],
        },
    ]
}

/// Sends the packets of `rate` new forged flows per second until `over`, or until `flows` flows have begun. `begun`
/// counts the flows.
fn send_flows(client: &Netns, attack: &Attack, rate: u32, flows: u32, begun: &AtomicU32, over: &AtomicBool) {
    let socket = client.run(|| flood::open(attack.to.is_ipv6())).unwrap();
    let (of_a_tick, before) = (rate / 100, begun.load(Ordering::Relaxed));
    let start = Instant::now();
    for tick in 0..flows / of_a_tick {
        for (kind, delay) in attack.packets {
            let Some(flow) = tick.checked_sub(*delay) else { continue };
            let first = before + flow * of_a_tick;
            for number in first..first + of_a_tick {
                flood::send(&socket, attack.to, &flood::packet(number, attack.to, *kind)).unwrap();
            }
        }
        begun.fetch_add(of_a_tick, Ordering::Relaxed);
        if over.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep((TICK * (tick + 1)).saturating_sub(start.elapsed()));
    }
}

/// Measures one attack at one rate and prints a line of the table.
fn measure(attack: &Attack, rate: u32) {
    let bed = bed(attack.arguments);
    let (client, to) = (&bed.cluster.client, http(WEB[0]));
    let mut established: Vec<Connection> = (0..20).map(|_| Connection::open(client, to).unwrap()).collect();
    let seen: Vec<_> = established.iter_mut().map(|connection| connection.ask().unwrap().seen).collect();
    let (begun, over) = (AtomicU32::new(0), AtomicBool::new(false));
    send_flows(client, attack, FILL_RATE, FILL, &begun, &over);
    let count = || OUTCOMES.map(|outcome| counted(&bed, outcome));
    let before_measuring = count();
    let (times, sent, took) = thread::scope(|scope| {
        let _end = StopOnDrop(&over);
        let before = begun.load(Ordering::Relaxed);
        scope.spawn(|| send_flows(client, attack, rate, u32::MAX, &begun, &over));
        let start = Instant::now();
        let mut times = Vec::new();
        while start.elapsed() < MEASURED {
            times.push(time_to_be_served(client, to));
            thread::sleep(PAUSE);
        }
        (times, begun.load(Ordering::Relaxed) - before, start.elapsed())
    });
    let after = count();
    let [new, full, no_port] = [0, 1, 2].map(|of| after[of] - before_measuring[of]);
    assert!(new + full + no_port > u64::from(sent) / 2, "{}: of {sent} flows few arrive", attack.name);
    let again: Vec<_> = established.iter_mut().map(|connection| connection.ask().unwrap().seen).collect();
    assert_eq!(again, seen, "{}: established connections keep their source ports", attack.name);
    let served = times.iter().flatten();
    println!(
        "| {} | {:.0} | {new} | {full} | {no_port} | {} of {} | {:.2} s |",
        attack.name,
        f64::from(sent) / took.as_secs_f64(),
        served.clone().count(),
        times.len(),
        served.max().copied().unwrap_or_default().as_secs_f64(),
    );
}

#[test]
#[ignore = "measures for 13 minutes: cargo test -p lb-tests --test netns -- --ignored --nocapture attack_rates::"]
fn new_clients_are_served_at_these_rates() {
    println!("| forged flows | flows/s | tracked | no room | no port | clients served | slowest |");
    for attack in attacks() {
        for rate in RATES {
            measure(&attack, rate);
        }
    }
}
