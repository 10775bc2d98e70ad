//! Tests how soon DNS names follow objects of an API server.

use std::{net::Ipv4Addr, time::Duration};

use lb_tests::dns::{Client, Delay, Delays};
use serde_json::{Value, json};

use crate::bed::{Bed, DNS, LIMIT, headless};

/// Number of changes that each test measures.
const CHANGES: u32 = 50;
/// Limit on the median of [`Delay::own`], which excludes the time in which tasks waited for resources. The limit on the
/// shortest [`Delay::wall`], which includes that time, is five times as long.
const BOUND: Duration = Duration::from_millis(10);

/// Prints the distribution of the delays, and asserts the limits on the median and on the shortest one, see [`BOUND`].
fn assert_prompt(what: &str, delays: Vec<Delay>) {
    let delays = Delays(delays);
    let (wall, own) = (delays.show(|delay| delay.wall), delays.show(|delay| delay.own));
    eprintln!("{what}, {} times: {wall}; without waits for a CPU: {own}", delays.0.len());
    let (fastest, median) = (delays.at(0, |delay| delay.wall), delays.at(50, |delay| delay.own));
    assert!(median < delays.limit(BOUND), "{what}: the median is {median:?}");
    // A fixed delay, such as that of a timer, affects even the fastest change. `fastest` may include waits for a CPU.
    assert!(fastest < delays.limit(5 * BOUND), "{what}: the fastest took {fastest:?}");
}

/// A node whose agent answers queries and knows the Service `a`, the headless Service `peers`, and `services` further
/// headless Services.
fn bed_with(services: u32) -> (Bed, Client) {
    let mut bed = Bed::with_faults();
    bed.put("a", 1);
    bed.server().put(headless(&bed, "peers"));
    for number in 0..services {
        let mut slice = bed.slice(&format!("other-{number}"), 3);
        slice["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
        bed.server().put(headless(&bed, &format!("other-{number}")));
        bed.server().put(slice);
    }
    // The mock server searches its whole history for each event of a watch: a long history would slow it down.
    bed.server().drop_history();
    bed.start_agent_with(&DNS);
    let client = Client::new(&bed.netns).unwrap();
    bed.wait_until("the agent answers", LIMIT, |_| client.ask("a").unwrap().is_some());
    (bed, client)
}

/// The EndpointSlice of the Service `peers` with one endpoint.
fn peers(bed: &Bed, address: Ipv4Addr) -> Value {
    let mut slice =
        bed.slice_of("peers", "peers", &[json!({"addresses": [address], "conditions": {"ready": true}})]);
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
    slice
}

/// Changes an object of the API server; returns how soon the answer for `name` is `wanted`.
fn follow(client: &Client, name: &str, wanted: Option<Ipv4Addr>, change: impl FnOnce()) -> Delay {
    let change = || {
        change();
        Ok(())
    };
    client.follow(name, wanted, change).unwrap()
}

#[test]
fn names_follow_an_endpoint_slice_within_10_ms() {
    let (bed, client) = bed_with(0);
    let delays = (0..CHANGES).map(|number| {
        let address = Ipv4Addr::from(0x0af4_0101 + number);
        let slice = peers(&bed, address);
        follow(&client, "peers", Some(address), || bed.server().put(slice))
    });
    assert_prompt("an EndpointSlice changes", delays.collect());
}

#[test]
fn names_follow_a_service_within_10_ms_beside_10_000_others() {
    let (bed, client) = bed_with(10_000);
    let service = bed.service("moving", 7);
    let address = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    let (mut created, mut deleted) = (Vec::new(), Vec::new());
    for _ in 0..CHANGES {
        let put = || bed.server().put(service.clone());
        created.push(follow(&client, "moving", Some(address), put));
        deleted.push(follow(&client, "moving", None, || bed.server().delete(&service)));
    }
    assert_prompt("a Service is created", created);
    assert_prompt("a Service is deleted", deleted);
}
