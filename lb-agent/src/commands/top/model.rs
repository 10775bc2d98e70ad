//! The model of `top`: rates of service ports and backends, sorted and filtered.

use std::{cmp::Ordering, collections::BTreeMap, net::SocketAddr, time::Duration};

use lb_core::{
    active_flow_slots::ServiceEndpoint,
    model::ServicePortName,
    traffic::{Tally, Traffic},
};
use serde::Serialize;

/// Names and counters that were read from the kernel at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// The names of the service ports, by their id in the maps.
    pub(super) names: BTreeMap<u32, ServicePortName>,
    /// The address and port of each backend, with the id of its service port.
    pub(super) backends: Vec<(u32, SocketAddr)>,
    /// Flow and traffic counters of each backend that had a flow recently.
    pub(super) tallies: BTreeMap<ServiceEndpoint, Tally>,
}

/// A row of the table: the traffic of a service port, or of one of its backends.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    /// `namespace/name:port/protocol`, or `address:port`.
    pub(super) name: String,
    /// Id of the service port in the maps.
    #[serde(skip)]
    pub(super) service: u32,
    pub(super) active_flows: u64,
    /// New flows per second.
    pub(super) new_flows: f64,
    /// Packets per second in both directions.
    pub(super) packets: f64,
    /// Bytes per second in both directions, including IP headers.
    pub(super) bytes: f64,
}

/// A column of the table. Rows can be sorted by it: names in ascending order, numbers in descending order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Column {
    Name,
    New,
    Packets,
    #[default]
    Bytes,
    Active,
}

impl Column {
    /// All columns, from left to right.
    pub(super) const ALL: [Self; 5] = [Self::Name, Self::New, Self::Packets, Self::Bytes, Self::Active];

    pub(super) const fn head(self) -> &'static str {
        match self {
            Self::Name => "SERVICE",
            Self::New => "NEW/S",
            Self::Packets => "PACKETS/S",
            Self::Bytes => "BYTES/S",
            Self::Active => "ACTIVE",
        }
    }

    /// The key that the user presses to sort by the column: the first letter of its head.
    pub(super) fn key(self) -> char {
        self.head().chars().next().unwrap_or_default().to_ascii_lowercase()
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let by_number = match self {
            Self::Name => Ordering::Equal,
            Self::New => b.new_flows.total_cmp(&a.new_flows),
            Self::Packets => b.packets.total_cmp(&a.packets),
            Self::Bytes => b.bytes.total_cmp(&a.bytes),
            Self::Active => b.active_flows.cmp(&a.active_flows),
        };
        by_number.then_with(|| a.name.cmp(&b.name))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    Enter,
    Escape,
    Backspace,
    Letter(char),
}

/// Whether `top` continues after a key press.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Stay,
    Quit,
}

/// The state of `top`: the last sample, the rates since the sample before, and the user's choices.
#[derive(Debug, Default)]
pub(super) struct Model {
    sample: Sample,
    rates: BTreeMap<ServiceEndpoint, (Traffic, u64)>,
    elapsed: Duration,
    pub(super) sort: Column,
    /// Only rows whose name contains this text, regardless of capitals, are shown.
    pub(super) filter: String,
    /// Whether key presses go to the filter.
    pub(super) typing: bool,
    /// Id of the service port whose backends are shown; `None` shows all service ports.
    pub(super) inside: Option<u32>,
    /// Index of the row under the cursor.
    pub(super) cursor: usize,
}

impl Model {
    /// Takes a new sample, and computes the rates since the last sample, taken `elapsed` ago.
    pub(super) fn update(&mut self, sample: Sample, elapsed: Duration) {
        let before = &self.sample.tallies;
        let rate = |(counted, tally): (&ServiceEndpoint, &Tally)| {
            let earlier = before.get(counted).map_or_else(Traffic::default, |tally| tally.total);
            (*counted, (tally.total - earlier, tally.active))
        };
        self.rates = sample.tallies.iter().map(rate).collect();
        (self.sample, self.elapsed) = (sample, elapsed);
        self.keep_in_bounds();
    }

