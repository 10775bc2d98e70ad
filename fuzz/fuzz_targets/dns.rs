//! Fuzzes the DNS server: neither the bytes of a query nor those of an upstream server's answer make it panic. The DNS
//! server's answer can be parsed and has the query's ID. If the answer contains a question, that question is the
//! query's, and the answer has at most `LIMIT` bytes. The input is two bytes with the length of the query, the query,
//! and the answer of the upstream server.
#![no_main]

use std::sync::LazyLock;

use hickory_proto::op::{Message, MessageType};
use lb_core::{
    dns::{NameChange, NamedEndpoint, NamedPort, NamedService, NamedSlice, Target, Zone},
    model::ObjectName,
    protocol::Protocol,
};
use lb_dns::{Names, respond};
use libfuzzer_sys::fuzz_target;

/// The largest answer over UDP.
const LIMIT: usize = 1232;
/// Size of a message's header, in bytes.
const HEADER: usize = 12;

static NAMES: LazyLock<Names> = LazyLock::new(names);

fuzz_target!(|input: &[u8]| {
    let Some((length, rest)) = input.split_first_chunk::<2>() else { return };
    let (query, upstream) = rest.split_at(usize::from(u16::from_be_bytes(*length)).min(rest.len()));
    let Some(answer) = respond(&NAMES, query, Some(upstream)) else { return };
    assert_eq!(answer[..2], query[..2], "the ID");
    let message = Message::from_vec(&answer).expect("the server sends messages that can be read");
    assert_eq!(message.metadata.message_type, MessageType::Response);
    if let Some(question) = message.queries.first() {
        assert!(answer.len() <= LIMIT, "{} bytes", answer.len());
        let asked = Message::from_vec(query).expect("a question in the answer is that of the query");
        assert!(question.name.eq_case(&asked.queries[0].name));
        assert_eq!(
            (question.query_type, asked.edns.is_some()),
            (asked.queries[0].query_type, message.edns.is_some())
        );
        let written = asked.queries[0].name.len() + 4;
        assert!(answer.len() >= HEADER + written - 1);
    }
});

/// A Service of each kind in the namespace `n`.
fn names() -> Names {
    let names = Names::new(Zone::new("cluster.local", 5).expect("a domain name"));
    let port = |port| NamedPort { name: "http".into(), protocol: Protocol::Tcp, port };
    let service = |name: &str, target| {
        let service = NamedService { target, ports: vec![port(80)], publishes_not_ready: false };
        NameChange::Service(ObjectName::new("n", name), Some(service))
    };
    let endpoint = |last| NamedEndpoint { address: [10, 244, 0, last].into(), hostname: None, ready: true };
    let owner = ObjectName::new("n", "db");
    let endpoints = (0..200).map(endpoint).collect();
    let slice = NamedSlice { service: owner.clone(), ports: vec![port(8080)], endpoints };
    names.apply([
        service("web", Target::ClusterIps(vec![[10, 96, 0, 1].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 1].into()])),
        service("db", Target::Endpoints),
        NameChange::Slice(owner, Some(slice)),
        service("away", Target::Name("www.example.com".into())),
        service("near", Target::Name("web.n.svc.cluster.local".into())),
        service("loop", Target::Name("loop.n.svc.cluster.local".into())),
        service("long", Target::Name("x".repeat(64).into())),
    ]);
    names.set_ranges(vec!["10.96.0.0/12".parse().expect("a network")]);
    names.set_synchronised();
    names
}
