//! Node-local DNS: whether the agent or an endpoint of the DNS Service answers a query to its cluster IP.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use lb_tests::{StopOnDrop, dns, netns::Netns, stopwatch::Stopwatch, wait_for};
use nix::sys::signal::Signal;

use super::stub::Stub;
use crate::bed::{Bed, vips};

/// The agent's answer for `web`.
const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// The answer of the DNS Service's endpoint for every name.
const OF_ENDPOINT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
pub(super) const WEB: &str = "web.default.svc.cluster.local";
/// How long a client waits for an answer, without the time in which tasks waited for a CPU.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest time that a client waits for an answer.
const LONGEST: Duration = Duration::from_secs(10);
/// Interval at which a client checks how long it has waited.
const POLL: Duration = Duration::from_millis(50);

/// A cluster with a DNS Service, whose endpoint is pod2, and an agent that answers queries in place of the endpoint.
pub(super) struct NodeDns {
    pub(super) bed: Bed,
    _endpoint: Stub,
}

const ARGUMENTS: [&str; 2] = ["--dns-intercept", "kube-system/kube-dns"];

impl NodeDns {
    pub(super) fn new() -> Self {
        let mut bed = Bed::with_web(&["pod2"]);
        bed.agent = None;
        let pod = bed.cluster.pod("pod2").unwrap();
        let endpoint = Stub::start(&pod.netns, OF_ENDPOINT).unwrap();
        let [v4, v6] = vips(53);
        let slice = |family: &str, like: IpAddr| {
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: kube-dns-{}, namespace: \
                 kube-system, labels: {{kubernetes.io/service-name: kube-dns}}}}\naddressType: {family}\nports: \
                 [{{name: dns, port: {port}, protocol: UDP}}, {{name: dns-tcp, port: {port}}}]\nendpoints:\n- \
                 {{addresses: [\"{}\"], conditions: {{ready: true}}}}\n",
                family.to_lowercase(),
                pod.address(like),
                port = Stub::PORT,
            )
        };
        let manifest = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: kube-dns, namespace: kube-system}}\nspec: {{clusterIP: \
             {v4}, clusterIPs: [{v4}, \"{v6}\"], ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv4, IPv6], ports: \
             [{{name: dns, port: 53, protocol: UDP, targetPort: {port}}}, {{name: dns-tcp, port: 53, targetPort: \
             {port}}}]}}\n{}{}",
            slice("IPv4", v4),
            slice("IPv6", v6),
            port = Stub::PORT,
        );
        bed.cluster.manifests.write("kube-dns", &manifest).unwrap();
        let mut dns = Self { bed, _endpoint: endpoint };
        dns.start_agent();
        dns
    }

    fn start_agent(&mut self) {
        self.bed.start_agent_with(&ARGUMENTS);
        for vip in vips(53) {
            self.wait_until_answered_by(vip, LOCAL);
        }
    }

    /// Waits until a pod that asks for `web` gets this answer.
    fn wait_until_answered_by(&self, vip: IpAddr, expected: Ipv4Addr) {
        let is_answered = || (self.ask("pod1", vip, WEB).ok() == Some(expected)).then_some(());
        wait_for(Duration::from_secs(10), is_answered).unwrap_or_else(|| {
            panic!("{vip} answers {:?}; {}", self.ask("pod1", vip, WEB), self.bed.status()["agent"]["dns"])
        });
    }

    fn ask(&self, from: &str, vip: IpAddr, name: &str) -> io::Result<Ipv4Addr> {
        self.bed.netns(from).run(|| Client::new(vip)?.ask(name))
    }

    fn ask_over_tcp(&self, from: &str, vip: IpAddr, name: &str) -> io::Result<Ipv4Addr> {
        self.bed.netns(from).run(|| ask_over_tcp(&mut connect(vip)?, name))
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.bed.agent.as_ref().unwrap().signal(signal).unwrap();
    }

    /// Number of queries that the programs have redirected to the agent.
    pub(super) fn led(&self) -> u64 {
        self.bed.metric("lb_packets_total{outcome=\"dns_query\"}")
    }
}

/// A resolver that uses one connected socket for all its questions.
struct Client {
    socket: UdpSocket,
    id: u16,
}

impl Client {
    fn new(vip: IpAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((if vip.is_ipv4() { "0.0.0.0" } else { "::" }, 0))?;
        socket.connect((vip, 53))?;
        socket.set_read_timeout(Some(POLL))?;
        Ok(Self { socket, id: 0 })
    }

