//! Announcements by BGP, with BIRD and FRR: agents keep routes and BIRD's configuration, and a router learns from the daemons.

mod bed;

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use lb_tests::{agent::Agent, skip, wait_for};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use self::bed::{Bed, LIFETIME, OBJECTS, SOON, VIP, VIP6};

const ALL: [usize; 3] = [1, 2, 3];

/// Three nodes with BIRD, whose routes the router has.
fn three() -> Bed {
    let mut bed = Bed::new(3, 1080);
    bed.start_birds();
    bed.wait_for_hops(SOON, &ALL);
    bed
}

#[test]
fn router_spreads_connections_over_the_nodes_that_serve() {
    let mut bed = three();
    // Attributes are those of the advertisements.
    let route = bed.birdc("router", &["show", "route", "all", "for", VIP]);
    assert!(route.contains("203.0.113.1/32") && route.contains("(64500,100)"), "{route}");
    assert!(route.contains("(64500, 1, 2)") && !route.contains("(64500,28)"), "{route}");
    for aggregate in ["203.0.113.0/28", "2001:db8:100::/124"] {
        let arrived = || (bed.next_hops(aggregate) == ALL.into()).then_some(());
        assert!(wait_for(SOON, arrived).is_some(), "{aggregate}: {:?}", bed.next_hops(aggregate));
        let route = bed.birdc("router", &["show", "route", "all", aggregate]);
        assert!(route.contains("(64500,28)") && !route.contains("(64500,100)"), "{route}");
    }
    for vip in [VIP, VIP6] {
        let servers: BTreeSet<String> = (0..60).map(|_| bed.ask(vip)).collect();
        assert_eq!(servers, ["n1", "n2", "n3"].map(str::to_owned).into(), "{vip}");
    }
    assert!(bed.curl(VIP).starts_with('n') && bed.curl(&format!("[{VIP6}]")).starts_with('n'));

    let output = bed.agent(1).ask(&["announce", "routes", "-o", "json"]).unwrap();
    let routes: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(routes.len(), 4, "{routes:?}");
    assert_eq!(routes[1]["services"][0], "default/web");
    let output = bed.agent(1).ask(&["announce", "bird-config"]).unwrap();
    let config = String::from_utf8(output.stdout).unwrap();
    assert!(
        config.contains("neighbor 10.9.0.254 port 1790 as 64501") && !config.contains("secret"),
        "{config}"
    );

    // Under the policy Local only nodes with an endpoint announce.
    bed.serve(1, "Local", 2);
    bed.wait_for_hops(SOON, &[2, 3]);
    bed.serve(1, "Local", 1);
    bed.wait_for_hops(SOON, &ALL);
    // A node that is stopped withdraws its routes, and its sessions stay.
    bed.agents[1].take().unwrap().terminate().unwrap();
    bed.wait_for_hops(Duration::from_secs(2), &[1, 3]);
    assert_eq!(bed.table(2), "");
    assert!(bed.birdc("router", &["show", "protocols", "n2"]).contains("Established"));
}

#[test]
fn mistakes_are_named_and_lose_nothing() {
    let mut bed = Bed::new(1, 1080);
    bed.start_birds();
    bed.wait_for_hops(SOON, &[1]);
    let (file, uptime) = (bed.path("bird-1.conf"), || bed.birdc("router", &["show", "protocols", "n1"]));
    let (config, before) = (fs::read_to_string(&file).unwrap(), uptime());
    for (from, to, problem) in [
        ("gold, 'large", "silver, 'large", "spec.communities[0]: Invalid value: \"silver\""),
        ("bfdProfile: fast}", "bfdProfile: slow}", "spec.bfdProfile: Invalid value: \"slow\""),
        ("peerAddress: 10.9.0.254", "peerAddress: router", "spec.peerAddress: Invalid value: \"router\""),
        ("aggregationLength: 28", "aggregationLength: 27", "spec.aggregationLength: Invalid value"),
        (
            "localPref: 200",
            "localPref: 200, ipAddressPools: [pool, none]",
            "spec.ipAddressPools: Invalid value: \"none\"",
        ),
        (
            "localPref: 200",
            "localPref: 200, peers: [router, router6, nobody]",
            "spec.peers: Invalid value: \"nobody\"",
        ),
    ] {
        let broken = OBJECTS.replacen(from, to, 1);
        assert_ne!(broken, OBJECTS, "{from}");
        bed.folders[0].write("bgp", &broken).unwrap();
        let named = || bed.problems(1).iter().any(|it| it.contains(problem)).then_some(());
        assert!(wait_for(SOON, named).is_some(), "{problem} is not in {:?}", bed.problems(1));
        sleep(Duration::from_millis(300));
        assert_eq!(fs::read_to_string(&file).unwrap(), config, "{to}");
        bed.wait_for_hops(SOON, &[1]);
    }
    bed.folders[0].write("bgp", OBJECTS).unwrap();
    let is_sound =
        || (!bed.problems(1).iter().any(|it| it.contains("BGP") || it.contains("bird-1.conf"))).then_some(());
    wait_for(SOON, is_sound).expect("no problem may remain");
    // A new community reaches the router, and the session lives.
    bed.folders[0].write("bgp", &OBJECTS.replace("64500:100", "64500:200")).unwrap();
    let arrived =
        || bed.birdc("router", &["show", "route", "all", "for", VIP]).contains("(64500,200)").then_some(());
    wait_for(SOON, arrived).expect("BIRD must read its new configuration");
    assert_eq!(uptime(), before, "the session was reset");
}

