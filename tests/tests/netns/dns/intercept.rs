//! Node-local DNS: whether the agent or an endpoint of the DNS Service answers a query to the Service's cluster IP.

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

use lb_tests::{StopOnDrop, dns, netns::Netns, one_of_three, stopwatch::Stopwatch, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::stub::Stub;
use crate::bed::{Bed, vips};

/// The agent's answer for `web`.
const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// The answer of the DNS Service's endpoint for every name.
const OF_ENDPOINT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
pub(super) const WEB: &str = "web.default.svc.cluster.local";
/// How long a client waits for an answer, without the time in which tasks waited for a CPU.
const PATIENCE: Duration = Duration::from_secs(4);
/// The patience of a client that measures for how long queries are lost: after a lost query, it soon sends the next
/// one.
const BRIEF: Duration = Duration::from_secs(1);
/// The longest time that a client waits for an answer.
const LONGEST: Duration = Duration::from_secs(20);
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
    #[track_caller]
    fn wait_until_answered_by(&self, vip: IpAddr, expected: Ipv4Addr) {
        self.wait_for_answer(&format!("UDP to {vip}"), expected, || self.ask("pod1", vip, WEB));
    }

    /// Waits until `ask` gets this answer. An agent that waits for a CPU may leave a few queries to the endpoint.
    #[track_caller]
    fn wait_for_answer(&self, what: &str, expected: Ipv4Addr, ask: impl Fn() -> io::Result<Ipv4Addr>) {
        let is_answered = || (ask().ok() == Some(expected)).then_some(());
        let answered = wait_for(Duration::from_secs(10), is_answered);
        let status = || self.bed.status()["agent"]["dns"].clone();
        assert!(answered.is_some(), "{what}: {:?}, not {expected}; {}", ask(), status());
    }

    fn ask(&self, from: &str, vip: IpAddr, name: &str) -> io::Result<Ipv4Addr> {
        self.ask_for(PATIENCE, from, vip, name)
    }

    /// Like [`Self::ask`], with this patience.
    fn ask_for(&self, patience: Duration, from: &str, vip: IpAddr, name: &str) -> io::Result<Ipv4Addr> {
        self.bed.netns(from).run(|| Client::new(vip, patience)?.ask(name))
    }

    fn ask_over_tcp(&self, from: &str, vip: IpAddr, name: &str) -> io::Result<Ipv4Addr> {
        self.bed.netns(from).run(|| ask_over_tcp(&mut connect(vip)?, name))
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.bed.agent.as_ref().unwrap().signal(signal).unwrap();
    }

    /// The state of the interception, as `status` reports it.
    fn report(&self) -> Value {
        self.bed.status()["agent"]["dns"]["intercept"].clone()
    }

    /// Waits until `status` shows a problem with all these words; calls `again` before each look.
    #[track_caller]
    fn wait_for_problem(&self, words: &[&str], again: impl Fn()) {
        let problem = || self.report()["problem"].to_string();
        let is_shown = || {
            again();
            let problem = problem();
            words.iter().all(|word| problem.contains(word)).then_some(())
        };
        assert!(wait_for(Duration::from_secs(10), is_shown).is_some(), "{words:?} is not in {}", problem());
    }

    /// Number of queries that the programs have redirected to the agent.
    pub(super) fn led(&self) -> u64 {
        self.bed.metric("lb_packets_total{outcome=\"dns_query\"}")
    }
}

/// A resolver that uses one connected socket for all its queries.
struct Client {
    socket: UdpSocket,
    patience: Duration,
    id: u16,
}

