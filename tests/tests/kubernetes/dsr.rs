//! Direct server return between nodes that know each other from the API server only. Each node serves the Service with a
//! server of its own, so an answer shows which node the client has reached, and from which address.

use std::{net::SocketAddr, time::Duration};

use lb_tests::{
    agent::{ask, binary},
    client::ask_http,
    wait_for,
};
use serde_json::{Value, json};

use crate::segment::{Segment, node};

const VIP: &str = "203.0.113.10";
/// How long to wait until an agent has started, or has followed a change.
const SOON: Duration = Duration::from_secs(20);
/// The address of the client of a [`Segment`].
const CLIENT: &str = "192.0.2.99";

impl Segment {
    /// Creates a Service with [`VIP`], whose only endpoint is on this node, and starts an agent on each node. The
    /// client's way to the address leads to node 1.
    fn serve_from(&mut self, number: usize) {
        self.server.put(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": VIP, "ipMode": "VIP"}]}},
        }));
        self.endpoints(&[number]);
        self.nodes.iter().for_each(|node| node.sysctls(&[("ipv4/ip_forward", "1")]).unwrap());
        self.start_with(|_| ["--north-south-mode", "dsr"].map(str::to_owned).to_vec());
        self.client.ip(&format!("route add {VIP} via 192.0.2.1\n")).unwrap();
    }

    /// Number of packets that the programs of a node have counted under this outcome.
    fn counted(&self, number: usize, outcome: &str) -> u64 {
        let status =
            ask(&self.nodes[number - 1], &self.bpffs(number), &["status", "--all", "-o", "json"]).unwrap();
        let status: Value = serde_json::from_slice(&status.stdout).unwrap();
        let found = status["outcomes"].as_array().unwrap().iter().find(|is| is["outcome"] == outcome);
        found.map_or(0, |is| is["packets"].as_u64().unwrap())
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
    let list_of = |number: usize| {
        let mut list = segment.nodes[number - 1].command(binary());
        list.args(["service", "list", "--bpffs"]).arg(segment.bpffs(number)).output().unwrap()
    };
    let is_served = || {
        let lists = [1, 2].map(|number| String::from_utf8(list_of(number).stdout).unwrap());
        lists.iter().all(|list| list.contains(VIP)).then_some(())
    };
    wait_for(SOON, is_served).unwrap_or_else(|| panic!("both agents serve\n{}", segment.logs()));
    let refused = || segment.counted(2, "tunnel_refused");
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