    /// The rows to show, filtered and sorted.
    pub(super) fn rows(&self) -> Vec<Row> {
        let mut rows = match self.inside {
            Some(service) => self.backend_rows(service),
            None => self.service_rows(),
        };
        let wanted = self.filter.to_lowercase();
        rows.retain(|row| row.name.to_lowercase().contains(&wanted));
        rows.sort_by(|a, b| self.sort.compare(a, b));
        rows
    }

    pub(super) fn title(&self) -> String {
        match self.inside {
            None => "Services".to_owned(),
            Some(service) => format!("Backends of {}", self.name(service)),
        }
    }

    /// One row for each service port, with the sums of its backends.
    pub(super) fn service_rows(&self) -> Vec<Row> {
        let mut sums: BTreeMap<u32, (Traffic, u64)> =
            self.sample.names.keys().map(|id| (*id, <_>::default())).collect();
        for (counted, (traffic, active)) in &self.rates {
            if let Some(sum) = sums.get_mut(&counted.service) {
                sum.0 += *traffic;
                sum.1 += active;
            }
        }
        sums.into_iter().map(|(id, (traffic, active))| self.row(self.name(id), id, traffic, active)).collect()
    }

    /// One row for each backend of a service port, including removed ones that had a flow recently.
    pub(super) fn backend_rows(&self, service: u32) -> Vec<Row> {
        let of_maps = self.sample.backends.iter().filter(|(id, _)| *id == service);
        let mut rates: BTreeMap<SocketAddr, (Traffic, u64)> =
            of_maps.map(|(_, socket)| (*socket, <_>::default())).collect();
        for (counted, rate) in self.rates.iter().filter(|(counted, _)| counted.service == service) {
            rates.insert(SocketAddr::new(counted.address.into(), counted.port), *rate);
        }
        let row = |(socket, (traffic, active)): (SocketAddr, _)| {
            self.row(socket.to_string(), service, traffic, active)
        };
        rates.into_iter().map(row).collect()
    }

    fn name(&self, id: u32) -> String {
        self.sample.names.get(&id).map_or_else(|| format!("#{id}"), ToString::to_string)
    }

    fn row(&self, name: String, service: u32, traffic: Traffic, active_flows: u64) -> Row {
        let Traffic { flows, sent, answered } = traffic;
        let seconds = self.elapsed.as_secs_f64().max(0.001);
        #[expect(clippy::cast_precision_loss, reason = "rates are shown with at most three digits")]
        let rate = |count: u64| count as f64 / seconds;
        Row {
            name,
            service,
            active_flows,
            new_flows: rate(flows),
            packets: rate(sent.packets + answered.packets),
            bytes: rate(sent.bytes + answered.bytes),
        }
    }

