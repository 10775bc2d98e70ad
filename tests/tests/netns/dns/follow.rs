//! Tests how soon DNS names follow a change of their Service.

use std::{net::Ipv4Addr, time::Duration};

use lb_tests::dns::{Client, Delays};

use super::Names;

/// Number of changes of the Service that are measured.
const CHANGES: u32 = 200;
/// Limit that 99 of 100 changes must meet, without waits for a CPU. (Without load a change takes some milliseconds.)
const BOUND: Duration = Duration::from_millis(100);

fn moving(address: Ipv4Addr) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: moving}}\nspec: {{clusterIP: None}}\n---\napiVersion: \
         discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: moving-1, labels: \
         {{kubernetes.io/service-name: moving}}}}\naddressType: IPv4\nports: []\nendpoints:\n- {{addresses: \
         [{address}]}}\n"
    )
}

#[test]
fn names_follow_a_change_of_a_manifest_within_milliseconds() {
    let names = Names::new();
    let manifests = &names.bed.cluster.manifests;
    let client = Client::new(&names.bed.cluster.node1).unwrap();
    let change = |number| {
        let address = Ipv4Addr::from(0x0af4_0101 + number);
        client.follow("moving", Some(address), || manifests.write("moving", &moving(address))).unwrap()
    };
    let delays = Delays((0..CHANGES).map(change).collect());
    eprintln!("names follow a change: {}", delays.show(|delay| delay.own));
    let (late, limit) = (delays.at(99, |delay| delay.own), delays.limit(BOUND));
    assert!(late < limit, "{late:?} of {limit:?}");
}
