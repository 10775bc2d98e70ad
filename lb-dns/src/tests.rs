//! Tests of messages without sockets, and of a server with sockets and upstream servers.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query as Question, ResponseCode},
    rr::{DNSClass, Name, RData, Record, RecordType, rdata::A},
    serialize::binary::BinEncodable as _,
};
use lb_core::{
    dns::{NameChange, NamedEndpoint, NamedPort, NamedService, NamedSlice, Target, Zone},
    model::{ObjectName, Protocol},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

use crate::{
    Access, Forwarder, Names, Server, Stats,
    local::{self, Local},
    message,
    query::{self, Refusal},
};

fn service(name: &str, target: Target) -> NameChange {
    let ports = vec![NamedPort { name: "http".into(), protocol: Protocol::Tcp, port: 80 }];
    let service = NamedService { target, ports, publishes_not_ready: false };
    NameChange::Service(ObjectName::new("n", name), Some(service))
}

/// A headless Service with `count` endpoints.
fn headless(name: &str, count: u8) -> [NameChange; 2] {
    let endpoint = |last| NamedEndpoint { address: [10, 244, 0, last].into(), hostname: None, ready: true };
    let ports = vec![NamedPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }];
    let owner = ObjectName::new("n", name);
    let slice = NamedSlice { service: owner.clone(), ports, endpoints: (0..count).map(endpoint).collect() };
    [service(name, Target::Endpoints), NameChange::Slice(owner, Some(slice))]
}

fn names() -> Arc<Names> {
    let names = Names::new(Zone::new("cluster.local", 5).unwrap());
    let web: IpAddr = [10, 96, 0, 1].into();
    let alias = |name: &str, target: &str| service(name, Target::Name(target.into()));
    let changes = [
        service("web", Target::ClusterIps(vec![web])),
        alias("inside", "web.n.svc.cluster.local"),
        alias("outside", "www.Example.com"),
        alias("broken", "nothing.n.svc.cluster.local"),
        alias("loop", "pool.n.svc.cluster.local"),
        alias("pool", "loop.n.svc.cluster.local"),
        alias("bad", &"a".repeat(64)),
    ];
    names.apply(changes.into_iter().chain(headless("two", 2)).chain(headless("many", 200)));
    names.set_synchronised();
    Arc::new(names)
}

pub(crate) fn question(name: &str, record_type: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Question::query(Name::from_ascii(name).unwrap(), record_type));
    message
}

fn with_size(mut message: Message, size: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(size).set_dnssec_ok(true);
    message.set_edns(edns);
    message
}

/// The answer over UDP, as bytes.
fn bytes_of(names: &Names, message: &Message) -> Vec<u8> {
    let query = query::read(&message.to_vec().unwrap()).unwrap();
    let limit = query.udp_limit();
    match local::answer(names, &query, limit) {
        Local::Done(reply) => message::encode(&reply, limit).unwrap(),
        Local::Outside(_, name) => panic!("{name} is not ours"),
    }
}

fn answer(message: &Message) -> Message {
    Message::from_vec(&bytes_of(&names(), message)).unwrap()
}

fn refusal(bytes: &[u8]) -> Option<ResponseCode> {
    match query::read(bytes).unwrap_err() {
        Refusal::Drop => None,
        Refusal::Reply(reply) => {
            assert_eq!(reply.metadata.id, 4711);
            Some(Message::from_vec(&reply.to_vec().unwrap()).unwrap().metadata.response_code)
        }
    }
}

#[test]
fn malformed_messages_are_dropped_or_refused() {
    let plain = question("web.n.svc.cluster.local.", RecordType::A);
    let good = plain.to_vec().unwrap();
    assert_eq!(refusal(&good[..11]), None, "no whole header");
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    assert_eq!(refusal(&changed(2, 0x81)), None, "an answer");
    assert_eq!(refusal(&changed(2, 0x29)), Some(ResponseCode::NotImp), "an update");
    assert_eq!(refusal(&changed(5, 0)), Some(ResponseCode::FormErr), "no question");
    assert_eq!(refusal(&changed(5, 2)), Some(ResponseCode::FormErr), "two questions");
    assert_eq!(refusal(&good[..good.len() - 3]), Some(ResponseCode::FormErr), "half a question");
    assert_eq!(refusal(&changed(12, 0xff)), Some(ResponseCode::FormErr), "a bad pointer");
    let mut chaos = plain.clone();
    chaos.queries[0].query_class = DNSClass::CH;
    assert_eq!(refusal(&chaos.to_vec().unwrap()), Some(ResponseCode::Refused));
    for transfer in [RecordType::AXFR, RecordType::IXFR] {
        let transfer = question("cluster.local.", transfer).to_vec().unwrap();
        assert_eq!(refusal(&transfer), Some(ResponseCode::Refused));
    }
    let mut newer = with_size(plain.clone(), 1232);
    newer.edns.as_mut().unwrap().set_version(1);
    assert_eq!(refusal(&newer.to_vec().unwrap()).map(u16::from), Some(16), "BADVERS");
    let mut twice = with_size(plain, 1232).to_vec().unwrap();
    let opt = twice[good.len()..].to_vec();
    twice.extend(opt);
    twice[11] = 2;
    assert_eq!(refusal(&twice), Some(ResponseCode::FormErr), "two OPT records");
}

