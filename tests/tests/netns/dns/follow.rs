//! Tests how soon DNS names follow a change of their Service.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::Duration,
};

use lb_tests::{dns, stopwatch::Stopwatch};

use super::Names;

/// Number of changes of the Service that are measured.
const CHANGES: u32 = 200;
/// Limit that 99 of 100 changes must meet, without waits for a CPU. (Without load a change takes some milliseconds.)
const BOUND: Duration = Duration::from_millis(100);

/// Sends the query; returns the address in the answer.
fn ask(socket: &UdpSocket, query: &[u8]) -> io::Result<Option<Ipv4Addr>> {
    socket.send(query)?;
    let mut buffer = [0; 512];
    let length = socket.recv(&mut buffer)?;
    Ok(dns::address(&buffer[..length]))
}

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
    let measure = || {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.connect("127.0.0.1:53")?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        let query = dns::query(1, "moving.default.svc.cluster.local");
        let mut delays = Vec::new();
        for number in 0..CHANGES {
            let address = Ipv4Addr::from(0x0af4_0101 + number);
            manifests.write("moving", &moving(address))?;
            let stopwatch = Stopwatch::start();
            while ask(&socket, &query)? != Some(address) {
                if stopwatch.wall() > Duration::from_secs(5) {
                    return Err(io::Error::other(format!("change {number} does not arrive")));
                }
                thread::sleep(Duration::from_micros(200));
            }
            delays.push(stopwatch.elapsed());
        }
        Ok(delays)
    };
    let mut delays = names.bed.cluster.node1.run(measure).unwrap();
    delays.sort();
    let at = |percent: usize| delays[delays.len() * percent / 100];
    eprintln!("names follow a change after {:?} (median), {:?} (p99)", at(50), at(99));
    assert!(at(99) < BOUND, "{:?}", at(99));
}
