//! Tests of full maps: the agent and the programs reject only what does not fit, count and log it, and serve all else.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use lb_tests::{
    client::{self, Connection, ask_http, ask_udp},
    cluster::{CLIENT, ClientLink},
    manifests::{Endpoint, Port, Service},
    patience,
    stopwatch::Stopwatch,
    traffic::{Kind, Traffic},
    wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp, vips},
    flood,
};

const PODS: [&str; 3] = ["pod2", "pod3", "pod4"];
/// The agent's `--max-connections` under the flood.
const ROOM: u32 = 1000;
/// The flood opens this many times [`ROOM`] connections.
const TIMES: u32 = 10;

/// The shortage of this name in `status`: the number of refusals, and the text.
fn shortage(bed: &Bed, of: &str) -> Option<(u64, String)> {
    let status = bed.status();
    let shortages = status["agent"]["shortages"].as_array()?;
    let found = shortages.iter().find(|shortage| shortage["of"] == of)?;
    Some((found["refused"].as_u64()?, found["text"].as_str()?.to_owned()))
}

/// Number of warnings in the agent's log that contain `text`.
fn said(bed: &Bed, text: &str) -> usize {
    bed.agent
        .as_ref()
        .unwrap()
        .log()
        .lines()
        .filter(|line| line.contains("WARN") && line.contains(text))
        .count()
}

/// Asserts that the agent has logged a warning that contains `text`, at most once a minute since `start`.
#[track_caller]
fn assert_said_once_a_minute(bed: &Bed, text: &str, start: Instant) {
    let minutes = usize::try_from(start.elapsed().as_secs() / 60).unwrap();
    let said = said(bed, text);
    assert!((1..=1 + minutes).contains(&said), "{text}: {said} times in {minutes} minutes");
}

/// Established traffic: long-lived connections and UDP sockets.
fn established(bed: &Bed) -> Traffic {
    let clients = [&bed.cluster.client, bed.netns("pod1")].into_iter().flat_map(|netns| {
        let of = move |vip| [(netns, Kind::Connection, http(vip)), (netns, Kind::Datagrams, udp(vip))];
        WEB.into_iter().flat_map(of)
    });
    Traffic::start(clients).unwrap()
}

/// Half-open connections are evicted for new ones; established connections are not.
#[test]
fn syn_flood_of_ten_times_the_capacity_breaks_no_established_connection() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.start_agent_with(&["--max-connections", &ROOM.to_string()]);
    let start = Instant::now();
    let [IpAddr::V4(v4), IpAddr::V6(v6)] = CLIENT else { panic!("one of each family") };
    flood::route_back(&bed.cluster.node1, (v4, v6));
    let client = bed.cluster.client.clone();
    let mut idle: Vec<Connection> =
        WEB.into_iter().cycle().take(40).map(|vip| Connection::open(&client, http(vip)).unwrap()).collect();
    let servers: Vec<String> = idle.iter_mut().map(|connection| connection.ask().unwrap().server).collect();
    let traffic = established(&bed);

    for round in 0..TIMES {
        let (vip, first) = (WEB[round as usize % 2], round * ROOM);
        flood::syns(&client, http(vip), first, ROOM).unwrap();
    }
    let since_flood = Stopwatch::start();
    let refused =
        wait_for(Duration::from_secs(5), || shortage(&bed, "CONNTRACK").filter(|(refused, _)| *refused > 0));
    let (refused, text) = refused.expect("the flow table was full");
    assert!(text.contains("--max-connections"), "{text}");
    assert!(bed.metric("lb_packets_total{outcome=\"conntrack_full\"}") >= refused);

    // Half-open connections are evicted long before their timeout of one minute.
    let all_get_in = || WEB.into_iter().all(|vip| client.run(|| client::ask_here(http(vip))).is_ok());
    wait_for(Duration::from_secs(20), || all_get_in().then_some(())).expect("new connections get in again");
    let recovered = since_flood.elapsed();
    // In an emulated machine, a single attempt takes up to 15 s.
    let limit = Duration::from_secs(15) * patience().min(3);
    assert!(recovered < limit, "{recovered:?}");
    wait_for(Duration::from_secs(5), || (bed.metric("lb_conntrack_expired_early_total") > 0).then_some(()))
        .unwrap();

    let again = idle.iter_mut().map(|connection| connection.ask().unwrap().server);
    assert!(again.eq(servers), "a connection has moved to another server");
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
    assert_said_once_a_minute(&bed, "the flow table is", start);
    println!("{} SYNs, {refused} dropped, others get in after {recovered:?}", TIMES * ROOM);
}

const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// A service with 100 endpoints, none of which exists.
fn too_big(bed: &Bed) -> Service {
    let endpoint = |last: u8| Endpoint {
        pod: format!("absent{last}"),
        node: "node2".into(),
        addresses: vec![
            [10, 244, 9, last].into(),
            Ipv6Addr::new(0xfd00, 0x10, 0x244, 9, 0, 0, 0, last.into()).into(),
        ],
        ready: true,
        ..Endpoint::default()
    };
    Service { endpoints: (1..=100).map(endpoint).collect(), ..bed.service("a-big", vips(20), &[]) }
}