#[test]
fn question_and_owner_keep_the_case_of_the_client() {
    let asked = question("wEb.N.sVc.CLUSTER.local.", RecordType::A);
    let bytes = bytes_of(&names(), &asked);
    assert_eq!(bytes[12..][..29], asked.to_vec().unwrap()[12..], "the question, byte for byte");
    let reply = Message::from_vec(&bytes).unwrap();
    assert_eq!(reply.answers[0].name.to_ascii(), "wEb.N.sVc.CLUSTER.local.");
    assert_eq!(reply.answers[0].data, RData::A(A([10, 96, 0, 1].into())));
    assert!(reply.metadata.authoritative && reply.metadata.recursion_desired);
    assert!(reply.metadata.recursion_available && !reply.metadata.authentic_data);
    assert_eq!((reply.answers[0].ttl, reply.metadata.id), (5, 4711));
    assert_eq!(reply.edns, None);
}

#[test]
fn denials_carry_the_soa_of_the_zone() {
    for (name, code) in [("web.n.svc", ResponseCode::NoError), ("x.n.svc", ResponseCode::NXDomain)] {
        let reply = answer(&question(&format!("{name}.cluster.local."), RecordType::AAAA));
        assert_eq!(reply.metadata.response_code, code);
        assert!(reply.answers.is_empty() && reply.metadata.authoritative);
        let RData::SOA(soa) = &reply.authorities[0].data else { panic!("{reply:?}") };
        assert_eq!(reply.authorities[0].name.to_ascii(), "cluster.local.");
        assert_eq!((soa.minimum, reply.authorities[0].ttl), (5, 5));
        assert!(soa.serial > 1_700_000_000, "a time");
    }
}

#[test]
fn answers_fit_the_client_and_at_most_1232_bytes() {
    let asked = question("many.n.svc.cluster.local.", RecordType::A);
    for (asked, limit) in [
        (asked.clone(), 512),
        (with_size(asked.clone(), 100), 512),
        (with_size(asked.clone(), 700), 700),
        (with_size(asked, 65_535), 1232),
    ] {
        let bytes = bytes_of(&names(), &asked);
        let reply = Message::from_vec(&bytes).unwrap();
        assert!(bytes.len() <= limit && bytes.len() > limit - 40, "{} of {limit}", bytes.len());
        assert!(reply.metadata.truncation);
        assert_eq!(reply.edns.is_some(), asked.edns.is_some(), "OPT in, OPT out");
        let edns = reply.edns.map(|edns| (edns.max_payload(), edns.flags().dnssec_ok));
        assert!(edns.is_none_or(|edns| edns == (1232, true)), "{edns:?}");
    }
}

#[test]
fn leaving_out_additional_records_is_no_truncation() {
    let names = Names::new(Zone::new("cluster.local", 5).unwrap());
    names.apply(headless("some", 8));
    names.set_synchronised();
    let asked = question("_http._tcp.some.n.svc.cluster.local.", RecordType::SRV);
    let reply = Message::from_vec(&bytes_of(&names, &asked)).unwrap();
    assert_eq!((reply.answers.len(), reply.additionals.len()), (8, 0));
    assert!(!reply.metadata.truncation);
    let reply = Message::from_vec(&bytes_of(&names, &with_size(asked, 1232))).unwrap();
    assert_eq!((reply.answers.len(), reply.additionals.len()), (8, 8));
}

/// Names with a headless Service that has an endpoint for each number below `count`, with addresses of both families.
pub(crate) fn crowd(service_name: &str, count: u32) -> Names {
    let names = Names::new(Zone::new("cluster.local", 5).unwrap());
    let owner = ObjectName::new("n", service_name);
    let slice = |name: &str, address: fn(u32) -> IpAddr| {
        let endpoint = |number| NamedEndpoint { address: address(number), hostname: None, ready: true };
        let endpoints = (0..count).map(endpoint).collect();
        let ports = vec![NamedPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }];
        let slice = NamedSlice { service: owner.clone(), ports, endpoints };
        NameChange::Slice(ObjectName::new("n", name), Some(slice))
    };
    let v4 = slice("v4", |number| IpAddr::from((0x0a00_0000 + number).to_be_bytes()));
    let v6 = slice("v6", |number| IpAddr::from(((0xfd00_u128 << 112) + u128::from(number)).to_be_bytes()));
    names.apply([service(service_name, Target::Endpoints), v4, v6]);
    names.set_synchronised();
    names
}

