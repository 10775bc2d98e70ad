//! Tests of announcements by BGP with BIRD and FRR: agents write routes and BIRD's configuration, and a router learns
//! the routes from the daemons.

mod bed;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::Path,
    thread::sleep,
    time::Duration,
};

use lb_tests::{
    agent::{self, Agent, is_healthy, run},
    container::FirstProcess,
    one_of_three, patience, skip,
    stopwatch::Stopwatch,
    wait_for,
};
use nix::sys::signal::Signal;
use serde_json::Value;

use self::bed::{Bed, OBJECTS, SOON, VIP, VIP6, lifetime};
use crate::supervisor;

const ALL: [usize; 3] = [1, 2, 3];

/// Three nodes with BIRD; the router has learnt their routes.
fn three() -> Bed {
    let mut bed = Bed::new(3, 1080);
    bed.start_birds();
    bed.wait_for_hops(SOON, &ALL);
    bed
}

#[test]
fn router_spreads_connections_over_the_nodes_that_serve() {
    let mut bed = three();
    // The attributes of the route are those of the advertisements.
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

    let routes = bed.agent(1).json(&["announce", "routes"]).unwrap();
    let routes: Vec<Value> = serde_json::from_value(routes).unwrap();
    assert_eq!(routes.len(), 4, "{routes:?}");
    assert_eq!(routes[1]["services"][0], "default/web");
    assert_list_names_bgp(&bed);
    let output = bed.agent(1).ask(&["announce", "bird-config"]).unwrap();
    let config = String::from_utf8(output.stdout).unwrap();
    assert!(
        config.contains("neighbor 10.9.0.254 port 1790 as 64501") && !config.contains("secret"),
        "{config}"
    );

    // Under the policy Local, only nodes with an endpoint announce.
    bed.serve(1, "Local", 2);
    bed.wait_for_hops(SOON, &[2, 3]);
    bed.serve(1, "Local", 1);
    bed.wait_for_hops(SOON, &ALL);
    // An agent that stops leaves its routes in place for the next agent. The command `withdraw` removes them; BGP
    // sessions stay.
    bed.agents[1].take().unwrap().terminate().unwrap();
    assert_ne!(bed.table(2), "");
    let table = bed.table.to_string();
    run(bed.nodes[1].command(agent::binary()).args(["announce", "withdraw", "--announce-table", &table]))
        .unwrap();
    // Checks the table at once, because the fence would also remove the routes, but later.
    assert_eq!(bed.table(2), "");
    bed.wait_for_hops(SOON, &[1, 3]);
    assert!(bed.birdc("router", &["show", "protocols", "n2"]).contains("Established"));
}

#[test]
fn node_without_ipv4_announces_ipv6_addresses() {
    let mut bed = Bed::without_ipv4(1080);
    bed.start_birds();
    let arrived = || (bed.next_hops(VIP6) == [1].into()).then_some(());
    assert!(wait_for(SOON, arrived).is_some(), "{:?}\n{}", bed.next_hops(VIP6), bed.logs());
    assert!(bed.ask(VIP6).starts_with('n'));
}

/// Asserts that `announce list`, `service show` and `explain` on node 1 say that it announces the addresses by BGP.
fn assert_list_names_bgp(bed: &Bed) {
    let output = |arguments: &[&str]| String::from_utf8(bed.agent(1).ask(arguments).unwrap().stdout).unwrap();
    let list: Vec<Value> = serde_json::from_str(&output(&["announce", "list", "-o", "json"])).unwrap();
    let addresses: Vec<&str> = list.iter().map(|it| it["address"].as_str().unwrap()).collect();
    assert_eq!(addresses, [VIP, VIP6], "{list:?}");
    for it in &list {
        assert_eq!(
            (&it["by"], &it["node"], &it["here"]),
            (&"bgp".into(), &"n1".into(), &true.into()),
            "{it}"
        );
        assert_eq!(
            it["advertisements"],
            serde_json::json!(["metallb-system/aggregate", "metallb-system/hosts"])
        );
        assert_eq!((&it["pool"], &it["services"][0]), (&"pool".into(), &"default/web".into()), "{it}");
    }
    let by = "by BGP (metallb-system/aggregate, metallb-system/hosts)";
    let page = output(&["service", "show", "default/web"]);
    assert!(
        page.contains(&format!("Announced  {VIP} by n1 (this node, since")) && page.contains(by),
        "{page}"
    );
    let explained = output(&["explain", "--from", "10.9.0.254:40000", "--to", &format!("{VIP}:80")]);
    assert!(explained.contains("announcement: n1 (this node") && explained.contains(by), "{explained}");
}

