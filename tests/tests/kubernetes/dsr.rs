//! Direct server return between nodes that know each other from the API server only. Each node runs its own backend of
//! the Service. An answer names the node whose backend sent it, and the client address that this backend saw.

use std::{net::SocketAddr, time::Duration};

use lb_tests::{agent::counted, client::ask_http, wait_for};
use serde_json::json;

use crate::segment::{Segment, node};

const VIP: &str = "203.0.113.10";
/// How long to wait until an agent has started, or has followed a change.
const SOON: Duration = Duration::from_secs(20);
/// The address of the client of a [`Segment`].
const CLIENT: &str = "192.0.2.99";

impl Segment {
    /// Creates a Service with [`VIP`] and a single endpoint on node `number`, and starts an agent on each node. The
    /// client's route to [`VIP`] leads to node 1.
    fn serve_from(&mut self, number: usize) {
        self.service(VIP, "Cluster");
        self.endpoints(&[number]);
        self.nodes.iter().for_each(|node| node.sysctls(&[("ipv4/ip_forward", "1")]).unwrap());
        self.start_with(|_| ["--north-south-mode", "dsr"].map(str::to_owned).to_vec());
        self.client.ip(&format!("route add {VIP} via 192.0.2.1\n")).unwrap();
    }

    /// The client's address as the server has seen it, and the server; `None` without an answer.
    fn seen(&self) -> Option<(String, String)> {
        let answer = ask_http(&self.client, SocketAddr::new(VIP.parse().unwrap(), 80)).ok()?;
        Some((answer.seen.ip().to_string(), answer.server))
    }
}

#[test]
fn nodes_of_the_api_server_send_each_other_tunnelled_connections() {
    let mut segment = Segment::new(2);
    let nodes = [1, 2].map(|number| node(number, json!({})));
    segment.server.put(nodes[1].clone());
    segment.serve_from(2);
    let serves =
        |number| segment.json(number, &["service", "list"]).is_ok_and(|list| list.to_string().contains(VIP));
    let is_served = || [1, 2].into_iter().all(serves).then_some(());
    wait_for(SOON, is_served).unwrap_or_else(|| panic!("both agents serve\n{}", segment.logs()));
    let refused = || counted(&segment.nodes[1], &segment.bpffs(2), "tunnel_refused").unwrap();
    assert_eq!(segment.seen(), None, "node 2 takes no tunnels from a machine that is no Node");
    assert!(refused() > 0, "{}", segment.logs());

    segment.server.put(nodes[0].clone());
    let answered = wait_for(SOON, || segment.seen());
    assert_eq!(answered, Some((CLIENT.to_owned(), "n2".to_owned())), "{}", segment.logs());
    let before = refused();
    segment.server.delete(&nodes[0]);
    let is_refused = || (segment.seen().is_none() && refused() > before).then_some(());
    wait_for(SOON, is_refused).unwrap_or_else(|| panic!("node 1 is no longer a Node\n{}", segment.logs()));
}