#[test]
fn opt_record_is_in_every_answer_and_tc_exactly_if_an_address_is_missing() {
    for count in (0..100).step_by(3) {
        let names = crowd("crowd", count);
        // An address record takes 16 bytes, so at some of these sizes the OPT record does not fit behind the last one.
        for size in (512..528).chain([1232]) {
            let asked = with_size(question("crowd.n.svc.cluster.local.", RecordType::A), size);
            let bytes = bytes_of(&names, &asked);
            let reply = Message::from_vec(&bytes).unwrap();
            assert!(reply.edns.is_some(), "{count} addresses in {size} bytes");
            let is_cut = reply.answers.len() < count as usize;
            assert_eq!(reply.metadata.truncation, is_cut, "{count} addresses in {size} bytes");
            assert!(bytes.len() <= size.into() && (!is_cut || bytes.len() > usize::from(size) - 16));
        }
    }
}

#[test]
fn tcp_answer_holds_as_many_addresses_as_fit() {
    let long = "x".repeat(60);
    for (name, record_type, length) in
        [("crowd", RecordType::A, 16), (&*long, RecordType::A, 16), ("crowd", RecordType::AAAA, 28)]
    {
        let names = crowd(name, 5000);
        let asked = with_size(question(&format!("{name}.n.svc.cluster.local."), record_type), 1232);
        let query = query::read(&asked.to_vec().unwrap()).unwrap();
        let Local::Done(reply) = local::answer(&names, &query, u16::MAX) else { panic!() };
        let bytes = message::encode(&reply, u16::MAX).unwrap();
        let reply = Message::from_vec(&bytes).unwrap();
        let rest = 12 + asked.queries[0].to_bytes().unwrap().len() + 11;
        assert_eq!(reply.answers.len(), (65_535 - rest) / length);
        assert!(reply.metadata.truncation && reply.edns.is_some());
        assert!(reply.answers.iter().all(|record| record.name == asked.queries[0].name));
        let distinct: BTreeSet<String> = reply.answers.iter().map(|r| r.data.to_string()).collect();
        assert_eq!(distinct.len(), reply.answers.len());
    }
}

#[test]
fn cost_of_an_answer_does_not_grow_with_the_endpoints() {
    let names = crowd("crowd", 50_000);
    let asked = with_size(question("crowd.n.svc.cluster.local.", RecordType::A), 1232);
    let query = query::read(&asked.to_vec().unwrap()).unwrap();
    for record_type in [RecordType::A, RecordType::AAAA, RecordType::SRV] {
        let mut query = query.clone();
        query.question.query_type = record_type;
        let Local::Done(reply) = local::answer(&names, &query, 1232) else { panic!() };
        assert!(reply.answers.len() < 110 && reply.additionals.len() < 110, "{record_type}");
    }
    let names_of = |name: &str| bytes_of(&names, &question(name, RecordType::PTR)).len();
    names_of("1.0.0.10.in-addr.arpa.");
    let start = Instant::now();
    for _ in 0..500 {
        bytes_of(&names, &asked);
        names_of("1.0.0.10.in-addr.arpa.");
        bytes_of(&names, &question("10-0-0-1.crowd.n.svc.cluster.local.", RecordType::A));
    }
    // If each answer read all endpoints, it would take over 10 ms in a debug build, and all of them 15 s.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn each_address_comes_first_in_some_answers() {
    let names = names();
    let first = |_| {
        let asked = question("two.n.svc.cluster.local.", RecordType::A);
        Message::from_vec(&bytes_of(&names, &asked)).unwrap().answers[0].data.clone()
    };
    let firsts: Vec<RData> = (0..64).map(first).collect();
    assert!(firsts.iter().any(|one| *one != firsts[0]), "64 answers in one order");
}

#[test]
fn names_are_neither_found_nor_denied_before_the_first_synchronisation() {
    let names = Names::new(Zone::new("cluster.local", 5).unwrap());
    names.apply(headless("two", 2));
    for name in ["two.n.svc.cluster.local.", "x.n.svc.cluster.local."] {
        let reply = Message::from_vec(&bytes_of(&names, &question(name, RecordType::A))).unwrap();
        assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::ServFail, 0));
    }
}

