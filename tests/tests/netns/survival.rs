//! Survival of connections when another node gets their packets: a node dies, joins, or hands over its addresses.

use std::{
    collections::BTreeMap,
    env,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use lb_tests::{
    StopOnDrop,
    client::ask_until,
    cluster::Cluster,
    netns::{Netns, unique_prefix},
    site::{Announcement, BEST, FAR, MAGLEV_AND_DSR, NEAR, NODES, Site, WIRING},
    stopwatch::Stopwatch,
    transfers::{Download, Transfers},
    wait_for,
};

/// A download that receives no byte for this time counts as broken.
const STALLED: Duration = Duration::from_secs(20);
/// Minimum size of a download in bytes: more than the client receives before [`Transfers::finish`], and more than the
/// buffers hold.
const BYTES: u64 = 512 << 10;

fn site(announcement: Announcement, flags: &[&str]) -> Site {
    start(prepare(announcement, flags))
}

fn prepare(announcement: Announcement, flags: &[&str]) -> Site {
    let near = format!("{}-near", unique_prefix());
    Site::new(Cluster::for_test(WIRING).unwrap(), &near, announcement, flags).unwrap()
}

fn start(mut site: Site) -> Site {
    site.start(&NODES).unwrap();
    site.wait_for_services().unwrap();
    site
}

fn http(vips: [&str; 2]) -> [SocketAddr; 2] {
    vips.map(|vip| SocketAddr::new(vip.parse().unwrap(), 80))
}

/// Number of downloads in the tests with a dead or an added node. `LB_SURVIVAL_DOWNLOADS=1000`, which takes long, gives
/// the figures in docs/announce.md.
fn count() -> usize {
    env::var("LB_SURVIVAL_DOWNLOADS").map_or(120, |text| text.parse().unwrap())
}

/// Starts downloads by the client behind the router.
fn far_downloads(site: &Site, count: usize) -> Transfers {
    downloads(&site.cluster.client, FAR, count)
}

/// Starts downloads from these addresses. The more downloads there are, the longer it takes to open all of them, so
/// each then has more bytes.
fn downloads(client: &Netns, vips: [&str; 2], count: usize) -> Transfers {
    let bytes = BYTES * (count as u64 / 250).max(1);
    Transfers::begin(client, &http(vips), count, bytes).unwrap()
}

/// The nodes that tunnel downloads to pods on other nodes, by the address of the client.
struct Paths {
    forwarders: BTreeMap<SocketAddr, u8>,
}

impl Paths {
    fn of(site: &Site) -> Self {
        Self { forwarders: site.forwarders().unwrap() }
    }

    /// The node that the client's packets reach first.
    fn forwarder(&self, site: &Site, download: &Download) -> u8 {
        let of_pod = || site.node_of(&download.server).unwrap();
        self.forwarders.get(&download.local).copied().unwrap_or_else(of_pod)
    }
}

/// The downloads that have not received every byte.
fn broken(downloads: &[Download]) -> Vec<&Download> {
    downloads.iter().filter(|download| !download.is_complete()).collect()
}

/// Finishes the downloads; returns those that are broken.
fn broken_of(transfers: Transfers) -> Vec<Download> {
    let downloads = transfers.finish(STALLED, |_| false);
    broken(&downloads).into_iter().cloned().collect()
}

/// Waits until each download has received more bytes than the client's kernel held at the call, so that further packets
/// have arrived since. Asserts that no download has ended.
#[track_caller]
fn assert_all_progress(transfers: &Transfers) {
    const BUFFERED: u64 = 40 << 10;
    let before = transfers.downloads();
    let progress = || {
        let now = transfers.downloads();
        let mut pairs = now.iter().zip(&before);
        pairs.all(|(now, before)| now.received > before.received + BUFFERED).then_some(())
    };
    let all = wait_for(STALLED, progress).is_some();
    let downloads = transfers.downloads();
    assert!(all && downloads.iter().all(|download| download.end.is_none()), "{downloads:?}");
}

/// Asserts that exactly the downloads from pods on the dead node break, and that some of the others went through it.
fn assert_only_pods_of_dead_node_lost(site: &Site, dead: u8, paths: &Paths, transfers: Transfers) {
    let is_lost = |download: &Download| site.node_of(&download.server) == Some(dead);
    let downloads = transfers.finish(STALLED, is_lost);
    let count = downloads.len();
    let (lost, rest): (Vec<Download>, Vec<Download>) = downloads.into_iter().partition(is_lost);
    let moved = rest.iter().filter(|download| paths.forwarder(site, download) == dead).count();
    let broken = broken(&rest);
    println!(
        "{count} downloads: {moved} went through the dead node to pods elsewhere, {} had their pods on it, {} others broke",
        lost.len(),
        broken.len()
    );
    assert_eq!(broken.len(), 0, "{broken:?}");
    assert!(moved > count / 20 && !lost.is_empty(), "{moved} {}", lost.len());
    assert!(lost.iter().all(|download| !download.is_complete()), "{lost:?}");
}

#[test]
fn connections_survive_the_death_and_the_return_of_a_node_behind_ecmp() {
    let mut site = site(Announcement::None, &MAGLEV_AND_DSR);
    let transfers = far_downloads(&site, count());
    let paths = Paths::of(&site);
    // Imitates BFD: packets are lost until the router has detected the failure and no longer uses the dead node.
    site.kill(3).unwrap();
    sleep(Duration::from_millis(300));
    site.cluster.spread_services_over(&[1, 2]).unwrap();
    assert_only_pods_of_dead_node_lost(&site, 3, &paths, transfers);

    // The router spreads over three nodes again: it moves connections, and each continues with its pod.
    site.revive(3).unwrap();
    site.wait_for_services().unwrap();
    site.cluster.spread_services_over(&[1, 2]).unwrap();
    let transfers = far_downloads(&site, count());
    let before = Paths::of(&site);
    site.cluster.spread_services_over(&NODES).unwrap();
    let adopted = || {
        let after = Paths::of(&site);
        let has_moved = |(client, node): &(&SocketAddr, &u8)| before.forwarders.get(*client) != Some(*node);
        after.forwarders.iter().filter(has_moved).count()
    };
    // Long enough that nearly all connections have sent packets, unless the machine stalls.
    sleep(Duration::from_secs(1));
    let many = wait_for(STALLED, || Some(adopted()).filter(|adopted| *adopted > count() / 20));
    let many = many.unwrap_or_else(|| panic!("only {} downloads went on through another node", adopted()));
    println!("{} downloads, {many} went on through another node", count());
    let downloads = transfers.finish(STALLED, |_| false);
    assert_eq!(broken(&downloads).len(), 0, "{:?}", broken(&downloads));
}

#[test]
fn connections_survive_the_death_of_a_node_that_announces_by_bgp() {
    let mut site = site(Announcement::Both, &MAGLEV_AND_DSR);
    site.wait_for_hops(&NODES).unwrap();
    let transfers = far_downloads(&site, count());
    let paths = Paths::of(&site);
    let stopwatch = Stopwatch::start();
    site.kill(3).unwrap();
    site.wait_for_hops(&[1, 2]).unwrap();
    println!("the router left the dead node after {:?}", stopwatch.wall());
    assert_only_pods_of_dead_node_lost(&site, 3, &paths, transfers);
}

#[test]
fn added_node_moves_no_connection_to_another_pod_and_ends_none() {
    const IDLE: Duration = Duration::from_secs(5);
    let mut site = prepare(Announcement::None, &MAGLEV_AND_DSR);
    site.start(&[1, 2]).unwrap();
    site.serve_from(&[1, 2]).unwrap();
    for resilient in [false, true] {
        let spread = |site: &Site, nodes: &[u8]| match resilient {
            true => site.cluster.spread_services_resiliently(nodes, IDLE).unwrap(),
            false => site.cluster.spread_services_over(nodes).unwrap(),
        };
        if !site.live().contains(&3) {
            site.start(&[3]).unwrap();
            site.wait_for_services().unwrap();
        }
        spread(&site, &[1, 2]);
        let transfers = far_downloads(&site, count());
        // With resilient hashing the router moves only idle connections, so the test first lets each connection send.
        sleep(Duration::from_secs(1));
        spread(&site, &NODES);
        sleep(IDLE + Duration::from_secs(2));
        let (paths, pods) = (Paths::of(&site), site.backends().unwrap());
        let downloads = transfers.finish(STALLED, |_| false);
        let moved = downloads.iter().filter(|download| paths.forwarder(&site, download) == 3).count();
        let of_pods =
            downloads.iter().filter(|download| pods.get(&download.local).is_some_and(|it| it.len() > 1));
        let (of_pods, broken, count) = (of_pods.count(), broken(&downloads), downloads.len());
        println!(
            "resilient hashing {resilient}: {count} downloads, {moved} went on through the added node, {of_pods} got another \
             pod, {} broke",
            broken.len()
        );
        assert_eq!((of_pods, broken.len()), (0, 0), "{broken:?}");
        // Without resilient hashing the router moves about a third of the connections to the added node.
        assert!(if resilient { moved * 100 < count } else { moved > count / 10 }, "{moved} of {count}");
        let next = far_downloads(&site, 60);
        let paths = Paths::of(&site);
        let through_added = next.downloads().iter().filter(|it| paths.forwarder(&site, it) == 3).count();
        assert!(through_added > 0, "the added node gets new connections");
        assert!(broken_of(next).is_empty());
    }
}

#[test]
fn connections_survive_a_layer_2_takeover_from_a_dead_node() {
    let mut site = site(Announcement::Layer2, &MAGLEV_AND_DSR);
    // This node announces the addresses of both families, so every download moves to another node.
    let owner = site.wait_for_announcer(|node| node == BEST).unwrap();
    let transfers = downloads(&site.near, NEAR, count());
    site.kill(owner).unwrap();
    let next = site.wait_for_announcer(|node| node != owner).unwrap();
    let is_lost = |download: &Download| site.node_of(&download.server) == Some(owner);
    let downloads = transfers.finish(STALLED, is_lost);
    let (lost, rest): (Vec<Download>, Vec<Download>) = downloads.into_iter().partition(is_lost);
    let pause = rest.iter().map(|download| download.longest_pause).max().unwrap_or_default();
    println!(
        "{} downloads moved from node{owner} to node{next}, {} had their pods on the dead node; longest pause {pause:?}",
        rest.len() + lost.len(),
        lost.len()
    );
    assert_eq!(broken(&rest).len(), 0, "{:?}", broken(&rest));
    let of_v4 = |downloads: &[Download]| downloads.iter().filter(|it| it.to.is_ipv4()).count();
    for downloads in [&lost, &rest] {
        assert!((1..downloads.len()).contains(&of_v4(downloads)), "both families: {downloads:?}");
    }
}

#[test]
fn planned_handover_under_mh_and_dsr_ends_no_connection() {
    const COUNT: usize = 60;
    let mut site = site(Announcement::Layer2, &MAGLEV_AND_DSR);
    site.wait_for_announcer(|node| node == BEST).unwrap();
    // The downloads must not end before the second handover, however long that takes.
    let transfers = Transfers::begin(&site.near, &http(NEAR), COUNT, 4 * BYTES).unwrap();
    assert!(site.take_agent(BEST).unwrap().terminate().unwrap().success());
    site.wait_for_announcer(|node| node != BEST).unwrap();
    // Connections to pods on the node that hands over also continue, because its programs stay attached.
    assert_all_progress(&transfers);
    site.start(&[BEST]).unwrap();
    site.wait_for_announcer(|node| node == BEST).unwrap();
    assert_all_progress(&transfers);
    let downloads = transfers.finish(STALLED, |_| false);
    assert_eq!(broken(&downloads).len(), 0, "{:?}", broken(&downloads));
}

/// Two clients, one for each family, together open 500 connections a second, unless the machine is too slow. A
/// connection may be open while its packets move to another node, which then goes on with it.
#[test]
fn planned_handover_under_mh_and_dsr_loses_no_new_connection() {
    const INTERVAL: Duration = Duration::from_millis(4);
    let mut site = site(Announcement::Layer2, &MAGLEV_AND_DSR);
    site.wait_for_announcer(|node| node == BEST).unwrap();
    let (stop, near) = (AtomicBool::new(false), site.near.clone());
    let asked = thread::scope(|scope| {
        // Even if the test fails, `stop` must be set, because the scope waits for the clients.
        let _stop = StopOnDrop(&stop);
        let ask = |to| ask_until(&near, to, INTERVAL, &stop).unwrap();
        let clients = http(NEAR).map(|to| scope.spawn(move || ask(to)));
        sleep(Duration::from_secs(1));
        let start = Instant::now();
        assert!(site.take_agent(BEST).unwrap().terminate().unwrap().success());
        site.wait_for_announcer(|node| node != BEST).unwrap();
        sleep(Duration::from_secs(1));
        site.start(&[BEST]).unwrap();
        site.wait_for_announcer(|node| node == BEST).unwrap();
        sleep(Duration::from_secs(1));
        println!("two handovers in {:?}", start.elapsed());
        stop.store(true, Ordering::Relaxed);
        clients.map(|client| client.join().unwrap())
    });
    for (count, lost) in asked {
        println!("{count} connections, {} lost", lost.len());
        assert!(count > 250, "{count}");
        assert_eq!(lost, Vec::<String>::new(), "of {count}");
    }
}

/// With these settings every node chooses the same pod, by the client's address alone.
#[test]
fn connections_under_sh_or_under_affinity_with_mh_survive_on_another_node() {
    let dsr = &MAGLEV_AND_DSR[2..];
    for (scheduler, affinity) in [("mh", Some(600)), ("sh", None)] {
        let site = prepare(Announcement::None, &[&["--scheduler", scheduler], dsr].concat());
        let mut far = site.far();
        far.exposure.affinity = affinity;
        site.cluster.manifests.put(&far).unwrap();
        let site = start(site);
        site.cluster.route_services_to(1).unwrap();
        let transfers = far_downloads(&site, 30);
        for node in [2, 3] {
            site.cluster.route_services_to(node).unwrap();
            sleep(Duration::from_millis(500));
        }
        let downloads = transfers.finish(STALLED, |_| false);
        assert_eq!(broken(&downloads).len(), 0, "{scheduler}: {:?}", broken(&downloads));
    }
}

/// Without Maglev the second node cannot find out the pod of a connection; without DSR it cannot find out the source
/// port that the first node gave the connection.
#[test]
fn without_maglev_or_dsr_connections_end_when_another_node_gets_them() {
    let dsr = &MAGLEV_AND_DSR[2..];
    for flags in [&[][..], &["--scheduler", "mh"], dsr, &[&["--scheduler", "lc"], dsr].concat()] {
        let site = site(Announcement::None, flags);
        site.cluster.route_services_to(1).unwrap();
        let transfers = far_downloads(&site, 40);
        site.cluster.route_services_to(2).unwrap();
        let has_failed = || (!failed(&transfers.downloads()).is_empty()).then_some(());
        assert!(wait_for(STALLED, has_failed).is_some(), "{flags:?}: {:?}", transfers.downloads());
        let downloads = transfers.finish(STALLED, |_| false);
        let reset = failed(&downloads).iter().filter(|why| why.contains("reset")).count();
        println!("{flags:?}: {} of {} ended, {reset} by a reset", broken(&downloads).len(), downloads.len());
    }
}

fn failed(downloads: &[Download]) -> Vec<String> {
    downloads.iter().filter_map(|download| download.end.clone()?.err()).collect()
}