#[test]
fn fence_withdraws_the_routes_of_agents_that_hang_or_die() {
    let mut bed = three();
    // A quick restart is no reason to withdraw, and BIRD keeps its configuration.
    let before = bed.birdc("router", &["show", "protocols", "n3"]);
    bed.agents[2].take().unwrap().kill().unwrap();
    bed.agents[2] = Some(Agent::start(&bed.nodes[2], bed.settings(3)).unwrap());
    bed.wait_for_hops(SOON, &ALL);
    assert_eq!(
        bed.birdc("router", &["show", "protocols", "n3"]),
        before,
        "the restart has reset the session"
    );

    let pid = Pid::from_raw(i32::try_from(bed.agent(1).pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    bed.agents[1].take().unwrap().kill().unwrap();
    let start = Instant::now();
    sleep(Duration::from_secs(2));
    assert_eq!(bed.next_hops(VIP), ALL.into(), "the data plane works, so the routes stay for a while");
    assert!(["n1", "n2", "n3"].contains(&&*bed.ask(VIP)));
    bed.wait_for_hops(SOON, &[3]);
    let took = start.elapsed();
    println!("routes of a hung and of a killed agent are gone after {took:?}");
    assert!((LIFETIME - 1..LIFETIME + 4).contains(&took.as_secs()), "{took:?}");
    assert_eq!((bed.table(1), bed.table(2)), (String::new(), String::new()));

    kill(pid, Signal::SIGCONT).unwrap();
    bed.wait_for_hops(SOON, &[1, 3]);
    bed.agents[1] = Some(Agent::start(&bed.nodes[1], bed.settings(2)).unwrap());
    bed.wait_for_hops(SOON, &ALL);
}

#[test]
fn bfd_moves_connections_off_a_dead_node_within_a_second() {
    let bed = three();
    let up = || {
        let sessions = bed.birdc("router", &["show", "bfd", "sessions"]);
        (sessions.matches(" Up ").count() == 6).then_some(())
    };
    wait_for(SOON, up).expect("six BFD sessions must be up");
    let start = Instant::now();
    bed.nodes[1].ip("link set eth0 down\n").unwrap();
    bed.wait_for_hops(SOON, &[1, 3]);
    let took = start.elapsed();
    println!("the router left the dead node after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(["n1", "n3"].contains(&&*bed.ask(VIP)));
}

#[test]
fn frr_announces_the_routes() {
    if !Path::new("/usr/lib/frr/bgpd").exists() {
        return skip::whole("FRR is not installed in /usr/lib/frr");
    }
    // The command of FRR 8 takes tables up to 252.
    let mut bed = Bed::new(1, 180);
    let dir = bed.start_frr(1);
    let arrived = || (bed.next_hops(VIP) == [1].into()).then_some(());
    assert!(wait_for(SOON, arrived).is_some(), "{}", bed::vtysh(&dir, "show bgp ipv4 unicast"));
    let routes = bed::vtysh(&dir, "show bgp ipv4 unicast");
    assert!(routes.contains("203.0.113.1/32") && routes.contains("203.0.113.0/28"), "{routes}");
    let route = bed.birdc("router", &["show", "route", "all", "for", VIP]);
    assert!(route.contains("(64500,100)"), "{route}");
    assert_eq!(bed.ask(VIP), "n1");
    bed.serve(1, "Local", 2);
    let withdrawn = || bed.next_hops(VIP).is_empty().then_some(());
    wait_for(SOON, withdrawn).expect("FRR must withdraw the route");
}