#[test]
fn external_names_are_followed_within_the_zone() {
    let reply = answer(&question("inside.n.svc.cluster.local.", RecordType::A));
    let types: Vec<RecordType> = reply.answers.iter().map(Record::record_type).collect();
    assert_eq!(types, [RecordType::CNAME, RecordType::A]);
    assert_eq!(reply.answers[1].name.to_ascii(), "web.n.svc.cluster.local.");
    let reply = answer(&question("inside.n.svc.cluster.local.", RecordType::CNAME));
    assert_eq!(reply.answers.len(), 1);
    let reply = answer(&question("broken.n.svc.cluster.local.", RecordType::A));
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NXDomain, 1));
    for name in ["loop", "bad"] {
        let reply = answer(&question(&format!("{name}.n.svc.cluster.local."), RecordType::A));
        assert_eq!(
            (reply.metadata.response_code, reply.answers.len()),
            (ResponseCode::ServFail, 0),
            "{name}"
        );
    }
}

#[test]
fn chain_of_ten_external_names_is_followed_to_its_end_and_no_longer_one() {
    let names = names();
    let alias = |number: u8| {
        let target = match number {
            1 => "web.n.svc.cluster.local".to_owned(),
            number => format!("alias-{}.n.svc.cluster.local", number - 1),
        };
        service(&format!("alias-{number}"), Target::Name(target.into()))
    };
    names.apply((1..=11).map(alias));
    let answer = |number: u8| {
        let asked = question(&format!("alias-{number}.n.svc.cluster.local."), RecordType::A);
        let reply = Message::from_vec(&bytes_of(&names, &with_size(asked, 1232))).unwrap();
        (reply.metadata.response_code, reply.answers.len())
    };
    assert_eq!(answer(10), (ResponseCode::NoError, 11));
    assert_eq!(answer(11), (ResponseCode::ServFail, 0));
}

#[test]
fn apex_of_a_reverse_zone_has_the_soa_record_that_its_denials_carry() {
    let zone = Zone::new("cluster.local", 5).unwrap().with_ranges(vec!["10.96.0.0/16".parse().unwrap()]);
    let names = Names::new(zone);
    names.set_synchronised();
    let ask = |name: &str, kind| Message::from_vec(&bytes_of(&names, &question(name, kind))).unwrap();
    let denial = ask("1.0.96.10.in-addr.arpa.", RecordType::PTR);
    assert_eq!(denial.metadata.response_code, ResponseCode::NXDomain);
    let reply = ask("96.10.In-Addr.arpa.", RecordType::SOA);
    assert_eq!(reply.answers, denial.authorities);
    assert_eq!(reply.answers[0].name.to_ascii(), "96.10.In-Addr.arpa.");
    assert!(reply.metadata.authoritative && reply.authorities.is_empty());
    let reply = ask("96.10.in-addr.arpa.", RecordType::NS);
    assert_eq!(reply.answers[0].data.to_string(), "ns.dns.cluster.local.");
}

/// A server at a free port of the loopback, and its forwarder.
async fn serve() -> (SocketAddr, Arc<Forwarder>) {
    serve_with(
        names(),
        Access { allowed: vec!["127.0.0.0/8".parse().unwrap()], rate: None, hosts: Vec::new() },
    )
    .await
}

async fn serve_with(names: Arc<Names>, access: Access) -> (SocketAddr, Arc<Forwarder>) {
    let stats = Stats::default();
    let forwarder = Arc::new(Forwarder::new(1000, stats.clone()));
    let server = Arc::new(Server::new(names, Arc::clone(&forwarder), access, stats));
    loop {
        let probe = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = probe.local_addr().unwrap();
        drop(probe);
        // Binding fails if another process has meanwhile bound the port, or uses it for TCP: then another port is
        // tried.
        if let Ok(serving) = Arc::clone(&server).listen(address).await {
            tokio::spawn(serving);
            return (address, forwarder);
        }
    }
}

async fn ask_udp(server: SocketAddr, asked: &Message) -> Message {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    socket.send_to(&asked.to_vec().unwrap(), server).await.unwrap();
    let mut buffer = vec![0; 65_535];
    let length = timeout(Duration::from_secs(8), socket.recv(&mut buffer)).await.unwrap().unwrap();
    Message::from_vec(&buffer[..length]).unwrap()
}

