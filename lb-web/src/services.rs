//! The table of service ports: rates and sparklines from successive readings; search, order and paging.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use lb_core::traffic::{Tally, Traffic};
use serde::{Deserialize, Serialize};

use crate::{history::to_f64, source::ServicePort};

/// Maximum number of values in a sparkline.
const SPARK: usize = 30;
/// Maximum number of rows in one answer.
const MOST_ROWS: usize = 200;

/// The service ports of the last reading.
#[derive(Debug, Default)]
pub(crate) struct Services {
    ports: BTreeMap<u32, Port>,
    readings: u64,
}

#[derive(Debug)]
struct Port {
    port: ServicePort,
    rates: Rates,
    backends: BTreeMap<SocketAddr, Rates>,
    spark: VecDeque<u64>,
}

/// The traffic of a service port or backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rates {
    active: u64,
    /// New flows per second.
    new_flows: f64,
    /// Packets per second in both directions.
    packets: f64,
    /// Bytes per second in both directions.
    bytes: f64,
}

impl Rates {
    fn of(traffic: Traffic, active: u64, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64().max(0.001);
        let rate = |count: u64| (to_f64(count) / seconds * 10.0).round() / 10.0;
        let Traffic { flows, sent, answered } = traffic;
        Self {
            active,
            new_flows: rate(flows),
            packets: rate(sent.packets + answered.packets),
            bytes: rate(sent.bytes + answered.bytes),
        }
    }
}

/// How well a service port is served, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Health {
    /// No backend: new connections fail.
    Down,
    /// At least one endpoint fails its health check, but there are backends.
    Unhealthy,
    /// All backends are terminating.
    Draining,
    /// At least one backend is ready, and no endpoint fails its health check.
    Up,
}

impl Health {
    fn of(port: &ServicePort) -> Self {
        match (port.ready, port.terminating, port.unhealthy) {
            (0, 0, _) => Self::Down,
            (_, _, 1..) => Self::Unhealthy,
            (0, _, 0) => Self::Draining,
            (_, _, 0) => Self::Up,
        }
    }
}

/// A column by which rows are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Column {
    /// The worst health first; with the same health, the most bytes per second first.
    #[default]
    Health,
    Name,
    Backends,
    Active,
    NewFlows,
    Packets,
    Bytes,
}

/// Which rows an answer has.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    /// The search text. A service port is found if `namespace/name:port`, the name of the port, or a frontend contains
    /// this text, regardless of capitals.
    q: String,
    sort: Column,
    /// Whether the order of the column is reversed.
    reverse: bool,
    offset: usize,
    limit: usize,
}

/// Rows of the table.
#[derive(Debug, Serialize)]
pub(crate) struct Page<'a> {
    /// Service ports in the kernel.
    total: usize,
    /// How many of the service ports the search finds.
    matched: usize,
    /// How many of all service ports have no ready backend.
    unready: usize,
    /// How many of all service ports have endpoints that fail their health check.
    unhealthy: usize,
    /// Whether there are at least two readings. Before the second reading, all rates are 0; so are the rates of a
    /// service port that only the last reading has.
    rated: bool,
    rows: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    id: u32,
    namespace: &'a str,
    name: &'a str,
    port: u16,
    port_name: &'a str,
    protocol: &'static str,
    address: Option<SocketAddr>,
    frontends: usize,
    ready: usize,
    terminating: usize,
    unhealthy: usize,
    health: Health,
    #[serde(flatten)]
    rates: Rates,
    /// Bytes per second of the last readings, oldest first.
    spark: &'a VecDeque<u64>,
}

impl Services {
    /// Replaces the service ports by a reading that was taken `elapsed` after the previous reading.
    pub(crate) fn update(&mut self, ports: Vec<ServicePort>, elapsed: Duration) {
        let mut before = std::mem::take(&mut self.ports);
        self.readings += 1;
        for port in ports {
            let earlier = before.remove(&port.id);
            self.ports.insert(port.id, Port::new(port, earlier, elapsed));
        }
    }

    /// The rows that the browser has asked for.
    pub(crate) fn page(&self, wanted: &Wanted) -> Page<'_> {
        let search = wanted.q.trim().to_lowercase();
        let mut found: Vec<&Port> = self.ports.values().filter(|port| port.is_found_by(&search)).collect();
        found.sort_by(|a, b| {
            let order = a.compare(b, wanted.sort);
            if wanted.reverse { order.reverse() } else { order }
        });
        let limit = wanted.limit.min(MOST_ROWS);
        Page {
            total: self.ports.len(),
            matched: found.len(),
            unready: self.ports.values().filter(|port| port.port.ready == 0).count(),
            unhealthy: self.ports.values().filter(|port| port.port.unhealthy > 0).count(),
            rated: self.readings > 1,
            rows: found.into_iter().skip(wanted.offset).take(limit).map(Port::row).collect(),
        }
    }

    /// The traffic of a service port and of its backends.
    pub(crate) fn rates(&self, id: u32) -> Option<ServiceRates<'_>> {
        self.ports.get(&id).map(|port| ServiceRates {
            rates: port.rates,
            spark: &port.spark,
            backends: &port.backends,
        })
    }
}

