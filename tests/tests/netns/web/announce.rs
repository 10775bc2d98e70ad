//! The page of a Service names the node that announces the Service's address. The test compares it with the node that
//! answers ARP requests.

use std::{fs, net::SocketAddr};

use lb_tests::{
    agent::Agent,
    browser::Browser,
    cluster::{ClientLink, Cluster},
    manifests::{Exposure, Service, Type},
    wait_for,
};
use serde_json::Value;

use super::{LIMIT, SIZES, Served, browser, open, shows, until};
use crate::bed::{Bed, vips};

const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8088);
/// The Services and their addresses in the network of the nodes. The hash that ranks the nodes prefers node1 for the
/// first address and node2 for the second.
const SHOPS: [(&str, &str); 2] = [("here", "172.18.0.100"), ("there", "172.18.0.101")];
const POOL: &str = "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: pool, namespace: metallb-system}\n\
                    spec: {addresses: [172.18.0.100-172.18.0.109]}\n";

/// Two nodes with agents that agree on which of them answers for an address. No advertisement covers the pool yet.
fn start() -> (Bed, Agent) {
    let mut bed = Bed { agent: None, cluster: Cluster::for_test(ClientLink::Lan).unwrap() };
    bed.cluster.manifests.write("pool", POOL).unwrap();
    for (number, (name, address)) in (20..).zip(SHOPS) {
        let service = Service {
            annotations: vec![("metallb.io/loadBalancerIPs", address.to_owned())],
            exposure: Exposure { kind: Type::LoadBalancer, ..Exposure::default() },
            ..bed.service(name, vips(number), &["pod1", "pod3"])
        };
        let service = Service { cluster_ips: vec![service.cluster_ips[0]], ..service };
        bed.cluster.manifests.put(&service).unwrap();
    }
    let key = bed.cluster.folder().join("key");
    fs::write(&key, "a key of more than sixteen bytes\n").unwrap();
    let key = format!("--announce-key-file={}", key.display());
    let flags =
        ["--announce-member=node1=172.18.0.1:7947,node2=172.18.0.2:7947", &key, "--announce-table=1099"];
    bed.start_agent_with(&flags);
    let mut settings = bed.cluster.agent_settings(2);
    settings.arguments.extend(flags.map(str::to_owned));
    let second = Agent::start(&bed.cluster.node2, settings).unwrap();
    (bed, second)
}

fn advertise(bed: &Bed, kind: &str) {
    let yaml = format!(
        "apiVersion: metallb.io/v1beta1\nkind: {kind}\nmetadata: {{name: all, namespace: metallb-system}}\n"
    );
    bed.cluster.manifests.write(&kind.to_lowercase(), &yaml).unwrap();
}

/// The node that answers ARP requests of the router for the address; `None` if none answers, or both.
fn owner(bed: &Bed, address: &str) -> Option<String> {
    <[String; 1]>::try_from(answering(bed, address)).ok().map(|[node]| node)
}

/// The nodes that answer an ARP request of the router for the address.
fn answering(bed: &Bed, address: &str) -> Vec<String> {
    let arguments = ["-I", "lan", "-c", "1", "-w", "1", address];
    let output = bed.cluster.router.as_ref().unwrap().command("arping").args(arguments).output().unwrap();
    let replies = String::from_utf8(output.stdout).unwrap().to_lowercase();
    let answers = |number: &u8| {
        let shown =
            bed.cluster.node(*number).command("ip").args(["-j", "link", "show", "eth0"]).output().unwrap();
        let link: Value = serde_json::from_slice(&shown.stdout).unwrap();
        replies.contains(link[0]["address"].as_str().unwrap())
    };
    [1, 2].into_iter().filter(answers).map(|number| format!("node{number}")).collect()
}

/// Opens the page of a Service and waits until the box of its `LoadBalancer` address has the text `picture`, and both
/// rows of that address in the table of frontends have the text `table`.
fn says(browser: &Browser, name: &str, picture: &str, table: &str) {
    open(browser, SERVER, &format!("/services/default/{name}"));
    let boxes = "[...document.querySelectorAll('.picture g')].map((box) => (box.querySelector('title') ?? \
                 box.querySelector('.sub'))?.textContent.split('\\n').at(-1))";
    until(browser, &format!("return {boxes}.includes('{picture}')"));
    let rows = "[...document.querySelectorAll('tbody tr')].filter((row) => row.cells[1]?.innerText === 'LoadBalancer')";
    until(
        browser,
        &format!(
            "const rows = {rows}; return rows.length === 2 && rows.every((row) => row.cells[5].innerText === '{table}')"
        ),
    );
    // No node announces a cluster IP.
    until(browser, &format!("return {boxes}.includes('ClusterIP')"));
}

#[test]
fn page_of_a_service_names_the_node_that_announces_its_address() {
    let (mut bed, second) = start();
    let _served = Served::start(&bed, &["--listen", &SERVER.to_string()]);
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();
    for (name, address) in SHOPS {
        says(&browser, name, "LoadBalancer", "–");
        assert_eq!(answering(&bed, address), [""; 0], "nothing is advertised");
    }

    advertise(&bed, "L2Advertisement");
    let owned = || {
        (SHOPS.map(|(_, address)| owner(&bed, address))
            == ["node1", "node2"].map(|name| Some(name.to_owned())))
        .then_some(())
    };
    wait_for(LIMIT, owned).unwrap_or_else(|| panic!("{:?}", SHOPS.map(|(_, address)| owner(&bed, address))));
    says(&browser, "here", "LoadBalancer, at node1", "node1 (this node)");
    says(&browser, "there", "LoadBalancer, at node2", "node2");

    // By BGP each node announces every address; the text is too long for its box, which shows it on hover.
    advertise(&bed, "BGPAdvertisement");
    says(&browser, "there", "LoadBalancer, at node2, at node1 by BGP", "node2, node1 (this node) by BGP");

    // Without an agent the page shows what the maps hold, and invents no announcer.
    bed.agent.take().unwrap().kill().unwrap();
    says(&browser, "there", "LoadBalancer", "–");
    shows(
        &browser,
        "No agent answers, so the results of health checks and the announcing nodes are unknown.",
    );
    drop(second);
}