pub(crate) fn framed(message: &Message) -> Vec<u8> {
    let bytes = message.to_vec().unwrap();
    [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat()
}

async fn read_framed(stream: &mut TcpStream) -> Message {
    let mut bytes = vec![0; stream.read_u16().await.unwrap().into()];
    stream.read_exact(&mut bytes).await.unwrap();
    Message::from_vec(&bytes).unwrap()
}

/// An upstream server that answers every question with 192.0.2.9 and this TTL. If `truncates`, its answers over UDP
/// have TC set and contain no record.
async fn upstream(ttl: u32, truncates: bool) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let (udp, tcp) = loop {
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            break (udp, tcp);
        }
    };
    let reply = move |bytes: &[u8], truncated: bool| {
        let asked = Message::from_vec(bytes).unwrap();
        let mut reply = Message::response(asked.metadata.id, OpCode::Query);
        reply.add_query(asked.queries[0].clone());
        reply.metadata.truncation = truncated;
        if !truncated {
            let data = RData::A(A([192, 0, 2, 9].into()));
            reply.add_answer(Record::from_rdata(asked.queries[0].name.clone(), ttl, data));
        }
        reply
    };
    let address = udp.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        loop {
            tokio::select! {
                received = udp.recv_from(&mut buffer) => {
                    let (length, client) = received.unwrap();
                    let bytes = reply(&buffer[..length], truncates).to_vec().unwrap();
                    udp.send_to(&bytes, client).await.unwrap();
                }
                accepted = tcp.accept() => {
                    let mut stream = accepted.unwrap().0;
                    let asked = read_framed(&mut stream).await;
                    let bytes = framed(&reply(&asked.to_vec().unwrap(), false));
                    stream.write_all(&bytes).await.unwrap();
                }
            }
        }
    });
    (address, serving)
}

fn addresses(message: &Message) -> Vec<String> {
    message
        .answers
        .iter()
        .filter(|record| record.record_type() == RecordType::A)
        .map(|r| r.data.to_string())
        .collect()
}

#[tokio::test]
async fn udp_and_tcp_give_the_same_answers_and_tcp_all_of_them() {
    let (server, _) = serve().await;
    let asked = question("web.n.svc.cluster.local.", RecordType::A);
    assert_eq!(addresses(&ask_udp(server, &asked).await), ["10.96.0.1"]);
    let many = question("many.n.svc.cluster.local.", RecordType::A);
    let mut stream = TcpStream::connect(server).await.unwrap();
    stream.write_all(&[framed(&asked), framed(&many)].concat()).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(addresses(&read_framed(&mut stream).await), ["10.96.0.1"]);
    let whole = read_framed(&mut stream).await;
    assert_eq!((whole.answers.len(), whole.metadata.truncation), (200, false));
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0, "the server closes after the last answer");
}

#[tokio::test]
async fn other_names_come_from_upstream_with_the_case_of_each_client() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(60, false).await);
    forwarder.servers().set(&[upstream], &[server]);
    let reply = ask_udp(server, &question("www.EXAMPLE.com.", RecordType::A)).await;
    assert_eq!(addresses(&reply), ["192.0.2.9"]);
    assert!(!reply.metadata.authoritative && reply.metadata.recursion_available);
    serving.abort();
    let reply = ask_udp(server, &with_size(question("WWW.example.com.", RecordType::A), 1232)).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail, "with DO it is another question");
    let reply = ask_udp(server, &question("WWW.example.com.", RecordType::A)).await;
    assert_eq!(addresses(&reply), ["192.0.2.9"], "from the cache");
    assert_eq!(reply.answers[0].name.to_ascii(), "WWW.example.com.");
}

#[tokio::test]
async fn external_name_outside_the_zone_is_asked_upstream() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(60, false).await);
    let asked = question("outside.n.svc.cluster.local.", RecordType::A);
    let reply = ask_udp(server, &asked).await;
    assert_eq!(
        (reply.metadata.response_code, reply.answers.len()),
        (ResponseCode::ServFail, 0),
        "not an empty NOERROR, which clients would keep"
    );
    forwarder.servers().set(&[upstream], &[]);
    let reply = ask_udp(server, &asked).await;
    assert_eq!(reply.answers[0].record_type(), RecordType::CNAME);
    assert_eq!(reply.answers[0].data.to_string(), "www.Example.com.");
    assert_eq!(addresses(&reply), ["192.0.2.9"]);
    serving.abort();
}

#[tokio::test]
async fn denial_of_the_target_of_an_external_name_keeps_the_alias() {
    let (server, forwarder) = serve().await;
    forwarder.servers().set(&[late_upstream(Duration::ZERO, ResponseCode::NXDomain).await], &[]);
    let reply = ask_udp(server, &question("outside.n.svc.cluster.local.", RecordType::A)).await;
    let types: Vec<RecordType> = reply.answers.iter().map(Record::record_type).collect();
    assert_eq!((reply.metadata.response_code, types), (ResponseCode::NXDomain, vec![RecordType::CNAME]));
}

