//! `cargo xtask demo announce`: a node dies while clients download through announced addresses.
//!
//! One client is in the nodes' network, where one node announces the addresses at layer 2. The other client is behind a
//! router. The router learns routes from BIRD on the nodes, and spreads this client's connections over all nodes.

mod report;

use std::{
    net::SocketAddr,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lb_tests::{
    cleanup,
    cluster::Cluster,
    netns::Netns,
    site::{Announcement, FAR, MAGLEV_AND_DSR, NEAR, NODES, Site, WIRING},
    transfers::{Download, Transfers},
    wait_for,
};

use self::report::{Event, Fate, Outcome, Report, Tally, millis, timeline};
use super::{ensure_not_up, report::say};

const PREFIX: &str = "lb-announce";
const FOLDER: &str = "/run/lb-announce";
/// The demo stops waiting for the downloads if none has received a byte for this long.
const STALLED: Duration = Duration::from_secs(20);
/// Size of a download in bytes: more than a client receives before the node dies, and more than the buffers hold.
const BYTES: u64 = 512 << 10;
/// How long the clients download before the node dies, and after the addresses have moved to other nodes.
const CALM: Duration = Duration::from_secs(2);

/// Arguments of `demo announce`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Downloads at the same time; a tenth of them by the client in the nodes' network
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(20..=4000))]
    connections: u32,
    /// Print the results to standard output as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the demo; fails if a connection ended although another node could have served it.
pub(super) fn run(args: &Args) -> Result<()> {
    ensure_not_up(PREFIX, FOLDER)?;
    cleanup::on_interrupt();
    say("creating namespaces for three nodes with two pods each, a router, and two clients");
    let cluster = Cluster::create(PREFIX, Path::new(FOLDER), WIRING).context("creating the namespaces")?;
    let near = format!("{PREFIX}-near");
    let mut site = Site::new(cluster, &near, Announcement::Both, &MAGLEV_AND_DSR)?;
    let report = play(&mut site, args.connections as usize)?;
    say("removing everything");
    drop(site);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("\n{}", report.text());
    }
    let broken = report.broken();
    ensure!(broken == 0, "{broken} connections ended that another node could have served");
    Ok(())
}

fn play(site: &mut Site, connections: usize) -> Result<Report> {
    say("starting lb-agent and BIRD on each node, and BIRD on the router");
    site.start(&NODES)?;
    site.wait_for_services()?;
    site.wait_for_hops(&NODES)?;
    site.wait_for_announcer(|_| true)?;
    // The announcer yields the addresses to a better candidate once that node has been alive for 5 s.
    sleep(Duration::from_secs(6));
    let dead = site.wait_for_announcer(|_| true)?;
    let died = death(site, dead, connections)?;
    Ok(Report { dead, scenes: vec![died] })
}

/// The downloads of both clients.
struct Clients {
    start: Instant,
    near: Transfers,
    far: Transfers,
    events: Vec<Event>,
}

impl Clients {
    fn begin(site: &Site, connections: usize) -> Result<Self> {
        let few = connections / 10;
        say(&format!(
            "{few} downloads from {} (layer 2) and {} from {} (by BGP)",
            NEAR[0],
            connections - few,
            FAR[0]
        ));
        let begin = |client: &Netns, vips: [&str; 2], count| -> Result<Transfers> {
            let to =
                vips.iter().map(|vip| Ok(SocketAddr::new(vip.parse()?, 80))).collect::<Result<Vec<_>>>()?;
            Transfers::begin(client, &to, count, BYTES).context("opening connections")
        };
        let near = begin(&site.near, NEAR, few)?;
        let far = begin(&site.cluster.client, FAR, connections - few)?;
        Ok(Self { start: Instant::now(), near, far, events: Vec::new() })
    }

    fn note(&mut self, what: String) {
        say(&what);
        self.events.push(Event { at_ms: millis(self.start.elapsed()), what });
    }

    /// Waits until the downloads have ended, except those from pods of `died`, the node that died: they may never end.
    /// Stops waiting once no download has received a byte for [`STALLED`]. Returns what the clients saw.
    fn end(self, site: &Site, died: u8, paths: &Paths) -> Outcome {
        say("waiting for the end of the downloads");
        let Self { start, near, far, events } = self;
        let is_lost = |download: &Download| site.node_of(&download.server) == Some(died);
        let samples = [near.samples(), far.samples()];
        let mut tallies = Vec::new();
        for (client, transfers) in [("near (layer 2)", near), ("far (BGP, ECMP)", far)] {
            for download in transfers.finish(STALLED, is_lost) {
                let fate = paths.fate(site, &download, died);
                Tally::add(&mut tallies, client, fate, &download);
            }
        }
        Outcome { tallies, events, timeline: timeline(start, &samples) }
    }
}

/// The nodes that tunnel connections to pods on other nodes, by the address of the client.
struct Paths {
    forwarders: std::collections::BTreeMap<SocketAddr, u8>,
}

impl Paths {
    fn of(site: &Site) -> Result<Self> {
        Ok(Self { forwarders: site.forwarders()? })
    }

    /// The effect of the death of the node `died` on a connection.
    fn fate(&self, site: &Site, download: &Download, died: u8) -> Fate {
        let of_pod = site.node_of(&download.server);
        let first = self.forwarders.get(&download.local).copied().or(of_pod);
        if of_pod == Some(died) {
            Fate::PodDied
        } else if first == Some(died) {
            Fate::NodeDied
        } else {
            Fate::Untouched
        }
    }
}

fn death(site: &mut Site, dead: u8, connections: usize) -> Result<Outcome> {
    let mut clients = Clients::begin(site, connections)?;
    sleep(CALM);
    let paths = Paths::of(site)?;
    site.kill(dead)?;
    clients.note(format!("node{dead} dies: its wire goes down, its agent and its BIRD are killed"));
    let rest: Vec<u8> = NODES.into_iter().filter(|node| *node != dead).collect();
    let (mut left, mut announcer) = (false, None);
    let settled = || {
        if !left && site.has_hops(&rest).is_ok_and(|it| it) {
            left = true;
            clients
                .note(format!("the router forwards to the other nodes only (BFD), no longer to node{dead}"));
        }
        if announcer.is_none() {
            announcer = site.announcer().ok().flatten().filter(|node| *node != dead);
            if let Some(node) = announcer {
                clients.note(format!("node{node} answers for {}", NEAR[0]));
            }
        }
        (left && announcer.is_some()).then_some(())
    };
    wait_for(Duration::from_secs(20), settled).context("the addresses do not move to other nodes")?;
    sleep(CALM);
    Ok(clients.end(site, dead, &paths))
}