    fn ask(&mut self, name: &str) -> io::Result<Ipv4Addr> {
        self.id += 1;
        let stopwatch = Stopwatch::start();
        self.socket.send(&dns::query(self.id, name))?;
        let mut buffer = [0; 512];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(length) if buffer[..2] == self.id.to_be_bytes() => return answer(&buffer[..length]),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {
                    if stopwatch.elapsed() >= PATIENCE || stopwatch.wall() >= LONGEST {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind())
}

fn connect(vip: IpAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(vip, 53), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn ask_over_tcp(stream: &mut TcpStream, name: &str) -> io::Result<Ipv4Addr> {
    let query = dns::query(7, name);
    let length = u16::try_from(query.len()).map_err(io::Error::other)?.to_be_bytes();
    stream.write_all(&[&length[..], &query].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut message)?;
    answer(&message)
}

/// Returns the address in an answer, or an error with the whole message if the answer has no address.
fn answer(message: &[u8]) -> io::Result<Ipv4Addr> {
    dns::address(message).ok_or_else(|| io::Error::other(format!("{message:?}")))
}

#[test]
fn pods_are_answered_by_the_agent_and_others_by_the_endpoints() {
    let dns = NodeDns::new();
    for vip in vips(53) {
        assert_eq!(dns.ask_over_tcp("pod1", vip, WEB).unwrap(), LOCAL, "TCP to {vip}");
        assert_eq!(dns.ask("pod1", vip, "www.example.com").unwrap(), OF_ENDPOINT, "a name of others");
        assert_eq!(dns.ask("client", vip, WEB).unwrap(), OF_ENDPOINT, "a client of other machines");
        assert_eq!(dns.ask_over_tcp("client", vip, WEB).unwrap(), OF_ENDPOINT);
        assert_eq!(dns.ask("pod2", vip, WEB).unwrap(), LOCAL, "the endpoint itself");
    }
    let report = &dns.bed.status()["agent"]["dns"]["intercept"];
    assert_eq!(report["service"], "kube-system/kube-dns", "{report}");
    assert_eq!(report["servers"].as_array().unwrap().len(), 2, "{report}");
    assert_eq!(report["problem"], serde_json::Value::Null, "{report}");
}

/// Results of the queries of a client that sends the next query 1 ms after each answer.
#[derive(Debug, Default)]
struct Tally {
    local: u32,
    of_endpoint: u32,
    /// Queries without an answer.
    lost: u32,
    /// Errors of the socket, such as ECONNREFUSED after an ICMP error.
    errors: Vec<io::Error>,
    /// The longest time without an answer or an error, without the time in which tasks waited for a CPU.
    gap: Duration,
}

/// A client that sends queries in the background.
struct Asking<'a>(&'a Mutex<Tally>);

/// Number of answers that a test waits for.
const SOME: u32 = 20;

impl Asking<'_> {
    /// Waits until the agent has given more than [`SOME`] answers.
    fn wait_for_agent(&self) {
        self.wait_until(|tally| tally.local > SOME);
    }

    /// Waits until the endpoint has given more than [`SOME`] answers.
    fn wait_for_endpoint(&self) {
        self.wait_until(|tally| tally.of_endpoint > SOME);
    }

    #[track_caller]
    fn wait_until(&self, is_enough: impl Fn(&Tally) -> bool) {
        let answered = || is_enough(&lock(self.0)).then_some(());
        assert!(wait_for(Duration::from_secs(10), answered).is_some(), "{:?}", lock(self.0));
    }
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `event` while a client in the namespace sends queries, all from one socket or each from a new one; returns their
/// results.
fn asked_during(netns: &Netns, vip: IpAddr, one_socket: bool, event: impl FnOnce(&Asking<'_>)) -> Tally {
    let (stop, tally) = (AtomicBool::new(false), Mutex::default());
    thread::scope(|scope| {
        let end = StopOnDrop(&stop);
        let client = scope.spawn(|| netns.run(|| ask_until(vip, &stop, one_socket, &tally)));
        event(&Asking(&tally));
        drop(end);
        client.join().unwrap().unwrap();
    });
    tally.into_inner().unwrap()
}

impl NodeDns {
    /// Runs `event` while a pod sends queries, all from one socket; returns their results.
    fn asked_during(&self, vip: IpAddr, event: impl FnOnce(&Asking<'_>)) -> Tally {
        asked_during(self.bed.netns("pod1"), vip, true, event)
    }
}

/// Sends queries until `stop` is set: all from one socket, or each from a new one.
fn ask_until(vip: IpAddr, stop: &AtomicBool, one_socket: bool, tally: &Mutex<Tally>) -> io::Result<()> {
    let mut client = Client::new(vip)?;
    let mut last = Stopwatch::start();
    while !stop.load(Ordering::Relaxed) {
        if !one_socket {
            client = Client::new(vip)?;
        }
        let answer = client.ask(WEB);
        let mut tally = lock(tally);
        match answer {
            Ok(LOCAL) => tally.local += 1,
            Ok(_) => tally.of_endpoint += 1,
            Err(error) if is_timeout(&error) => {
                tally.lost += 1;
                continue;
            }
            Err(error) => tally.errors.push(error),
        }
        tally.gap = tally.gap.max(last.elapsed());
        drop(tally);
        last = Stopwatch::start();
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn endpoints_answer_at_once_after_the_agent_was_killed() {
    let mut dns = NodeDns::new();
    for vip in vips(53) {
        let agent = dns.bed.agent.take().unwrap();
        let tally = dns.asked_during(vip, |asking| {
            asking.wait_for_agent();
            agent.kill().unwrap();
            asking.wait_for_endpoint();
        });
        assert!(tally.errors.is_empty(), "no ICMP error reaches the client: {tally:?}");
        assert!(tally.lost <= 1, "at most the query that the agent had read: {tally:?}");
        assert_eq!(dns.ask_over_tcp("pod1", vip, WEB).unwrap(), OF_ENDPOINT);
        dns.start_agent();
    }
}

#[test]
fn no_query_is_lost_when_the_agent_stops_and_starts() {
    let mut dns = NodeDns::new();
    let [vip, _] = vips(53);
    let agent = dns.bed.agent.take().unwrap();
    let tally = dns.asked_during(vip, |asking| {
        asking.wait_for_agent();
        agent.terminate().unwrap();
        asking.wait_for_endpoint();
    });
    assert!(tally.errors.is_empty() && tally.lost == 0, "{tally:?}");
    let netns = dns.bed.netns("pod1").clone();
    let tally = asked_during(&netns, vip, false, |asking| {
        asking.wait_for_endpoint();
        dns.start_agent();
        asking.wait_for_agent();
    });
    assert!(tally.errors.is_empty() && tally.lost == 0, "{tally:?}");
}

#[test]
fn endpoints_answer_while_the_agent_hangs() {
    let dns = NodeDns::new();
    let [vip, _] = vips(53);
    let mut connection = dns.bed.netns("pod1").run(|| connect(vip)).unwrap();
    assert_eq!(ask_over_tcp(&mut connection, WEB).unwrap(), LOCAL);
    let tally = dns.asked_during(vip, |asking| {
        asking.wait_for_agent();
        dns.signal(Signal::SIGSTOP);
        asking.wait_for_endpoint();
    });
    assert!(tally.errors.is_empty(), "{tally:?}");
    assert!(tally.lost <= 1, "the next query goes to the endpoint: {tally:?}");
    assert!(tally.gap < PATIENCE + Duration::from_millis(500), "{tally:?}");
    let error = ask_over_tcp(&mut connection, WEB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the connection to the agent ends: {error}");
    assert_eq!(dns.ask_over_tcp("pod1", vip, WEB).unwrap(), OF_ENDPOINT);
    dns.signal(Signal::SIGCONT);
    dns.wait_until_answered_by(vip, LOCAL);
}

#[test]
fn firewall_that_drops_queries_is_found_and_reported() {
    let dns = NodeDns::new();
    let [vip, _] = vips(53);
    let rule = "table inet fence {\n chain in {\n type filter hook input priority 0;\n iifname != \"lo\" meta l4proto \
                { tcp, udp } th dport 9053 drop\n }\n}\n";
    dns.bed.cluster.node1.feed("nft", &["-f", "-"], rule).unwrap();
    let before = dns.led();
    dns.wait_until_answered_by(vip, OF_ENDPOINT);
    assert!(dns.led() >= before + 4, "the programs led queries to the agent first");
    let problem = dns.bed.status()["agent"]["dns"]["intercept"]["problem"].to_string();
    assert!(problem.contains("firewall") && problem.contains("9053"), "{problem}");
}

#[test]
fn server_of_one_family_answers_while_that_of_the_other_does_not() {
    let dns = NodeDns::new();
    let [v4, v6] = vips(53);
    // The agent's own queries to its IPv6 server get no answer.
    let rule = "table inet mute {\n chain in {\n type filter hook input priority 0;\n iifname \"lo\" meta nfproto ipv6 \
                udp dport 9053 drop\n }\n}\n";
    dns.bed.cluster.node1.feed("nft", &["-f", "-"], rule).unwrap();
    dns.wait_until_answered_by(v6, OF_ENDPOINT);
    for number in 0..200 {
        assert_eq!(dns.ask("pod1", v4, WEB).unwrap(), LOCAL, "query {number}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn interception_follows_the_dns_service() {
    let dns = NodeDns::new();
    let [vip, _] = vips(53);
    dns.bed.cluster.manifests.remove("kube-dns").unwrap();
    let fails = || dns.ask("pod1", vip, WEB).is_err().then_some(());
    wait_for(Duration::from_secs(5), fails).expect("no Service, no answer");
    let problem = dns.bed.status()["agent"]["dns"]["intercept"]["problem"].to_string();
    assert!(problem.contains("kube-system/kube-dns has no cluster IP"), "{problem}");
}
