//! Compares the agent with IPVS: the same virtual servers and clients on one node. The tests run only in guests, whose
//! kernels have IPVS. docs/schedulers.md lists the intended differences.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::Duration,
};

use lb_tests::{agent::run, client::ask_http, guest};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use crate::{
    bed::{Bed, http, udp, vips},
    schedulers::{Held, PODS, from, put},
};

/// Offset between the numbers of the agent's virtual addresses and those of their copies in IPVS.
const BESIDE: u8 = 100;
/// Clients' addresses, by their last byte.
const CLIENTS: std::ops::Range<u8> = 10..22;
const PORTS: std::ops::Range<u16> = 2000..2024;

/// A virtual server of the agent and its copy in IPVS.
struct Twins {
    ours: IpAddr,
    ipvs: IpAddr,
}

impl Twins {
    /// Adds both virtual servers, in both families; `weights` are those of [`PODS`].
    fn put(bed: &Bed, number: u8, scheduler: &str, weights: [u16; 3]) -> [Self; 2] {
        let named: Vec<String> =
            PODS.iter().zip(weights).map(|(pod, weight)| format!("{pod:?}: {weight}")).collect();
        let ours = put(bed, number, scheduler, &format!("{{{}}}", named.join(", ")));
        let ipvs = vips(BESIDE + number);
        let mut servers = String::new();
        for vip in ipvs {
            bed.cluster.node1.ip(&format!("address add {vip} dev ipvs0\n")).unwrap();
            for (option, at, is_udp) in [("-t", http(vip), false), ("-u", udp(vip), true)] {
                let hash = if scheduler == "mh" { " -b mh-port" } else { "" };
                writeln!(servers, "-A {option} {at} -s {scheduler}{hash}").unwrap();
                for (pod, weight) in PODS.iter().map(|pod| bed.cluster.pod(pod).unwrap()).zip(weights) {
                    let to = if is_udp { pod.udp(vip) } else { pod.http(vip) };
                    writeln!(servers, "-a {option} {at} -r {to} -m -w {weight}").unwrap();
                }
            }
        }
        bed.cluster.node1.feed("ipvsadm", &["-R"], &servers).unwrap();
        [0, 1].map(|family| Self { ours: ours[family], ipvs: ipvs[family] })
    }