#[tokio::test]
async fn failure_of_the_upstream_behind_an_external_name_is_servfail() {
    for code in [ResponseCode::Refused, ResponseCode::ServFail, ResponseCode::NotImp] {
        let (server, forwarder) = serve().await;
        forwarder.servers().set(&[late_upstream(Duration::ZERO, code).await], &[]);
        let reply = ask_udp(server, &question("outside.n.svc.cluster.local.", RecordType::A)).await;
        assert_eq!(
            (reply.metadata.response_code, reply.answers.len()),
            (ResponseCode::ServFail, 0),
            "{code}"
        );
        assert!(!reply.metadata.authoritative, "{code}");
        let plain = ask_udp(server, &question("other.example.com.", RecordType::A)).await;
        assert_eq!(plain.metadata.response_code, code, "the name itself is the upstream's");
    }
}

#[tokio::test]
async fn truncated_upstream_answer_is_asked_again_over_tcp() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(60, true).await);
    forwarder.servers().set(&[upstream], &[]);
    let reply = ask_udp(server, &question("www.example.com.", RecordType::A)).await;
    assert_eq!((addresses(&reply), reply.metadata.truncation), (vec!["192.0.2.9".to_owned()], false));
    serving.abort();
}

#[tokio::test]
async fn silent_upstream_delays_an_answer_by_half_a_second_at_most() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(60, false).await);
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    forwarder.servers().set(&[silent.local_addr().unwrap(), upstream], &[]);
    for number in 0..6 {
        let start = Instant::now();
        let asked = question(&format!("n{number}.example.com."), RecordType::A);
        assert_eq!(addresses(&ask_udp(server, &asked).await), ["192.0.2.9"]);
        assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    }
    serving.abort();
}

/// An upstream server that answers after `delay` with this code, and with an address if the code is NOERROR.
pub(crate) async fn late_upstream(delay: Duration, code: ResponseCode) -> SocketAddr {
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = udp.local_addr().unwrap();
    let udp = Arc::new(udp);
    tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        loop {
            let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
            let asked = Message::from_vec(&buffer[..length]).unwrap();
            let mut reply = Message::response(asked.metadata.id, OpCode::Query);
            reply.add_query(asked.queries[0].clone());
            reply.metadata.response_code = code;
            if code == ResponseCode::NoError {
                let data = RData::A(A([192, 0, 2, 9].into()));
                reply.add_answer(Record::from_rdata(asked.queries[0].name.clone(), 60, data));
            }
            let udp = Arc::clone(&udp);
            tokio::spawn(async move {
                sleep(delay).await;
                udp.send_to(&reply.to_vec().unwrap(), client).await.unwrap();
            });
        }
    });
    address
}

#[tokio::test]
async fn refusing_upstream_does_not_hide_a_slow_one() {
    let (server, forwarder) = serve().await;
    let slow = late_upstream(Duration::from_millis(800), ResponseCode::NoError).await;
    let refusing = late_upstream(Duration::ZERO, ResponseCode::Refused).await;
    forwarder.servers().set(&[slow, refusing], &[]);
    for number in 0..8 {
        let asked = question(&format!("n{number}.example.com."), RecordType::A);
        assert_eq!(addresses(&ask_udp(server, &asked).await), ["192.0.2.9"]);
    }
}

#[tokio::test]
async fn silent_upstreams_fail_a_question_before_glibc_gives_up() {
    let (server, forwarder) = serve().await;
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
    }
    let servers: Vec<_> = silent.iter().map(|socket| socket.local_addr().unwrap()).collect();
    forwarder.servers().set(&servers, &[]);
    let start = Instant::now();
    let reply = ask_udp(server, &question("www.example.com.", RecordType::A)).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn expired_answer_serves_while_the_upstream_is_away() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(1, false).await);
    forwarder.servers().set(&[upstream], &[]);
    let asked = question("www.example.com.", RecordType::A);
    assert_eq!(addresses(&ask_udp(server, &asked).await), ["192.0.2.9"]);
    serving.abort();
    sleep(Duration::from_millis(1100)).await;
    let reply = ask_udp(server, &asked).await;
    assert_eq!((addresses(&reply), reply.answers[0].ttl), (vec!["192.0.2.9".to_owned()], 30));
    let unknown = ask_udp(server, &question("other.example.com.", RecordType::A)).await;
    assert_eq!(unknown.metadata.response_code, ResponseCode::ServFail);
}