/// A service with `ports` ports, and thus twice as many frontends.
fn too_many(bed: &Bed, ports: usize) -> Service {
    let port = |(name, port): (&'static str, u16)| Port {
        name,
        protocol: "TCP",
        port,
        target_port: lb_tests::cluster::HTTP_PORT,
        node_port: None,
    };
    let ports = NAMES.into_iter().zip(crate::bed::HTTP..).take(ports).map(port).collect();
    Service { ports, ..bed.service("a-many", vips(21), &["pod2"]) }
}

/// The names of the services that do not fit sort before `web`, so the agent handles these services first.
#[test]
fn services_beyond_the_capacity_wait_and_delay_no_others() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.start_agent_with(&["--max-backends", "40", "--max-frontends", "12"]);
    let start = Instant::now();
    let traffic = bed.traffic();
    let client = bed.cluster.client.clone();
    bed.cluster.manifests.put(&too_big(&bed)).unwrap();
    bed.cluster.manifests.put(&too_many(&bed, 8)).unwrap();
    for (map, flag) in [("BACKENDS", "--max-backends"), ("SERVICES", "--max-frontends")] {
        let (_, text) = wait_for(client::PATIENCE, || shortage(&bed, map)).expect(map);
        assert!(text.contains(flag), "{text}");
        assert_eq!(bed.metric(&format!("lb_services_waiting{{map=\"{map}\"}}")), 1);
        wait_for(client::PATIENCE, || (said(&bed, flag) > 0).then_some(())).expect(flag);
    }

    // All other services are served and follow edits.
    for pod in ["pod1", "pod4", "pod2"] {
        bed.put("other", vips(22), &[pod]);
        let served = || ask_http(&client, http(vips(22)[0])).ok().filter(|answer| answer.server == pod);
        wait_for(client::PATIENCE, served).expect(pod);
        traffic.progresses().unwrap();
    }

    // The agent serves a Service that did not fit once this Service needs less room and another Service is removed.
    bed.cluster.manifests.remove("a-big").unwrap();
    bed.cluster.manifests.put(&too_many(&bed, 4)).unwrap();
    let still_short = wait_for(client::PATIENCE, || shortage(&bed, "BACKENDS").is_none().then_some(()));
    still_short.expect("no service waits for BACKENDS");
    assert!(shortage(&bed, "SERVICES").is_some());
    bed.cluster.manifests.remove("other").unwrap();
    let last_port = SocketAddr::new(vips(21)[0], crate::bed::HTTP + 3);
    let answer = wait_for(client::PATIENCE, || ask_http(&client, last_port).ok());
    assert_eq!(answer.unwrap().server, "pod2");
    wait_for(client::PATIENCE, || shortage(&bed, "SERVICES").is_none().then_some(())).unwrap();
    assert_eq!(bed.metric("lb_services_waiting{map=\"SERVICES\"}"), 0);

    for flag in ["--max-backends", "--max-frontends"] {
        assert_said_once_a_minute(&bed, flag, start);
    }
    assert!(lb_tests::agent::is_healthy(&bed.cluster.node1).unwrap());
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// Clients beyond the capacity are rebalanced, never rejected.
#[test]
fn affinity_evictions_are_counted_and_clients_stay_served() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let mut sticky = bed.service("sticky", vips(20), &PODS);
    sticky.exposure.affinity = Some(3600);
    bed.cluster.manifests.put(&sticky).unwrap();
    bed.start_agent_with(&["--max-affinity-clients", "64"]);
    let traffic = bed.traffic();
    let client = &bed.cluster.client;
    let addresses: Vec<Ipv4Addr> = (10..210).map(|last| Ipv4Addr::new(198, 51, 100, last)).collect();
    let commands = addresses.iter().map(|address| format!("address add {address}/24 dev eth0\n"));
    client.ip(&commands.collect::<String>()).unwrap();
    let ask_from = |address: Ipv4Addr| {
        let open = || {
            let socket = UdpSocket::bind((address, 0))?;
            socket.connect(udp(vips(20)[0]))?;
            Ok(socket)
        };
        let socket = client.run(open)?;
        // An answer must come, but it may come late on a busy machine.
        socket.set_read_timeout(Some(4 * client::limit()))?;
        Ok::<_, io::Error>(client::echo(&socket, b"?")?.server)
    };
    let started = Instant::now();
    let evicted = wait_for(Duration::from_secs(15), || {
        addresses.iter().for_each(|address| drop(ask_from(*address).unwrap()));
        shortage(&bed, "AFFINITY")
    });
    let (evicted, text) = evicted.expect("clients were evicted");
    assert!(evicted > 0 && text.contains("--max-affinity-clients"), "{evicted} {text}");
    assert!(bed.metric("lb_affinity_evicted_total") >= evicted);
    let clients = bed.metric("lb_map_entries{map=\"AFFINITY\"}");
    assert!((1..=64).contains(&clients), "{clients}");
    assert_said_once_a_minute(&bed, "AFFINITY is full", started);
    ask_udp(client, udp(WEB[0]), 64).unwrap();
    traffic.stop().assert_unharmed();
    println!("{evicted} clients evicted within {:?}, all served", started.elapsed());
}
