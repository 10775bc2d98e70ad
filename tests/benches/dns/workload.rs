//! The Services, as manifests for the agent, as a zone for another server, and as queries.

use std::{
    fmt::{self, Write as _},
    net::Ipv4Addr,
};

use serde::Serialize;

/// The domain of all names.
pub(crate) const ZONE: &str = "cluster.local";
const FIRST_CLUSTER_IP: u32 = u32::from_be_bytes([10, 96, 1, 0]);
const FIRST_ENDPOINT: u32 = u32::from_be_bytes([11, 0, 0, 1]);
/// Number of Services in one manifest.
const PER_FILE: u32 = 100;
const PORT: u16 = 8080;

/// Services with even numbers have a cluster IP, the others are headless. All have a port `http`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Workload {
    pub(crate) services: u32,
    /// Number of endpoints of each Service.
    pub(crate) endpoints: u32,
}

/// A kind of query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Kind {
    ClusterIp,
    NoData,
    Headless,
    Srv,
    Negative,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] =
        [Self::ClusterIp, Self::NoData, Self::Headless, Self::Srv, Self::Negative];

    /// The record type that the queries ask for.
    pub(crate) const fn record(self) -> &'static str {
        match self {
            Self::ClusterIp | Self::Headless | Self::Negative => "A",
            Self::NoData => "AAAA",
            Self::Srv => "SRV",
        }
    }

    /// The response code of all answers.
    pub(crate) const fn code(self) -> &'static str {
        match self {
            Self::Negative => "NXDOMAIN",
            Self::ClusterIp | Self::NoData | Self::Headless | Self::Srv => "NOERROR",
        }
    }

    /// Whether the queries are about headless Services.
    const fn is_headless(self) -> bool {
        matches!(self, Self::Headless | Self::Srv)
    }

    /// The name to ask for about the Service with this number.
    pub(crate) fn name(self, number: u32) -> String {
        match self {
            Self::ClusterIp | Self::NoData | Self::Headless => full_name(number),
            Self::Srv => format!("_http._tcp.{}", full_name(number)),
            Self::Negative => format!("nothing-{}", full_name(number)),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterIp => "A of a cluster IP",
            Self::NoData => "AAAA without records",
            Self::Headless => "A, headless",
            Self::Srv => "SRV, headless",
            Self::Negative => "name that does not exist",
        })
    }
}

impl Workload {
    /// Name (without `.yaml`) and content of each manifest.
    pub(crate) fn manifests(self) -> impl Iterator<Item = (String, String)> {
        (0..self.services.div_ceil(PER_FILE)).map(move |file| {
            let numbers = file * PER_FILE..self.services.min((file + 1) * PER_FILE);
            let documents: Vec<String> = numbers.map(|number| self.yaml(number)).collect();
            (format!("services-{file:04}"), documents.join("---\n"))
        })
    }

    fn yaml(self, number: u32) -> String {
        let name = name(number);
        let ip = if is_headless(number) { "None".to_owned() } else { cluster_ip(number).to_string() };
        let endpoints: String =
            self.addresses(number).map(|address| format!("- {{addresses: [{address}]}}\n")).collect();
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {ip}, ports: [{{name: http, port: \
             {PORT}}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}-1, labels: \
             {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\nports: [{{name: http, port: \
             {PORT}}}]\nendpoints:\n{endpoints}"
        )
    }

    /// The records that the agent serves for the Services, as a zone file (RFC 1035), without reverse names.
    pub(crate) fn zone_file(self) -> String {
        let mut text = format!(
            "$ORIGIN {ZONE}.\n$TTL 5\n@ IN SOA ns.dns.{ZONE}. hostmaster.{ZONE}. 1 7200 1800 86400 5\n@ IN NS \
             ns.dns.{ZONE}.\nns.dns IN A 127.0.0.1\n"
        );
        (0..self.services).for_each(|number| self.add_records(number, &mut text));
        text
    }

    fn add_records(self, number: u32, text: &mut String) {
        let name = full_name(number);
        let mut add = |owner: &str, record: fmt::Arguments<'_>| {
            // Writing to a string never fails.
            _ = writeln!(text, "{owner}. IN {record}");
        };
        let srv = format!("_http._tcp.{name}");
        if is_headless(number) {
            let weight = 100 / self.endpoints;
            for address in self.addresses(number) {
                let host = format!("{}.{name}", address.to_string().replace('.', "-"));
                add(&name, format_args!("A {address}"));
                add(&host, format_args!("A {address}"));
                add(&name, format_args!("SRV 0 {weight} {PORT} {host}."));
                add(&srv, format_args!("SRV 0 {weight} {PORT} {host}."));
            }
        } else {
            add(&name, format_args!("A {}", cluster_ip(number)));
            add(&name, format_args!("SRV 0 100 {PORT} {name}."));
            add(&srv, format_args!("SRV 0 100 {PORT} {name}."));
        }
    }

    fn addresses(self, number: u32) -> impl Iterator<Item = Ipv4Addr> {
        let first = FIRST_ENDPOINT + number * self.endpoints;
        (first..first + self.endpoints).map(Ipv4Addr::from)
    }

    /// The numbers of the Services that queries of this kind ask for.
    pub(crate) fn asked(self, kind: Kind) -> impl Iterator<Item = u32> {
        (0..self.services).filter(move |number| is_headless(*number) == kind.is_headless())
    }

    /// The queries of this kind in random order, one per line, as dnsperf reads them.
    pub(crate) fn queries(self, kind: Kind) -> String {
        let mut numbers: Vec<u32> = self.asked(kind).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut numbers);
        numbers.into_iter().map(|number| format!("{} {}\n", kind.name(number), kind.record())).collect()
    }
}

const fn is_headless(number: u32) -> bool {
    number % 2 == 1
}

fn name(number: u32) -> String {
    format!("service-{number:05}")
}

fn full_name(number: u32) -> String {
    format!("{}.default.svc.{ZONE}", name(number))
}

fn cluster_ip(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_CLUSTER_IP + number)
}
