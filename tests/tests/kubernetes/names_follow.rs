//! Tests how soon DNS names follow objects of an API server.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{dns, patience, stopwatch::Stopwatch};
use serde_json::{Value, json};

use crate::bed::{Bed, DNS, LIMIT, headless};

/// Number of changes that each test measures.
const CHANGES: u32 = 50;
/// Limit on the median of [`Delay::own`], which excludes the time in which tasks waited for resources. The limit on the
/// shortest [`Delay::wall`], which includes that time, is five times as long.
const BOUND: Duration = Duration::from_millis(10);
/// How long a single change may take on the busiest machine. Only an agent that misses the change takes longer.
const LOST: Duration = Duration::from_secs(30);
/// Pause between two queries, so that the client leaves time to the agent on a machine with one CPU.
const PAUSE: Duration = Duration::from_micros(200);

/// The delay of one change: from the moment before the change in the API server until the answer is new.
struct Delay {
    wall: Duration,
    /// The delay without the time in which tasks waited for a CPU, I/O or memory.
    own: Duration,
}

/// A client of the DNS server at 127.0.0.1 of a namespace.
struct Client(UdpSocket);

impl Client {
    fn new(bed: &Bed) -> Self {
        let open = || {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.connect("127.0.0.1:53")?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            Ok(socket)
        };
        Self(bed.netns.run(open).unwrap())
    }

    /// Asks for the A records of `NAME.default.svc.cluster.local`. Returns the address in the answer; `None` without an
    /// answer or with an empty one.
    fn ask(&self, name: &str) -> Option<Ipv4Addr> {
        let query = dns::query(1, &format!("{name}.default.svc.cluster.local"));
        let mut buffer = [0; 512];
        let length = self.0.send(&query).and_then(|_| self.0.recv(&mut buffer));
        let length = length.inspect_err(|error| assert!(is_silence(error), "{error}")).ok()?;
        dns::address(&buffer[..length])
    }

    /// Makes a change, and asks for the name until the answer is `wanted`.
    fn follow(&self, name: &str, wanted: Option<Ipv4Addr>, change: impl FnOnce()) -> Delay {
        let (start, stopwatch) = (Instant::now(), Stopwatch::start());
        change();
        while self.ask(name) != wanted {
            assert!(start.elapsed() < LOST, "{name} is not {wanted:?} after {LOST:?}");
            thread::sleep(PAUSE);
        }
        Delay { wall: stopwatch.wall(), own: stopwatch.elapsed() }
    }
}

/// Whether the error means that there is no answer, or no server yet.
fn is_silence(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, TimedOut, WouldBlock};
    matches!(error.kind(), ConnectionRefused | TimedOut | WouldBlock)
}

/// Prints the distribution of the delays, and asserts the limits on the median and on the shortest one, see [`BOUND`].
fn assert_prompt(what: &str, delays: &[Delay]) {
    let sorted = |delay: fn(&Delay) -> Duration| {
        let mut delays: Vec<Duration> = delays.iter().map(delay).collect();
        delays.sort();
        delays
    };
    let (wall, own) = (sorted(|delay| delay.wall), sorted(|delay| delay.own));
    let shown = |sorted: &[Duration]| {
        let at = |percent: usize| sorted[(sorted.len() - 1) * percent / 100];
        format!("{:?} min, {:?} median, {:?} p90, {:?} max", at(0), at(50), at(90), at(100))
    };
    eprintln!("{what}, {} times: {}; without waits for a CPU: {}", wall.len(), shown(&wall), shown(&own));
    let (fastest, median) = (wall[0], own[own.len() / 2]);
    assert!(median < BOUND * patience(), "{what}: the median is {median:?}");
    // A fixed delay, such as that of a timer, affects even the fastest change. `fastest` may include waits for a CPU.
    assert!(fastest < 5 * BOUND * patience(), "{what}: the fastest took {fastest:?}");
}

/// A node whose agent answers queries and knows the Service `a`, the headless Service `peers`, and `services` further
/// headless ones.
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
    let client = Client::new(&bed);
    bed.wait_until("the agent answers", LIMIT, |_| client.ask("a").is_some());
    (bed, client)
}

/// The EndpointSlice of the Service `peers` with one endpoint.
fn peers(bed: &Bed, address: Ipv4Addr) -> Value {
    let mut slice =
        bed.slice_of("peers", "peers", &[json!({"addresses": [address], "conditions": {"ready": true}})]);
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
    slice
}

#[test]
fn names_follow_an_endpoint_slice_within_10_ms() {
    let (bed, client) = bed_with(0);
    let delays = (0..CHANGES).map(|number| {
        let address = Ipv4Addr::from(0x0af4_0101 + number);
        let slice = peers(&bed, address);
        client.follow("peers", Some(address), || bed.server().put(slice))
    });
    assert_prompt("an EndpointSlice changes", &delays.collect::<Vec<_>>());
}

#[test]
fn names_follow_a_service_within_10_ms_beside_10_000_others() {
    let (bed, client) = bed_with(10_000);
    let service = bed.service("moving", 7);
    let address = service["spec"]["clusterIP"].as_str().unwrap().parse().unwrap();
    let (mut created, mut deleted) = (Vec::new(), Vec::new());
    for _ in 0..CHANGES {
        let put = || bed.server().put(service.clone());
        created.push(client.follow("moving", Some(address), put));
        deleted.push(client.follow("moving", None, || bed.server().delete(&service)));
    }
    assert_prompt("a Service is created", &created);
    assert_prompt("a Service is deleted", &deleted);
}