    /// Runs the same requests against both virtual servers, each time from ports that the client has not used yet. So
    /// neither system has to change the source port, and IPVS cannot mistake replies of the agent's connections for
    /// replies of its own.
    fn each<T>(&self, bed: &Bed, ask: impl Fn(IpAddr) -> T) -> [(&'static str, T); 2] {
        [("ours", self.ours), ("IPVS", self.ipvs)].map(|(whose, vip)| {
            use_other_ports(bed);
            (whose, ask(vip))
        })
    }
}

/// Moves the client's range of ephemeral ports to one that was not used before.
fn use_other_ports(bed: &Bed) {
    static NEXT: AtomicU16 = AtomicU16::new(32_768);
    const COUNT: u16 = 512;
    let first = NEXT.fetch_add(COUNT, Ordering::Relaxed);
    let range = format!("{first} {}", first + (COUNT - 1));
    bed.cluster.client.sysctl("ipv4/ip_local_port_range", &range).unwrap();
}

/// Runs `test` pinned to one CPU, so that its packets arrive on that CPU in the order in which they are sent. (Round
/// robin keeps a position per CPU.)
pub(crate) fn on_one_cpu(test: impl FnOnce() + Send) {
    let pinned = || {
        let mut one = CpuSet::new();
        one.set(0).unwrap();
        sched_setaffinity(Pid::from_raw(0), &one).unwrap();
        test();
    };
    thread::scope(|scope| {
        scope.spawn(pinned).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Asserts that in each complete round every pod gets exactly its share.
fn turns_are_the_same(bed: &Bed) {
    for (number, scheduler, weights, round) in
        [(20, "rr", [1, 1, 1], 3), (21, "rr", [1, 0, 9], 2), (22, "wrr", [4, 3, 2], 9)]
    {
        for twins in Twins::put(bed, number, scheduler, weights) {
            for (whose, names) in twins.each(bed, |vip| {
                let ask = |_| ask_http(&bed.cluster.client, http(vip)).unwrap().server;
                (0..2 * round).map(ask).collect::<Vec<_>>()
            }) {
                let share = |weight: u16| if scheduler == "rr" { weight.min(1) } else { weight };
                for turn in names.chunks(round) {
                    let of = |pod: &str| turn.iter().filter(|name| *name == pod).count();
                    let wanted = weights.map(|weight| usize::from(share(weight)));
                    assert_eq!(PODS.map(of), wanted, "{whose}, {scheduler} {weights:?}: {names:?}");
                }
            }
        }
    }
}

/// Opens connections, closes those of one backend and opens as many again. Each case tests one family only, because
/// both families share the counters.
fn counts_have_the_same_effect(bed: &Bed) {
    for (number, scheduler, weights, first, all) in [
        (30, "lc", [9, 1, 1], [1, 1, 1], [4, 4, 4]),
        (31, "wlc", [2, 1, 1], [1, 1, 1], [6, 3, 3]),
        (32, "sed", [4, 1, 1], [3, 0, 0], [8, 2, 2]),
        (33, "nq", [4, 1, 1], [1, 1, 1], [8, 2, 2]),
        (34, "wlc", [1, 0, 1], [1, 0, 1], [6, 0, 6]),
    ] {
        let begun = first.iter().sum::<u32>() as usize;
        let [v4, v6] = Twins::put(bed, number, scheduler, weights);
        let twins = if number % 2 == 0 { v4 } else { v6 };
        for (whose, found) in twins.each(bed, |vip| {
            let mut held = Held::none();
            let first = held.more(&bed.cluster.client, vip, begun);
            held.more(&bed.cluster.client, vip, 12 - begun);
            let all = held.all();
            held.end(&bed.cluster.client, "pod3");
            (first, all, held.more(&bed.cluster.client, vip, all[2] as usize))
        }) {
            assert_eq!(found, (first, all, [0, 0, all[2]]), "{whose}, {scheduler} {weights:?}");
        }
    }
}

/// The server of each client address; fails if two ports of an address reach different servers.
fn by_address(bed: &Bed, vip: IpAddr) -> Vec<String> {
    let source = |last: u8| -> SocketAddr {
        let text = if vip.is_ipv6() {
            format!("[fd00:198:51:100::{last}]:0")
        } else {
            format!("198.51.100.{last}:0")
        };
        text.parse().unwrap()
    };
    let ask = |last| {
        let [one, other] = [(); 2].map(|()| from(&bed.cluster.client, source(last), udp(vip)));
        assert_eq!(one, other, "{} → {vip}", source(last));
        one
    };
    CLIENTS.map(ask).collect()
}

fn addresses_are_hashed_alike(bed: &Bed) {
    let mut addresses = String::new();
    for last in CLIENTS {
        writeln!(addresses, "address add 198.51.100.{last}/24 dev eth0").unwrap();
        writeln!(addresses, "address add fd00:198:51:100::{last}/64 dev eth0 nodad").unwrap();
    }
    bed.cluster.client.ip(&addresses).unwrap();
    for (number, scheduler, spreads) in [(40, "sh", true), (41, "dh", false)] {
        for twins in Twins::put(bed, number, scheduler, [1, 1, 1]) {
            for (whose, names) in twins.each(bed, |vip| by_address(bed, vip)) {
                let servers: BTreeSet<&String> = names.iter().collect();
                assert_eq!(servers.len() > 1, spreads, "{whose}, {scheduler}: {names:?}");
            }
        }
    }
}

/// The server of each client port.
fn by_port(bed: &Bed, vip: IpAddr) -> Vec<String> {
    let any = lb_tests::client::any_address(vip);
    PORTS.map(|port| from(&bed.cluster.client, SocketAddr::new(any, port), udp(vip))).collect()
}

/// Deletes the agent's flows and waits until those of IPVS expire. Otherwise a client port that reaches one backend
/// through two virtual addresses would collide with its earlier flow: the replies of both flows have the same tuple.
fn forget_flows(bed: &Bed) {
    bed.agent.as_ref().unwrap().ask(&["conntrack", "flush"]).unwrap();
    // The UDP timeout of IPVS is one second, see `--set` below.
    thread::sleep(Duration::from_secs(2));
}

/// Asserts that two virtual servers with the same weights choose the same backend for each client port, and that few
/// ports move between the other backends when one backend has weight 0.
fn maglev_is_as_consistent(bed: &Bed) {
    run(bed.cluster.node1.command("ipvsadm").args(["--set", "0", "0", "1"])).unwrap();
    let put = |number, weights| Twins::put(bed, number, "mh", weights);
    let servers = [put(50, [1, 1, 1]), put(51, [1, 1, 1]), put(52, [1, 1, 0])];
    for whose in ["ours", "IPVS"] {
        let asked = servers.each_ref().map(|twins| {
            forget_flows(bed);
            let names = |twins: &Twins| by_port(bed, if whose == "ours" { twins.ours } else { twins.ipvs });
            twins.each_ref().map(names)
        });
        let [all, elsewhere, fewer] = asked;
        assert_eq!(all, elsewhere, "{whose}");
        for (all, fewer) in all.iter().zip(&fewer) {
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 3, "{whose}: {all:?}");
            let stayed = all.iter().zip(fewer).filter(|(before, _)| *before != "pod3");
            let (stayed, moved): (Vec<_>, Vec<_>) = stayed.partition(|(before, after)| before == after);
            assert!(moved.len() <= 3 && stayed.len() > 6, "{whose}: {moved:?} of {}", stayed.len());
        }
    }
}

#[test]
#[ignore = "only in a guest: `cargo xtask vm` runs it"]
fn schedulers_choose_like_ipvs() {
    guest::only();
    let bed = Bed::with_web(&PODS);
    bed.cluster.node1.ip("link add ipvs0 type dummy\nlink set ipvs0 up\n").unwrap();
    on_one_cpu(|| {
        turns_are_the_same(&bed);
        counts_have_the_same_effect(&bed);
    });
    addresses_are_hashed_alike(&bed);
    maglev_is_as_consistent(&bed);
}
