//! Tests what dig and musl make of the DNS server's answers.

use std::collections::BTreeSet;

use lb_tests::resolver::build_for_musl;

use super::Names;

/// Number of endpoints of the Service `crowd`: too many for an answer over UDP.
const CROWD: usize = 200;

/// Manifest of a headless Service `crowd` with many IPv4 endpoints.
fn crowd() -> String {
    let endpoint = |number| format!("- {{addresses: [10.244.8.{number}]}}\n");
    let endpoints: String = (1..=CROWD).map(endpoint).collect();
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: crowd}}\nspec: {{clusterIP: None}}\n---\napiVersion: \
         discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: crowd-1, labels: \
         {{kubernetes.io/service-name: crowd}}}}\naddressType: IPv4\nports: []\nendpoints:\n{endpoints}"
    )
}

/// A headless Service that publishes its endpoints before they are ready. It has one endpoint in each family.
const EAGER: &str = "\
apiVersion: v1
kind: Service
metadata: {name: eager}
spec: {clusterIP: None, publishNotReadyAddresses: true}
---
apiVersion: v1
kind: Endpoints
metadata: {name: eager}
subsets:
- {notReadyAddresses: [{ip: 10.244.7.1}, {ip: \"fd00:10:244:7::1\"}], ports: [{port: 80}]}
";

/// A cluster with the headless Services `db`, `eager` and `crowd`.
fn names() -> Names {
    let names = Names::new();
    names.bed.cluster.manifests.write("eager", EAGER).unwrap();
    names.bed.cluster.manifests.write("db", super::HEADLESS).unwrap();
    names.bed.cluster.manifests.write("crowd", &crowd()).unwrap();
    names.wait_for("db", &["10.244.9.1"]);
    names.wait_for("8-8-8-8.default.pod", &["8.8.8.8"]);
    names
}

impl Names {
    /// The output of dig, without empty lines, and with a single space in place of each run of spaces.
    fn dig(&self, arguments: &str) -> String {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let text = self.resolver.dig(&arguments).unwrap();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

#[test]
fn dig_finds_every_kind_of_record() {
    let names = names();
    let zone = "default.svc.cluster.local";
    for (question, answer) in [
        (format!("web.{zone} A"), "10.96.0.10".to_owned()),
        (format!("web.{zone} AAAA"), "fd00:10:96::a".to_owned()),
        (format!("db.{zone} A"), "10.244.9.1".to_owned()),
        (format!("db.{zone} AAAA"), String::new()),
        // As with CoreDNS, the two addresses of a Service share the weight, and the answer contains their equal records
        // only once.
        (format!("_http._tcp.web.{zone} SRV"), format!("0 50 80 web.{zone}.")),
        (format!("_echo._udp.web.{zone} SRV"), format!("0 50 53 web.{zone}.")),
        (format!("eager.{zone} A"), "10.244.7.1".to_owned()),
        (format!("eager.{zone} AAAA"), "fd00:10:244:7::1".to_owned()),
        (format!("_sql._tcp.db.{zone} SRV"), format!("0 100 5432 db-0.db.{zone}.")),
        (format!("db.{zone} SRV"), format!("0 100 5432 db-0.db.{zone}.")),
        (format!("alias.{zone} A"), format!("web.{zone}.\n10.96.0.10")),
        (format!("alias.{zone} CNAME"), format!("web.{zone}.")),
        ("-x 10.96.0.10".to_owned(), format!("web.{zone}.")),
        ("-x fd00:10:96::a".to_owned(), format!("web.{zone}.")),
        ("-x 10.244.9.1".to_owned(), format!("db-0.db.{zone}.")),
        ("dns-version.cluster.local TXT".to_owned(), "\"1.1.0\"".to_owned()),
        ("cluster.local NS".to_owned(), "ns.dns.cluster.local.".to_owned()),
        (format!("web.{zone} ANY"), "\"RFC8482\" \"\"".to_owned()),
    ] {
        for transport in ["+notcp", "+tcp"] {
            assert_eq!(
                names.dig(&format!("{transport} +short {question}")),
                answer,
                "{transport} {question}"
            );
        }
    }
    let question = format!("+tcp +short crowd.{zone}");
    let first = |_| names.dig(&question).lines().next().map(str::to_owned);
    let firsts: BTreeSet<Option<String>> = (0..10).map(first).collect();
    assert!(firsts.len() > 1, "the order of the addresses changes: {firsts:?}");
}

#[test]
fn dig_follows_search_paths_with_five_dots() {
    let names = names();
    for name in ["web", "web.default", "web.default.svc", "web.default.svc.cluster.local"] {
        assert_eq!(names.dig(&format!("+search +short {name}")), "10.96.0.10", "{name}");
    }
    let all = names.dig("+search +showsearch nothing.example");
    assert_eq!(all.matches("status: NXDOMAIN").count(), 3, "{all}");
}

#[test]
fn dig_sees_denials_their_ttl_and_refusals() {
    let names = names();
    for (question, status) in [
        ("nothing.default.svc.cluster.local", "NXDOMAIN"),
        ("web.default.svc.cluster.local MX", "NOERROR"),
        ("default.svc.cluster.local", "NOERROR"),
        ("version.bind CH TXT", "REFUSED"),
        ("+norecurse www.example.com", "REFUSED"),
        ("+edns=1 +noednsneg web.default.svc.cluster.local", "BADVERS"),
        ("+opcode=NOTIFY cluster.local SOA", "NOTIMP"),
    ] {
        let text = names.dig(question);
        assert!(text.contains(&format!("status: {status},")), "{question}: {text}");
    }
    for transfer in ["AXFR", "IXFR=1"] {
        let text = names.dig(&format!("cluster.local {transfer}"));
        assert!(text.contains("Transfer failed."), "{text}");
    }
    let denial = names.dig("+noall +authority nothing.default.svc.cluster.local");
    let words: Vec<&str> = denial.split(' ').collect();
    assert_eq!((words[0], words[1], words[3], words[10]), ("cluster.local.", "5", "SOA", "5"), "{denial}");
    let answer = names.dig("+noall +answer wEb.Default.SVC.cluster.LOCAL");
    assert_eq!(answer, "wEb.Default.SVC.cluster.LOCAL. 5 IN A 10.96.0.10", "the case of the question");
}

#[test]
fn dig_gets_what_fits_over_udp_and_all_over_tcp() {
    let names = names();
    let crowd = "crowd.default.svc.cluster.local";
    for (size, limit) in
        [("+noedns", 512), ("+bufsize=512", 512), ("+bufsize=900", 900), ("+bufsize=4096", 1232)]
    {
        let text = names.dig(&format!("+ignore {size} {crowd}"));
        let bytes = text.split_once("MSG SIZE rcvd: ").unwrap().1.lines().next().unwrap();
        let bytes: usize = bytes.parse().unwrap();
        assert!(bytes <= limit && bytes > limit - 16, "{size}: {text}");
        let flags = text.lines().find(|line| line.starts_with(";; flags:")).unwrap();
        assert!(flags.split(';').nth(2).unwrap().contains(" tc"), "{flags}");
        assert_eq!(text.contains("; EDNS: version: 0"), size != "+noedns", "{text}");
        // After a truncated answer over UDP, dig asks again over TCP.
        assert_eq!(names.dig(&format!("+short {size} {crowd}")).lines().count(), CROWD, "{size}");
    }
    let text = names.dig(&format!("+tcp +keepopen +short {crowd} A web.default.svc.cluster.local A"));
    assert_eq!(text.lines().count(), CROWD + 1, "two questions of one connection");
}

#[test]
fn musl_resolves_services_by_short_and_full_names() {
    let names = names();
    let program = build_for_musl(names.bed.cluster.folder()).unwrap();
    let musl = |name: &str| names.resolver.musl(&program, name).unwrap();
    for name in ["web", "web.default", "web.default.svc", "WEB.default.svc.cluster.local", "alias"] {
        assert_eq!(musl(name), ["10.96.0.10", "fd00:10:96::a"], "{name}");
    }
    assert_eq!(musl("db"), ["10.244.9.1"], "a name without AAAA records");
    assert_eq!(musl("db-0.db"), ["10.244.9.1"]);
    assert_eq!(musl("nothing.default"), [""; 0]);
    // Debian's musl does not ask over TCP, but uses the addresses that fit into the UDP answer.
    assert!(musl("crowd").len() >= 20, "{:?}", musl("crowd"));
}