impl Client {
    fn new(vip: IpAddr, patience: Duration) -> io::Result<Self> {
        let socket = UdpSocket::bind((if vip.is_ipv4() { "0.0.0.0" } else { "::" }, 0))?;
        socket.connect((vip, 53))?;
        socket.set_read_timeout(Some(POLL))?;
        Ok(Self { socket, patience, id: 0 })
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
                    if stopwatch.elapsed() >= self.patience || stopwatch.wall() >= LONGEST {
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
    let stream = TcpStream::connect_timeout(&SocketAddr::new(vip, 53), LONGEST)?;
    stream.set_read_timeout(Some(LONGEST))?;
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
        dns.wait_for_answer(&format!("TCP to {vip}"), LOCAL, || dns.ask_over_tcp("pod1", vip, WEB));
        assert_eq!(dns.ask("pod1", vip, "www.example.com").unwrap(), OF_ENDPOINT, "a name of others");
        assert_eq!(dns.ask("client", vip, WEB).unwrap(), OF_ENDPOINT, "a client of other machines");
        assert_eq!(dns.ask_over_tcp("client", vip, WEB).unwrap(), OF_ENDPOINT);
        dns.wait_for_answer("the endpoint itself", LOCAL, || dns.ask("pod2", vip, WEB));
    }
    // An agent that waits for a CPU may renew the lease of a server late.
    let has_both = |report: &Value| report["servers"].as_array().is_some_and(|servers| servers.len() == 2);
    let report = wait_for(Duration::from_secs(10), || Some(dns.report()).filter(has_both));
    let report = report.unwrap_or_else(|| panic!("not two servers: {}", dns.report()));
    assert_eq!(report["service"], "kube-system/kube-dns", "{report}");
    assert_eq!(report["problem"], Value::Null, "{report}");
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

/// How a client sends queries one after the other.
#[derive(Clone, Copy)]
struct Manner {
    /// Whether the client sends all queries from one socket, or each query from a new socket.
    one_socket: bool,
    patience: Duration,
}

/// Runs `event` while a client in the namespace sends queries; returns their results.
fn asked_during(netns: &Netns, vip: IpAddr, manner: Manner, event: impl FnOnce(&Asking<'_>)) -> Tally {
    let (stop, tally) = (AtomicBool::new(false), Mutex::default());
    thread::scope(|scope| {
        let end = StopOnDrop(&stop);
        let client = scope.spawn(|| netns.run(|| ask_until(vip, &stop, manner, &tally)));
        event(&Asking(&tally));
        drop(end);
        client.join().unwrap().unwrap();
    });
    tally.into_inner().unwrap()
}

impl NodeDns {
    /// Runs `event` while a pod sends queries, all from one socket; returns their results.
    fn asked_during(&self, vip: IpAddr, patience: Duration, event: impl FnOnce(&Asking<'_>)) -> Tally {
        asked_during(self.bed.netns("pod1"), vip, Manner { one_socket: true, patience }, event)
    }
}

/// Sends queries until `stop` is set.
fn ask_until(vip: IpAddr, stop: &AtomicBool, manner: Manner, tally: &Mutex<Tally>) -> io::Result<()> {
    let mut client = Client::new(vip, manner.patience)?;
    let mut last = Stopwatch::start();
    while !stop.load(Ordering::Relaxed) {
        if !manner.one_socket {
            client = Client::new(vip, manner.patience)?;
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
        let attempt = || {
            let agent = dns.bed.agent.take().unwrap();
            let tally = dns.asked_during(vip, BRIEF, |asking| {
                asking.wait_for_agent();
                agent.kill().unwrap();
                asking.wait_for_endpoint();
            });
            assert!(tally.errors.is_empty(), "no ICMP error reaches the client: {tally:?}");
            assert_eq!(dns.ask_over_tcp("pod1", vip, WEB).unwrap(), OF_ENDPOINT);
            dns.start_agent();
            tally
        };
        // At most one query is lost: one that the agent had already read.
        one_of_three(attempt, |tally| tally.lost <= 1);
    }
}

#[test]
fn no_query_is_lost_when_the_agent_stops_and_starts() {
    let mut dns = NodeDns::new();
    let [vip, _] = vips(53);
    let agent = dns.bed.agent.take().unwrap();
    let tally = dns.asked_during(vip, PATIENCE, |asking| {
        asking.wait_for_agent();
        agent.terminate().unwrap();
        asking.wait_for_endpoint();
    });
    assert!(tally.errors.is_empty() && tally.lost == 0, "{tally:?}");
    let netns = dns.bed.netns("pod1").clone();
    let manner = Manner { one_socket: false, patience: PATIENCE };
    let tally = asked_during(&netns, vip, manner, |asking| {
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
    let connect_to_agent = || {
        let mut connection = dns.bed.netns("pod1").run(|| connect(vip)).ok()?;
        (ask_over_tcp(&mut connection, WEB).ok()? == LOCAL).then_some(connection)
    };
    let attempt = || {
        let mut connection = wait_for(Duration::from_secs(10), connect_to_agent).expect("the agent answers");
        let tally = dns.asked_during(vip, BRIEF, |asking| {
            asking.wait_for_agent();
            dns.signal(Signal::SIGSTOP);
            asking.wait_for_endpoint();
        });
        assert!(tally.errors.is_empty(), "{tally:?}");
        let error = ask_over_tcp(&mut connection, WEB).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the connection to the agent ends: {error}");
        assert_eq!(dns.ask_over_tcp("pod1", vip, WEB).unwrap(), OF_ENDPOINT);
        dns.signal(Signal::SIGCONT);
        dns.wait_until_answered_by(vip, LOCAL);
        tally
    };
    // One query is lost, and the next one goes to the endpoint.
    let longest = BRIEF + Duration::from_millis(500);
    one_of_three(attempt, |tally| tally.lost <= 1 && tally.gap < longest);
}

#[test]
fn firewall_that_drops_queries_is_found_and_reported() {
    let dns = NodeDns::new();
    let [vip, _] = vips(53);
    let rule = "table inet fence {\n chain in {\n type filter hook input priority 0;\n iifname != \"lo\" meta l4proto \
                { tcp, udp } th dport 9053 drop\n }\n}\n";
    dns.bed.cluster.node1.feed("nft", &["-f", "-"], rule).unwrap();
    let before = dns.led();
    // The agent finds the firewall by queries that do not arrive, so a client must send some.
    dns.wait_for_problem(&["firewall", "9053"], || drop(dns.ask_for(BRIEF, "pod1", vip, WEB)));
    dns.wait_until_answered_by(vip, OF_ENDPOINT);
    assert!(dns.led() >= before + 4, "the programs led queries to the agent first");
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
    // A stall of the agent leaves a few queries to the endpoint. If one server delayed the other, queries would
    // repeatedly go to the endpoint.
    let agent_answers_all = || {
        let mut answers = (0..200).map(|_| {
            thread::sleep(Duration::from_millis(10));
            dns.ask("pod1", v4, WEB).ok()
        });
        answers.all(|answer| answer == Some(LOCAL)).then_some(())
    };
    wait_for(Duration::from_secs(30), agent_answers_all).expect("200 answers of the agent in a row");
}

#[test]
fn interception_follows_the_dns_service() {
    let dns = NodeDns::new();
    let [vip, _] = vips(53);
    dns.bed.cluster.manifests.remove("kube-dns").unwrap();
    let fails = || dns.ask("pod1", vip, WEB).is_err().then_some(());
    wait_for(Duration::from_secs(5), fails).expect("no Service, no answer");
    dns.wait_for_problem(&["kube-system/kube-dns has no cluster IP"], || {});
}