/// The traffic of a service port and of its backends.
#[derive(Debug, Serialize)]
pub(crate) struct ServiceRates<'a> {
    #[serde(flatten)]
    rates: Rates,
    spark: &'a VecDeque<u64>,
    backends: &'a BTreeMap<SocketAddr, Rates>,
}

impl Port {
    fn new(port: ServicePort, earlier: Option<Self>, elapsed: Duration) -> Self {
        let nothing = Tally::default();
        let backend = |(socket, tally): (&SocketAddr, &Tally)| {
            let before = earlier.as_ref().map(|earlier| earlier.port.traffic.get(socket).unwrap_or(&nothing));
            // The first reading of a service port has no earlier totals to subtract.
            let traffic = before.map_or_else(Traffic::default, |before| tally.total - before.total);
            (*socket, traffic, tally.active)
        };
        let backends: Vec<_> = port.traffic.iter().map(backend).collect();
        let (mut traffic, mut active) = (Traffic::default(), 0);
        for (_, of_backend, flows) in &backends {
            traffic += *of_backend;
            active += flows;
        }
        let rates = Rates::of(traffic, active, elapsed);
        let rate = |(socket, traffic, active)| (socket, Rates::of(traffic, active, elapsed));
        let backends = backends.into_iter().map(rate).collect();
        let is_first = earlier.is_none();
        let mut spark = earlier.map(|earlier| earlier.spark).unwrap_or_default();
        if !is_first {
            spark.push_back(whole(rates.bytes));
        }
        if spark.len() > SPARK {
            spark.pop_front();
        }
        Self { port, rates, backends, spark }
    }

    fn is_found_by(&self, search: &str) -> bool {
        let ServicePort { namespace, name, port_name, frontends, port, .. } = &self.port;
        let text = format!("{namespace}/{name}:{port} {port_name}").to_lowercase();
        text.contains(search) || frontends.iter().any(|frontend| frontend.to_string().contains(search))
    }

    fn compare(&self, other: &Self, column: Column) -> Ordering {
        let (a, b) = (&self.rates, &other.rates);
        let by_column = match column {
            Column::Health => {
                Health::of(&self.port).cmp(&Health::of(&other.port)).then(b.bytes.total_cmp(&a.bytes))
            }
            Column::Name => Ordering::Equal,
            Column::Backends => other.port.ready.cmp(&self.port.ready),
            Column::Active => b.active.cmp(&a.active),
            Column::NewFlows => b.new_flows.total_cmp(&a.new_flows),
            Column::Packets => b.packets.total_cmp(&a.packets),
            Column::Bytes => b.bytes.total_cmp(&a.bytes),
        };
        let name = |port: &'_ ServicePort| (port.namespace.clone(), port.name.clone(), port.port, port.id);
        by_column.then_with(|| name(&self.port).cmp(&name(&other.port)))
    }

    fn row(&self) -> Row<'_> {
        let ServicePort {
            id,
            namespace,
            name,
            port,
            port_name,
            protocol,
            frontends,
            ready,
            terminating,
            unhealthy,
            ..
        } = &self.port;
        Row {
            id: *id,
            namespace,
            name,
            port: *port,
            port_name,
            protocol,
            address: frontends.first().copied(),
            frontends: frontends.len(),
            ready: *ready,
            terminating: *terminating,
            unhealthy: *unhealthy,
            health: Health::of(&self.port),
            rates: self.rates,
            spark: &self.spark,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate of bytes is far below 2^64"
)]
fn whole(rate: f64) -> u64 {
    rate.round() as u64
}

#[cfg(test)]
mod tests {
    use lb_core::traffic::Volume;
    use serde_json::{Value, json};

    use super::*;

    fn port(id: u32, name: &str, ready: usize, terminating: usize) -> ServicePort {
        ServicePort {
            id,
            namespace: "default".to_owned(),
            name: name.to_owned(),
            port: 80,
            port_name: "http".to_owned(),
            protocol: "TCP",
            frontends: vec![([10, 96, 0, 10], 80).into()],
            ready,
            terminating,
            unhealthy: 0,
            traffic: BTreeMap::new(),
        }
    }