#[test]
fn metrics_count_sessions_that_are_established_and_down() {
    let mut bed = Bed::new(1, 1080);
    bed.start_birds();
    let wait = |bed: &Bed, established: usize, down: usize, failed: usize| {
        let wanted = [
            format!("lb_bgp_sessions{{state=\"established\"}} {established}"),
            format!("lb_bgp_sessions{{state=\"down\"}} {down}"),
            format!("lb_bird_config_failed {failed}"),
        ];
        let has_all = || {
            let text = bed.metrics(1);
            wanted.iter().all(|wanted| text.lines().any(|line| line == wanted)).then_some(())
        };
        let shown =
            |text: String| text.lines().filter(|line| line.contains("_b")).collect::<Vec<_>>().join("\n");
        assert!(wait_for(2 * SOON, has_all).is_some(), "{wanted:?}: {}", shown(bed.metrics(1)));
    };
    wait(&bed, 2, 0, 0);
    // BIRD ends, so it cannot check the next configuration.
    bed.daemons.pop();
    bed.folders[0].write("bgp", &OBJECTS.replace("64500:100", "64500:200")).unwrap();
    wait(&bed, 0, 2, 1);
    bed.start_birds();
    wait(&bed, 2, 0, 0);
}

#[test]
fn mistakes_are_named_and_lose_nothing() {
    let mut bed = Bed::new(1, 1080);
    bed.start_birds();
    bed.wait_for_hops(SOON, &[1]);
    let file = bed.path("bird-1.conf");
    let (config, before) = (fs::read_to_string(&file).unwrap(), bed.session(1));
    for (from, to, problem) in [
        ("gold, 'large", "silver, 'large", "spec.communities[0]: Invalid value: \"silver\""),
        (
            "password: secret}",
            "password: secret, bfdProfile: slow}",
            "spec.bfdProfile: Invalid value: \"slow\"",
        ),
        ("10.9.0.254", "169.254.0.1", "spec.peerAddress: Invalid value: \"169.254.0.1\""),
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
    // A new community reaches the router, and the BGP session stays.
    bed.folders[0].write("bgp", &OBJECTS.replace("64500:100", "64500:200")).unwrap();
    let arrived =
        || bed.birdc("router", &["show", "route", "all", "for", VIP]).contains("(64500,200)").then_some(());
    wait_for(SOON, arrived).expect("BIRD must read its new configuration");
    assert_eq!(bed.session(1), before, "the session was reset");
}

/// Number of BIRD's user and group, which need no entry in `/etc/passwd` and `/etc/group`.
const BIRD: u32 = 54_321;

/// Replaces the agent of node 1 by one with the capabilities of the packaged unit; `groups` is an option of setpriv.
/// Then gives the IPv6 session this hold time.
fn run_as_unit(bed: &mut Bed, groups: &str, hold: u32) {
    bed.agents[0].take().unwrap().terminate().unwrap();
    let bounds = format!("--bounding-set=-all{}", supervisor::capabilities());
    let starter = ["setpriv", "--no-new-privs", "--inh-caps=-all", &bounds, groups].map(str::to_owned);
    let agent = Agent::spawn_by(&bed.nodes[0], bed.settings(1), &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    bed.agents[0] = Some(agent);
    let objects = OBJECTS.replace("holdTime: 9s", &format!("holdTime: {hold}s"));
    bed.folders[0].write("bgp", &objects).unwrap();
}

#[test]
fn packaged_unit_in_the_group_of_bird_keeps_the_group_of_its_file() {
    let mut bed = Bed::with_lifetime(1, 1080, 12 * lifetime());
    bed.start_birds();
    bed.wait_for_hops(SOON, &[1]);
    // BIRD owns its socket. Root owns the configuration file, which BIRD may read.
    let (file, socket) = (bed.path("bird-1.conf"), bed.path("bird-1.ctl"));
    for (path, owner, mode) in [(&file, 0, 0o640), (&socket, BIRD, 0o660)] {
        chown(path, Some(owner), Some(BIRD)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let content = || fs::read_to_string(&file).unwrap();
    run_as_unit(&mut bed, &format!("--groups={BIRD}"), 12);
    let is_used = || {
        let is_failed = bed.problems(1).iter().any(|it| it.contains("bird-1"));
        (content().contains("hold time 12;") && !is_failed).then_some(())
    };
    assert!(wait_for(SOON, is_used).is_some(), "{:?}\n{}", bed.problems(1), bed.logs());
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o777), (0, BIRD, 0o640));

    // Without the group, the file stays as it is, and `status` says what is missing.
    let last = content();
    run_as_unit(&mut bed, "--clear-groups", 15);
    let says_so = |it: &String| it.contains("cannot write") && it.contains("SupplementaryGroups=bird");
    let named = || bed.problems(1).iter().any(says_so).then_some(());
    assert!(wait_for(SOON, named).is_some(), "{:?}", bed.problems(1));
    assert_eq!(content(), last);
    assert_eq!(fs::metadata(&file).unwrap().gid(), BIRD);
}

#[test]
fn fence_withdraws_the_routes_of_agents_that_hang_or_die() {
    let mut bed = three();
    // A restart within the lifetime withdraws nothing, and BIRD keeps its configuration.
    let before = bed.session(3);
    bed.agents[2].take().unwrap().kill().unwrap();
    bed.agents[2] = Some(Agent::start(&bed.nodes[2], bed.settings(3)).unwrap());
    bed.wait_for_hops(SOON, &ALL);
    assert_eq!(bed.session(3), before, "the restart has reset the session");

    let start = Stopwatch::start();
    bed.agent(1).signal(Signal::SIGSTOP).unwrap();
    bed.agents[1].take().unwrap().kill().unwrap();
    sleep(Duration::from_secs(2));
    let (hops, server) = (bed.next_hops(VIP), bed.ask(VIP));
    // The last heartbeat was up to a second ago when the agents hung and died.
    let second = Duration::from_secs(1);
    let earliest = lifetime() - second;
    if start.wall() < earliest {
        assert_eq!(hops, ALL.into(), "the data plane works, so the routes stay for a while");
        assert!(["n1", "n2", "n3"].contains(&&*server), "{server}");
    }
    bed.wait_for_hops(SOON, &[3]);
    let took = start.wall();
    println!("routes of a hung and of a killed agent are gone after {took:?}");
    let latest = lifetime() + 4 * second * patience() + 4 * second + start.waited();
    assert!((earliest..latest).contains(&took), "{took:?}");
    assert_eq!((bed.table(1), bed.table(2)), (String::new(), String::new()));

    bed.agent(1).signal(Signal::SIGCONT).unwrap();
    bed.wait_for_hops(SOON, &[1, 3]);
    bed.agents[1] = Some(Agent::start(&bed.nodes[1], bed.settings(2)).unwrap());
    bed.wait_for_hops(SOON, &ALL);
}

#[test]
fn restart_withdraws_no_route_even_with_invalid_manifests() {
    // The fence waits longer than a slow machine takes to restart an agent.
    let mut bed = Bed::with_lifetime(1, 1080, 12 * lifetime());
    bed.start_birds();
    bed.wait_for_hops(SOON, &[1]);
    let (config, table) = (fs::read_to_string(bed.path("bird-1.conf")).unwrap(), bed.table(1));
    let monitor = bed.monitor(1);
    bed.restart(1);
    // The agent starts while a file is invalid: first that of the Service, then that of the objects for BGP.
    for (file, last) in [
        ("web", fs::read_to_string(bed.folders[0].folder().join("web.yaml")).unwrap()),
        ("bgp", OBJECTS.to_owned()),
    ] {
        bed.folders[0].write(file, &last.replace("spec:", "spec: [")).unwrap();
        bed.restart(1);
        let kept =
            || bed.problems(1).iter().any(|it| it.contains("as an earlier agent left it")).then_some(());
        assert!(wait_for(SOON, kept).is_some(), "{:?}", bed.problems(1));
        sleep(Duration::from_secs(3));
        assert_eq!(bed.table(1), table);
        assert_eq!(fs::read_to_string(bed.path("bird-1.conf")).unwrap(), config);
        bed.folders[0].write(file, &last).unwrap();
        let known =
            || (!bed.problems(1).iter().any(|it| it.contains("as an earlier agent left it"))).then_some(());
        assert!(wait_for(SOON, known).is_some(), "{:?}", bed.problems(1));
    }
    assert_eq!(bed.table(1), table);
    let text = monitor.text();
    let deleted: Vec<&str> =
        text.lines().filter(|line| line.contains("Deleted") && line.contains("proto 109")).collect();
    assert_eq!(deleted, [""; 0]);
    bed.wait_for_hops(SOON, &[1]);
}

/// When a Pod ends, all of its containers get SIGTERM at once. Kubernetes kills those that still run after 10 s.
#[test]
fn fence_of_a_pod_ends_after_its_agent_and_before_it_would_be_killed() {
    let mut bed = Bed::new(1, 1080);
    // Ends the fence. BIRD of the router stays.
    bed.daemons.truncate(1);
    let log = bed.path("first-process.log");
    let arguments = ["announce", "fence", "--announce-table", "1080", "--lifetime", "60"];
    let mut fence = FirstProcess::start(&bed.nodes[0], agent::binary(), arguments, &log).unwrap();
    let listens = || fs::read_to_string(&log).unwrap().contains("fence: removes").then_some(());
    wait_for(SOON, listens).expect("the fence must listen");
    let announced = || (bed.table(1).lines().count() == 4).then_some(());
    wait_for(SOON, announced).expect("four routes");
    let (table, stopwatch) = (bed.table(1), Stopwatch::start());
    fence.signal(Signal::SIGTERM).unwrap();
    assert!(bed.agents[0].take().unwrap().terminate().unwrap().success());
    assert_eq!(bed.table(1), table, "the agent has found the fence, and leaves its routes");
    let status = wait_for(SOON, || fence.status().unwrap());
    let took = stopwatch.elapsed();
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
    println!("the fence has ended after {took:?}");
    assert!(took < Duration::from_secs(8) * patience(), "{took:?}");
    assert_eq!(bed.table(1), table);
}

#[test]
fn unhealthy_agent_adds_no_routes_again() {
    let bed = Bed::new(1, 1080);
    let announced = || (bed.table(1).lines().count() == 4).then_some(());
    wait_for(SOON, announced).expect("four routes");
    // From now on, the kernel refuses every change of a Service.
    let services = bed.path("bpffs-1").join("lb");
    let found = run(std::process::Command::new("find").arg(&services).args(["-name", "SERVICES"])).unwrap();
    let path = String::from_utf8(found.stdout).unwrap();
    run(std::process::Command::new("bpftool").args(["map", "freeze", "pinned", path.trim()])).unwrap();
    bed.folders[0]
        .write(
            "web",
            &fs::read_to_string(bed.folders[0].folder().join("web.yaml"))
                .unwrap()
                .replace("port: 80,", "port: 81,"),
        )
        .unwrap();
    let sick = || (!is_healthy(&bed.nodes[0]).unwrap_or(true)).then_some(());
    wait_for(Duration::from_secs(200), sick).expect("the agent must become unhealthy");
    let gone = || bed.table(1).is_empty().then_some(());
    wait_for(lifetime() + SOON, gone).expect("the fence must remove the routes");
    for _ in 0..50 {
        sleep(Duration::from_millis(100));
        assert_eq!(bed.table(1), "");
    }
}

#[test]
fn fence_whose_socket_is_removed_goes_on() {
    // A lifetime so long that no stall of the agent delays a heartbeat beyond it.
    let lifetime = 3 * lifetime();
    let bed = Bed::with_lifetime(1, 1080, lifetime);
    let announced = || (bed.table(1).lines().count() == 4).then_some(());
    wait_for(SOON, announced).expect("four routes");
    let monitor = bed.monitor(1);
    let namespace = run(bed.nodes[0].command("stat").args(["-L", "-c", "%i", "/proc/self/ns/net"])).unwrap();
    let inode: u64 = String::from_utf8(namespace.stdout).unwrap().trim().parse().unwrap();
    let socket = format!("/run/lb-agent/fence-{inode:x}-1080.sock");
    fs::remove_file(&socket).unwrap();
    wait_for(SOON, || Path::new(&socket).exists().then_some(()))
        .expect("the fence must bind its socket again");
    sleep(lifetime + Duration::from_secs(2));
    assert!(!monitor.text().contains("Deleted blackhole 203"), "{}", monitor.text());
    assert!(!bed.problems(1).iter().any(|it| it.contains("no fence")), "{:?}", bed.problems(1));
}

#[test]
fn routes_of_other_software_and_of_other_tables_stay() {
    let mut bed = Bed::new(1, 1080);
    let announced = || (bed.table(1).lines().count() == 4).then_some(());
    wait_for(SOON, announced).expect("four routes");
    // A route of other software, and a route of another agent in another table.
    let node = &bed.nodes[0];
    node.ip("route del blackhole 203.0.113.1 table 1080\nroute add blackhole 203.0.113.1 table 1080 proto static\n\
             route add blackhole 203.0.113.9 table 1081 proto 109\n")
        .unwrap();
    let named = || {
        let problems = bed.problems(1);
        problems.iter().any(|it| it.contains("203.0.113.1/32") && it.contains("other software")).then_some(())
    };
    assert!(wait_for(SOON, named).is_some(), "{:?}", bed.problems(1));
    // A route that the kernel refuses delays no other change.
    bed.serve(1, "Local", 2);
    let left = || (bed.table(1).lines().count() == 1).then_some(());
    assert!(wait_for(SOON, left).is_some(), "{}", bed.table(1));
    assert!(bed.table(1).contains("proto static"), "{}", bed.table(1));
    bed.serve(1, "Local", 1);
    let back = || (bed.table(1).lines().count() == 4).then_some(());
    assert!(wait_for(SOON, back).is_some(), "{}", bed.table(1));
    bed.nodes[0].ip("route del blackhole 203.0.113.1 table 1080\n").unwrap();
    let ours = || bed.table(1).contains("203.0.113.1 proto 109").then_some(());
    assert!(wait_for(SOON, ours).is_some(), "{}", bed.table(1));
    // An agent with another table than its predecessor removes the routes in the predecessor's table, and in no other.
    bed.restart(1);
    bed.table = 1082;
    bed.restart(1);
    wait_for(SOON, || (bed.table(1).lines().count() == 4).then_some(())).expect("four routes");
    bed.table = 1080;
    assert_eq!(bed.table(1), "");
    bed.table = 1081;
    assert!(bed.table(1).contains("203.0.113.9"), "{}", bed.table(1));
    let rules = run(bed.nodes[0].command("ip").args(["rule", "show"])).unwrap();
    let rules = String::from_utf8(rules.stdout).unwrap();
    assert!(rules.contains("lookup 1082") && !rules.contains("lookup 1080"), "{rules}");
}

#[test]
fn packets_that_no_service_takes_end_on_the_node() {
    let bed = three();
    for vip in [VIP, VIP6] {
        let before = bed.forwarded(vip);
        bed.send(vip, 9, 10);
        sleep(Duration::from_secs(1));
        // BGP sessions and probes are not forwarded, so this number counts only the datagrams.
        let forwarded = bed.forwarded(vip) - before;
        assert!(
            (10..20).contains(&forwarded),
            "the router has forwarded {forwarded} packets for 10 to {vip}"
        );
        assert!(bed.ask(vip).starts_with('n'));
    }
    // Sends to an address that an aggregate route covers, but that no Service has.
    let before = bed.forwarded(VIP);
    bed.send("203.0.113.7", 80, 10);
    sleep(Duration::from_secs(1));
    let forwarded = bed.forwarded(VIP) - before;
    assert!((10..20).contains(&forwarded), "{forwarded}");
}

/// How long the router takes to leave a node whose link goes down.
fn time_to_leave_a_dead_node() -> Duration {
    let mut bed = Bed::with_bfd(3, 1080);
    bed.start_birds();
    bed.wait_for_hops(SOON, &ALL);
    let up = || {
        let sessions = bed.birdc("router", &["show", "bfd", "sessions"]);
        (sessions.matches(" Up ").count() == 6).then_some(())
    };
    wait_for(SOON, up).expect("six BFD sessions must be up");
    let stopwatch = Stopwatch::start();
    bed.nodes[1].ip("link set eth0 down\n").unwrap();
    bed.wait_for_hops(SOON, &[1, 3]);
    let took = stopwatch.elapsed();
    println!("the router left the dead node after {took:?}");
    assert!(["n1", "n3"].contains(&&*bed.ask(VIP)));
    took
}

#[test]
fn bfd_moves_connections_off_a_dead_node_within_a_second() {
    one_of_three(time_to_leave_a_dead_node, |took| *took < Duration::from_secs(1) * patience());
}

#[test]
fn frr_announces_the_routes() {
    if !Path::new("/usr/lib/frr/bgpd").exists() {
        return skip::whole("FRR is not installed in /usr/lib/frr");
    }
    // The command of FRR 8 that imports a table takes table numbers up to 252.
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