    pub(super) fn press(&mut self, key: Key) -> Next {
        if self.typing {
            self.type_filter(key);
        } else if key == Key::Letter('q') {
            return Next::Quit;
        } else {
            self.command(key);
        }
        self.keep_in_bounds();
        Next::Stay
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Letter(letter) => self.filter.push(letter),
            Key::Backspace => drop(self.filter.pop()),
            Key::Enter => self.typing = false,
            Key::Escape => (self.typing, self.filter) = (false, String::new()),
            Key::Up | Key::Down => {}
        }
    }

    fn command(&mut self, key: Key) {
        match key {
            Key::Up => self.cursor = self.cursor.saturating_sub(1),
            Key::Down => self.cursor += 1,
            Key::Enter if self.inside.is_none() => {
                let service = self.rows().get(self.cursor).map(|row| row.service);
                if service.is_some() {
                    (self.inside, self.cursor, self.filter) = (service, 0, String::new());
                }
            }
            Key::Escape | Key::Backspace => {
                (self.inside, self.cursor, self.filter) = (None, 0, String::new());
            }
            Key::Letter('/') => self.typing = true,
            Key::Letter(letter) => {
                self.sort =
                    Column::ALL.into_iter().find(|column| column.key() == letter).unwrap_or(self.sort);
            }
            Key::Enter => {}
        }
    }

    fn keep_in_bounds(&mut self) {
        self.cursor = self.cursor.min(self.rows().len().saturating_sub(1));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use lb_common::Address;
    use lb_core::{
        model::{ObjectName, Protocol},
        traffic::Volume,
    };

    use super::*;

    fn backend(last: u8) -> SocketAddr {
        SocketAddr::new([10, 1, 0, last].into(), 8080)
    }

    /// A sample with two services: an idle service, and a service with two backends, of which the first has these
    /// counters.
    pub(in crate::commands::top) fn sample(flows: u64, packets: u64, bytes: u64) -> Sample {
        let name = |name: &str, port: &str| ServicePortName {
            service: ObjectName::new("default", name),
            port: port.into(),
            protocol: Protocol::Tcp,
        };
        let counted = ServiceEndpoint { service: 7, address: Address::from_v4([10, 1, 0, 5]), port: 8080 };
        let sent = Volume { packets, bytes };
        let tally = Tally { total: Traffic { flows, sent, ..Traffic::default() }, active: 3 };
        Sample {
            names: BTreeMap::from([(7, name("web", "http")), (9, name("dns", ""))]),
            backends: vec![(7, backend(5)), (7, backend(6))],
            tallies: BTreeMap::from([(counted, tally)]),
        }
    }

    /// The model after 20 flows, 400 packets and 2.4 MB in two seconds.
    pub(in crate::commands::top) fn model() -> Model {
        let mut model = Model::default();
        model.update(sample(100, 1000, 1_000_000), Duration::from_secs(2));
        model.update(sample(120, 1400, 3_400_000), Duration::from_secs(2));
        model
    }

    fn names(model: &Model) -> Vec<String> {
        model.rows().into_iter().map(|row| row.name).collect()
    }

    #[test]
    fn rates_are_differences_by_time() {
        let rows = model().rows();
        let expected = Row {
            name: "default/web:http/TCP".to_owned(),
            service: 7,
            active_flows: 3,
            new_flows: 10.0,
            packets: 200.0,
            bytes: 1_200_000.0,
        };
        assert_eq!(rows[0], expected);
        assert_eq!((rows[1].name.as_str(), rows[1].bytes), ("default/dns/TCP", 0.0));
    }

    #[test]
    fn enter_shows_the_backends_and_escape_goes_back() {
        let mut model = model();
        assert_eq!(model.press(Key::Enter), Next::Stay);
        assert_eq!(names(&model), ["10.1.0.5:8080", "10.1.0.6:8080"]);
        assert_eq!(model.title(), "Backends of default/web:http/TCP");
        model.press(Key::Enter);
        assert_eq!(model.rows().len(), 2, "there is nothing inside of backends");
        model.press(Key::Escape);
        assert_eq!(names(&model), ["default/web:http/TCP", "default/dns/TCP"]);
    }

    #[test]
    fn columns_are_sorted_by_their_first_letter() {
        let mut model = model();
        model.press(Key::Letter('s'));
        assert_eq!(names(&model), ["default/dns/TCP", "default/web:http/TCP"]);
        for key in ['n', 'p', 'b', 'a'] {
            model.press(Key::Letter(key));
            assert_eq!(names(&model), ["default/web:http/TCP", "default/dns/TCP"], "{key}");
        }
    }

    #[test]
    fn slash_starts_the_filter() {
        let mut model = model();
        for letter in "/DNSx".chars() {
            assert_eq!(model.press(Key::Letter(letter)), Next::Stay);
        }
        assert_eq!(names(&model), [""; 0]);
        model.press(Key::Backspace);
        model.press(Key::Letter('q'));
        model.press(Key::Backspace);
        model.press(Key::Enter);
        assert_eq!((names(&model), model.typing), (vec!["default/dns/TCP".to_owned()], false));
        model.press(Key::Escape);
        assert_eq!(model.rows().len(), 2);
        assert_eq!(model.press(Key::Letter('q')), Next::Quit);
    }

    #[test]
    fn cursor_stays_on_an_existing_row() {
        let mut model = model();
        for _ in 0..5 {
            assert_eq!(model.press(Key::Down), Next::Stay);
        }
        assert_eq!(model.cursor, 1);
        for _ in 0..5 {
            assert_eq!(model.press(Key::Up), Next::Stay);
        }
        assert_eq!(model.cursor, 0);
        Model::default().press(Key::Enter);
    }
}
