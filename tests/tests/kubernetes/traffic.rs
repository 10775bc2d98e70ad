//! Tests that stop and restart the API server under traffic.

use std::{net::SocketAddr, time::Duration};

use lb_tests::{
    server,
    traffic::{Kind, Traffic},
};

use crate::bed::{Bed, LIMIT};

/// Processes of the node connect to a Service whose backend has an address of the node.
#[test]
fn traffic_continues_without_the_api_server() {
    let mut bed = Bed::with_faults();
    bed.netns.ip("address add 198.51.100.1/32 dev lo\naddress add 198.51.100.2/32 dev lo\n").unwrap();
    let _server = server::http(&bed.netns, "server", 8080).unwrap();
    bed = bed.with_a_and_b();
    let service = bed.service("a", 1);
    let vip: std::net::IpAddr = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    // The agent may attach the socket hooks a moment after the maps are complete, so the test tries repeatedly.
    let connect = || std::net::TcpStream::connect_timeout(&SocketAddr::new(vip, 80), Duration::from_secs(1));
    bed.wait_until("sockets are served", LIMIT, |bed| bed.netns.run(connect).is_ok());
    let traffic = Traffic::start(Kind::TCP.map(|kind| (&bed.netns, kind, SocketAddr::new(vip, 80)))).unwrap();

    bed.server_mut().stop();
    traffic.progresses().unwrap();
    // A change takes effect only when the server is back.
    bed.put("c", 3);
    bed.assert_stays(&["a 1", "b 2"], Duration::from_secs(2));
    traffic.progresses().unwrap();
    bed.server_mut().listen();
    bed.wait_served("c as well", LIMIT, &["a 1", "b 2", "c 3"]);
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}