    fn busy(mut port: ServicePort, flows: u64, packets: u64, bytes: u64) -> ServicePort {
        let sent = Volume { packets, bytes };
        let total = Traffic { flows, sent, ..Traffic::default() };
        port.traffic.insert(([10, 1, 0, 5], 8080).into(), Tally { total, active: 3 });
        port
    }

    /// Four service ports, one of them with 10 flows, 200 packets and 1.2 MB each second.
    fn services() -> Services {
        let at = |flows, packets, bytes| {
            let ports = [port(1, "idle", 2, 0), port(2, "down", 0, 0), port(3, "ending", 0, 1)];
            ports.into_iter().chain([busy(port(4, "web", 2, 0), flows, packets, bytes)]).collect()
        };
        let mut services = Services::default();
        services.update(at(100, 1000, 1_000_000), Duration::from_secs(2));
        services.update(at(120, 1400, 3_400_000), Duration::from_secs(2));
        services
    }

    fn page(wanted: &Wanted) -> Value {
        serde_json::to_value(services().page(wanted)).unwrap()
    }

    fn names(wanted: &Wanted) -> Vec<String> {
        let page = page(wanted);
        page["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap().to_owned()).collect()
    }

    fn wanted() -> Wanted {
        Wanted { limit: 100, ..Wanted::default() }
    }

    #[test]
    fn row_has_rates_and_a_sparkline() {
        let page = page(&Wanted { q: "WEB".to_owned(), ..wanted() });
        let expected = json!({"id": 4, "namespace": "default", "name": "web", "port": 80, "portName": "http",
            "protocol": "TCP", "address": "10.96.0.10:80", "frontends": 1, "ready": 2, "terminating": 0,
            "unhealthy": 0, "health": "up", "active": 3, "newFlows": 10.0, "packets": 200.0, "bytes": 1_200_000.0,
            "spark": [1_200_000]});
        assert_eq!(
            page,
            json!({"total": 4, "matched": 1, "unready": 2, "unhealthy": 0, "rated": true, "rows": [expected]})
        );
    }

    #[test]
    fn worst_services_come_first_then_the_busiest() {
        assert_eq!(names(&wanted()), ["down", "ending", "web", "idle"]);
    }

    #[test]
    fn unhealthy_services_come_before_those_that_drain() {
        let mut services = services();
        let sick = |id, name, ready| ServicePort { unhealthy: 1, ..port(id, name, ready, 0) };
        let ports = [port(1, "up", 2, 0), port(2, "ending", 0, 1), sick(3, "sick", 2), sick(4, "closed", 0)];
        services.update(ports.into(), Duration::from_secs(2));
        let page = serde_json::to_value(services.page(&wanted())).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let rows = page["rows"].as_array().unwrap().iter();
        let rows: Vec<_> = rows.map(|row| [&row["name"], &row["health"]].map(text)).collect();
        assert_eq!(rows, [["closed", "down"], ["sick", "unhealthy"], ["ending", "draining"], ["up", "up"]]);
        assert_eq!((&page["unready"], &page["unhealthy"]), (&json!(2), &json!(2)));
    }

    #[test]
    fn rows_are_sorted_by_a_column_and_back() {
        let by = |sort, reverse| names(&Wanted { sort, reverse, ..wanted() });
        assert_eq!(by(Column::Name, false), ["down", "ending", "idle", "web"]);
        assert_eq!(by(Column::Name, true), ["web", "idle", "ending", "down"]);
        assert_eq!(by(Column::Bytes, false)[0], "web");
        assert_eq!(by(Column::Backends, true)[0], "ending", "equal rows are reversed, too");
    }

    #[test]
    fn search_looks_at_names_and_addresses() {
        let found = |q: &str| names(&Wanted { q: q.to_owned(), ..wanted() }).len();
        assert_eq!(
            [found("default/down"), found("10.96.0.10:80"), found("http"), found("nothing")],
            [1, 4, 4, 0]
        );
    }

    #[test]
    fn answer_is_one_page() {
        assert_eq!(names(&Wanted { offset: 1, limit: 2, ..wanted() }), ["ending", "web"]);
        let mut services = Services::default();
        services.update((1..1000).map(|id| port(id, "web", 1, 0)).collect(), Duration::from_secs(1));
        let rows = services.page(&Wanted { limit: usize::MAX, ..Wanted::default() }).rows.len();
        assert_eq!(rows, MOST_ROWS);
    }

    #[test]
    fn removed_services_and_old_readings_go() {
        let mut services = services();
        for _ in 0..2 * SPARK {
            services.update(vec![port(4, "web", 1, 0)], Duration::from_secs(2));
        }
        assert_eq!(services.page(&wanted()).total, 1);
        assert_eq!(services.rates(4).unwrap().spark.len(), SPARK);
    }
}