#[tokio::test]
async fn upstream_that_leads_back_is_not_used_while_it_does() {
    let ((server, forwarder), (good, serving)) = (serve().await, upstream(60, false).await);
    // Another server, which forwards everything to the first one.
    let (relay, relay_forwarder) = serve().await;
    relay_forwarder.servers().set(&[server], &[]);
    forwarder.servers().set(&[relay, good, server], &[server]);
    assert_eq!(*forwarder.servers().usable(), [relay, good], "our own address is never used");
    assert_eq!(forwarder.servers().find_loops().await, [relay]);
    assert_eq!(*forwarder.servers().usable(), [good]);
    relay_forwarder.servers().set(&[good], &[]);
    assert_eq!(forwarder.servers().find_loops().await, []);
    assert_eq!(*forwarder.servers().usable(), [relay, good], "the loop has ended");
    relay_forwarder.servers().set(&[server], &[]);
    assert_eq!(forwarder.servers().find_loops().await, [relay], "and begins again");
    serving.abort();
}

/// A server that does not implement EDNS, and leaves the question out of its error.
#[tokio::test]
async fn server_without_edns_is_asked_again_without() {
    let (server, forwarder) = serve().await;
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    forwarder.servers().set(&[udp.local_addr().unwrap()], &[]);
    let serving = tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        loop {
            let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
            let asked = Message::from_vec(&buffer[..length]).unwrap();
            let mut reply = Message::response(asked.metadata.id, OpCode::Query);
            if asked.edns.is_some() {
                reply.metadata.response_code = ResponseCode::FormErr;
            } else {
                reply.add_query(asked.queries[0].clone());
                let data = RData::A(A([192, 0, 2, 9].into()));
                reply.add_answer(Record::from_rdata(asked.queries[0].name.clone(), 60, data));
            }
            udp.send_to(&reply.to_vec().unwrap(), client).await.unwrap();
        }
    });
    let reply = ask_udp(server, &question("www.example.com.", RecordType::A)).await;
    assert_eq!(addresses(&reply), ["192.0.2.9"]);
    serving.abort();
}

#[tokio::test]
async fn questions_without_recursion_are_answered_for_our_names_only() {
    let ((server, forwarder), (upstream, serving)) = (serve().await, upstream(60, false).await);
    forwarder.servers().set(&[upstream], &[]);
    for (name, code, answers) in [
        ("www.example.com.", ResponseCode::Refused, 0),
        ("web.n.svc.cluster.local.", ResponseCode::NoError, 1),
        // The alias, but not the address of its target.
        ("outside.n.svc.cluster.local.", ResponseCode::NoError, 1),
    ] {
        let mut asked = question(name, RecordType::A);
        asked.metadata.recursion_desired = false;
        let reply = ask_udp(server, &asked).await;
        assert_eq!((reply.metadata.response_code, reply.answers.len()), (code, answers), "{name}");
    }
    serving.abort();
}

#[tokio::test]
async fn burst_of_queries_is_answered_whole() {
    // Number of queries: more than fit into the default receive buffer, but fewer than fit into the largest buffer that
    // an unprivileged process may set.
    const BURST: usize = 400;
    let (server, _) = serve().await;
    let asked = question("web.n.svc.cluster.local.", RecordType::A).to_vec().unwrap();
    let clients: Vec<std::net::UdpSocket> =
        (0..20).map(|_| std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).collect();
    // The test has one thread: the server reads nothing before the burst is complete.
    for number in 0..BURST {
        clients[number % clients.len()].send_to(&asked, server).unwrap();
    }
    let mut answers = 0;
    for client in clients {
        client.set_nonblocking(true).unwrap();
        let client = UdpSocket::from_std(client).unwrap();
        while timeout(Duration::from_millis(500), client.recv(&mut [0; 512])).await.is_ok() {
            answers += 1;
        }
    }
    assert_eq!(answers, BURST);
}

#[tokio::test]
async fn queries_that_waited_while_the_process_was_stopped_are_discarded() {
    let (server, _) = serve().await;
    let asked = question("web.n.svc.cluster.local.", RecordType::A);
    assert_eq!(addresses(&ask_udp(server, &asked).await), ["10.96.0.1"]);
    let client = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    client.set_nonblocking(true).unwrap();
    client.send_to(&asked.to_vec().unwrap(), server).unwrap();
    // The test has one thread, which the server needs.
    std::thread::sleep(Duration::from_millis(2_100));
    let client = UdpSocket::from_std(client).unwrap();
    let answered = timeout(Duration::from_millis(500), client.recv(&mut [0; 512])).await;
    assert!(answered.is_err(), "{answered:?}");
    assert_eq!(addresses(&ask_udp(server, &asked).await), ["10.96.0.1"], "a new query");
}

#[tokio::test]
async fn client_outside_of_the_allowed_networks_is_refused() {
    let access = Access { allowed: vec!["192.0.2.0/24".parse().unwrap()], rate: None, hosts: Vec::new() };
    let (server, _) = serve_with(names(), access).await;
    let asked = question("web.n.svc.cluster.local.", RecordType::A);
    let reply = ask_udp(server, &asked).await;
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::Refused, 0));
    let mut stream = TcpStream::connect(server).await.unwrap();
    stream.write_all(&framed(&asked)).await.unwrap();
    let read = timeout(Duration::from_secs(5), stream.read(&mut [0; 1])).await.unwrap();
    assert!(!matches!(read, Ok(1..)), "the server closes the connection");
}

#[tokio::test]
async fn one_client_cannot_take_all_connections() {
    let (server, _) = serve().await;
    let mut held = Vec::new();
    for _ in 0..64 {
        held.push(TcpStream::connect(server).await.unwrap());
    }
    let asked = framed(&question("web.n.svc.cluster.local.", RecordType::A));
    for stream in &mut held {
        stream.write_all(&asked).await.unwrap();
        read_framed(stream).await;
    }
    let mut one_more = TcpStream::connect(server).await.unwrap();
    drop(one_more.write_all(&asked).await);
    let read = timeout(Duration::from_secs(5), one_more.read(&mut [0; 1])).await.unwrap();
    assert!(!matches!(read, Ok(1..)), "the server closes the connection");
    let from = tokio::net::TcpSocket::new_v4().unwrap();
    from.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = from.connect(server).await.unwrap();
    other.write_all(&asked).await.unwrap();
    assert_eq!(addresses(&read_framed(&mut other).await), ["10.96.0.1"], "another client has a place");
}

#[tokio::test]
async fn slow_question_of_a_connection_does_not_delay_the_others() {
    let (server, forwarder) = serve().await;
    let slow = late_upstream(Duration::from_millis(1500), ResponseCode::NoError).await;
    forwarder.servers().set(&[slow], &[]);
    let mut stream = TcpStream::connect(server).await.unwrap();
    let [first, mut second] =
        ["www.example.com.", "web.n.svc.cluster.local."].map(|name| question(name, RecordType::A));
    second.metadata.id = 2;
    stream.write_all(&[framed(&first), framed(&second)].concat()).await.unwrap();
    stream.shutdown().await.unwrap();
    let start = Instant::now();
    assert_eq!(read_framed(&mut stream).await.metadata.id, 2, "the answer that is known comes first");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let reply = read_framed(&mut stream).await;
    assert_eq!((reply.metadata.id, addresses(&reply)), (4711, vec!["192.0.2.9".to_owned()]));
}

#[tokio::test]
async fn equal_questions_of_many_clients_are_one_upstream() {
    let (server, forwarder) = serve().await;
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    forwarder.servers().set(&[udp.local_addr().unwrap()], &[]);
    let clients: Vec<_> = (0..50)
        .map(|number| {
            let name = if number % 2 == 0 { "www.example.com." } else { "WWW.Example.com." };
            let asked = question(name, RecordType::A);
            tokio::spawn(async move { (name, ask_udp(server, &asked).await) })
        })
        .collect();
    let mut buffer = vec![0; 4096];
    let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
    sleep(Duration::from_millis(500)).await;
    let asked = Message::from_vec(&buffer[..length]).unwrap();
    let mut reply = Message::response(asked.metadata.id, OpCode::Query);
    reply.add_query(asked.queries[0].clone());
    let data = RData::A(A([192, 0, 2, 9].into()));
    reply.add_answer(Record::from_rdata(asked.queries[0].name.clone(), 60, data));
    udp.send_to(&reply.to_vec().unwrap(), client).await.unwrap();
    for client in clients {
        let (name, reply) = client.await.unwrap();
        assert_eq!(addresses(&reply), ["192.0.2.9"]);
        assert_eq!(reply.answers[0].name.to_ascii(), name);
    }
    assert!(udp.try_recv_from(&mut buffer).is_err(), "the server was asked once");
}

#[tokio::test]
async fn failure_is_remembered_for_a_moment() {
    let (server, forwarder) = serve().await;
    let failing = late_upstream(Duration::from_millis(300), ResponseCode::ServFail).await;
    forwarder.servers().set(&[failing], &[]);
    let asked = question("www.example.com.", RecordType::A);
    let time = || async {
        let start = Instant::now();
        assert_eq!(ask_udp(server, &asked).await.metadata.response_code, ResponseCode::ServFail);
        start.elapsed()
    };
    assert!(time().await >= Duration::from_millis(300));
    let again = time().await;
    assert!(again < Duration::from_millis(250), "{again:?}: without asking upstream");
    sleep(Duration::from_millis(1100)).await;
    assert!(time().await >= Duration::from_millis(300), "the failure has expired");
}
